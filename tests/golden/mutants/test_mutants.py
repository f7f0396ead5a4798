"""Every mutant fails on each case that claims to kill it, and every case kills one."""

from __future__ import annotations

import pytest

from tests.golden.mutants import Mutant, fails, hand_cases, loaded, mutants
from tests.golden.oracle import verdict

CASES = hand_cases()
MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_cases_kill_the_mutant(mutant: Mutant) -> None:
    claimed = [case for case in CASES if mutant.name in case["kills"]]
    assert claimed, f"no case lists {mutant.name} in its kills"
    with loaded(mutant) as module:
        survived = [case["id"] for case in claimed if not fails(module, case)]
    assert not survived


def test_each_case_kills_a_known_mutant() -> None:
    known = {mutant.name for mutant in MUTANTS}
    assert len(known) == len(MUTANTS)
    assert [case["id"] for case in CASES if not case["kills"] or not set(case["kills"]) <= known] == []


def test_the_oracle_itself_fails_on_none() -> None:
    assert [case["id"] for case in CASES if verdict(case) is not None] == []
