"""``python -m tests.golden.mutants [NAME...]``: runs every hand-made case against each mutant and prints what fails.

The last lines name the mutants that no case kills and the cases that kill no mutant; exit status 0 when there is none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import Mutant, fails, hand_cases, loaded, mutants


def main(arguments: list[str]) -> int:
    """The matrix, one line a mutant; all mutants where none is named."""
    parser = argument_parser(__spec__.parent, __doc__)
    names = parser.parse_args(arguments).names
    chosen = choose(mutants(), names, parser)
    cases = hand_cases()
    idle = {case["id"] for case in cases}
    survivors = []
    for mutant in chosen:
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


def argument_parser(program: str, about: str | None) -> argparse.ArgumentParser:
    """A parser of names of mutants."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=about)
    parser.add_argument("names", metavar="NAME", nargs="*", help="of a mutant; all where none is given")
    return parser


def choose(known: Sequence[Mutant], names: list[str], parser: argparse.ArgumentParser) -> list[Mutant]:
    """The mutants of these names, all where there is none. A name that no mutant has is a usage error."""
    if unknown := set(names) - {mutant.name for mutant in known}:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    return [mutant for mutant in known if not names or mutant.name in names]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
