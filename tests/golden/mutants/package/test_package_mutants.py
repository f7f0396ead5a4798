"""The patches of the mutated packages fit, and a few of them are run; `make mutants` runs all."""

from __future__ import annotations

import pytest

from tests.golden.mutants import Mutant
from tests.golden.mutants.package import PACKAGE, ROOMS, hand_cases, killers, mutants

MUTANTS = mutants()
RUN = ("routing-key-missing", "law-trains-twice", "no-tombstone")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_patches_fit(mutant: Mutant) -> None:
    assert mutant.stage in ROOMS
    for patch in mutant.patches:
        source = (PACKAGE / patch.file).read_text(encoding="utf-8")
        assert patch.old in source, f"{patch.file} no longer holds {patch.old!r}; write the patch anew"
        assert patch.old != patch.new


@pytest.mark.parametrize("name", RUN)
def test_cases_kill_the_mutant(name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    claimed = [case for case in hand_cases(mutant.stage) if name in case["kills"]]
    assert claimed, f"no case lists {name} in its kills"
    failed = killers(mutant, claimed)
    assert [case["id"] for case in claimed if case["id"] not in failed] == []
