"""``python -m tests.golden.mutants [NAME...]``: runs every hand-made case against each mutant and prints what fails.

The last lines name the mutants that no case kills and the cases that kill no mutant; exit status 0 when there is none.
"""

from __future__ import annotations

import sys

from . import fails, hand_cases, loaded, mutants


def main(names: list[str]) -> int:
    """The matrix, one line a mutant; all mutants where none is named."""
    cases = hand_cases()
    idle = {case["id"] for case in cases}
    survivors = []
    for mutant in mutants():
        if names and mutant.name not in names:
            continue
        with loaded(mutant) as module:
            killers = [case["id"] for case in cases if fails(module, case)]
        idle -= set(killers)
        if not killers:
            survivors.append(mutant.name)
        print(f"{mutant.stage:10} {mutant.name:40} {len(killers):4}  {' '.join(killers[:3])}")
    if survivors:
        print("no case kills:", *survivors)
    if idle and not names:
        print("kill no mutant:", *sorted(idle))
    return 1 if survivors or (idle and not names) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
