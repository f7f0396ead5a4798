"""`python -m tests.golden.mutants.package [--all] [NAME...]`: run the hand-made cases against the mutated packages.

By default each mutant meets the cases that list it in `kills`, and every one of them must fail; with --all it meets all
cases of its kind, which takes hours. The last lines name the mutants that survive and the cases that kill none.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.golden.mutants import Mutant
from tests.golden.mutants.__main__ import argument_parser, choose

from . import hand_cases, killers, mutants


def main(arguments: list[str]) -> int:
    """The matrix, one line a mutant. 0 when every mutant is killed and every case kills one."""
    parser = argument_parser(__spec__.parent, __doc__)
    parser.add_argument("--all", action="store_true", help="against all cases of its kind, not those that name it")
    flags = parser.parse_args(arguments)
    chosen = choose(mutants(), flags.names, parser)
    bad = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, (failed, fault) in zip(
            chosen, pool.map(lambda one: judged(one, against_all=flags.all), chosen), strict=True
        ):
            print(f"{mutant.stage:8} {mutant.name:36} {len(failed):4}  {' '.join(failed[:3])}", flush=True)
            bad += [fault] if fault else []
    if not flags.names:
        bad += [f"{case['id']} kills no mutant" for case in hand_cases() if not case["kills"]]
    print("\n".join(bad) or "every mutant is killed, every case kills one")
    return 1 if bad else 0


def judged(mutant: Mutant, *, against_all: bool) -> tuple[list[str], str | None]:
    """The cases that fail on a mutant, and what is wrong with that."""
    cases = hand_cases(mutant.stage)
    claimed = [case for case in cases if mutant.name in case["kills"]]
    try:
        failed = killers(mutant, cases if against_all else claimed)
    except (LookupError, RuntimeError) as error:
        return [], str(error)
    lost = [case["id"] for case in claimed if case["id"] not in failed]
    return failed, f"{mutant.name}: {', '.join(lost) or 'no case'} should kill it" if lost or not failed else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
