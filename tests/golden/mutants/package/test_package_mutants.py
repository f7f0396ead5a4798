"""Every patch fits the source, and a few of the mutated packages are run; `make mutants` runs all."""

from __future__ import annotations

import pytest

from tests.golden.mutants.package import PACKAGE, ROOMS, hand_cases, killers, mutants

MUTANTS = mutants()
RUN = ("routing-key-missing", "law-trains-twice", "no-tombstone")


def test_each_belongs_to_a_room_and_breaks_one_thing() -> None:
    assert {mutant.stage for mutant in MUTANTS} == set(ROOMS)
    for mutant in MUTANTS:
        assert mutant.description.endswith(".")
        for patch in mutant.patches:
            assert (PACKAGE / patch.file).is_file()
            assert patch.old != patch.new


def test_every_patch_fits_the_source() -> None:
    for mutant in MUTANTS:
        for patch in mutant.patches:
            source = (PACKAGE / patch.file).read_text(encoding="utf-8")
            assert patch.old in source, f"mutant {mutant.name}: {patch.file} no longer holds {patch.old!r}"


@pytest.mark.parametrize("name", RUN)
def test_cases_kill_the_mutant(name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    claimed = [case for case in hand_cases(mutant.stage) if name in case["kills"]]
    assert claimed, f"no case lists {name} in its kills"
    failed = killers(mutant, claimed)
    assert [case["id"] for case in claimed if case["id"] not in failed] == []
