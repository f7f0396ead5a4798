"""`python -m tests.golden.mutants.package [--all] [NAME...]`: run the hand-made cases against the mutated packages.

By default each mutant meets the cases that list it in `kills`, and every one of them must fail; with --all it meets all
cases of its kind, which takes an hour. The last lines name the mutants that survive and the cases that kill none.
"""

from __future__ import annotations

import sys

from . import hand_cases, killers, mutants


def main(arguments: list[str]) -> int:
    """The matrix, one line a mutant. 0 when every mutant is killed and every case kills one."""
    against_all = "--all" in arguments
    names = {name for name in arguments if not name.startswith("--")}
    bad = []
    for mutant in mutants():
        if names and mutant.name not in names:
            continue
        claimed = [case for case in hand_cases(mutant.stage) if mutant.name in case["kills"]]
        try:
            failed = killers(mutant, hand_cases(mutant.stage) if against_all else claimed)
        except (LookupError, RuntimeError) as error:
            bad.append(str(error))
            continue
        lost = [case["id"] for case in claimed if case["id"] not in failed]
        if not failed or lost:
            bad.append(f"{mutant.name}: {', '.join(lost) or 'no case'} should kill it")
        print(
            f"{mutant.stage:8} {mutant.name:36} {len(failed):4}  {' '.join(failed[: 200 if against_all else 3])}",
            flush=True,
        )
    if not names:
        bad += [f"{case['id']} kills no mutant" for case in hand_cases() if not case["kills"]]
    print("\n".join(bad) or "every mutant is killed, every case kills one")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
