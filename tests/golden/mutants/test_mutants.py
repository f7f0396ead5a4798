"""Every mutant fails on each case that claims to kill it, and every case kills one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.golden.mutants import Mutant, fails, hand_cases, loaded, mutants
from tests.golden.mutants.__main__ import main
from tests.golden.mutants.package.__main__ import main as main_of_package
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


@pytest.mark.parametrize("command", [main, main_of_package])
def test_a_name_that_no_mutant_has_is_a_usage_error(command: Callable[[list[str]], int]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["no-such-mutant"])
    assert ended.value.code == 2
