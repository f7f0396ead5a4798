"""The life cycle tables, and one call's timers and outcome, by a clock that the test moves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from miles_ref.agents.machine import (
    CALLER_TABLE,
    LIVE,
    ORPHANABLE,
    WORKER_TABLE,
    Action,
    Call,
    CallerEvent,
    CallerState,
    End,
    Event,
    ImpossibleEvent,
    Machine,
    State,
    mermaid,
    outcome_fault,
)

DOCS = Path(__file__).parents[3] / "docs" / "agent-calls.md"

TIMES = {
    State.IMPORTING: 120.0,
    State.RUNNING: 120.0,
    State.ENDING: 5.0,
    State.CANCELLING: 30.0,
    State.FINISHED: 3600.0,
    State.FETCHED: 600.0,
    State.EXPIRED: 3600.0,
    State.TOMBSTONE: 1800.0,
}


def running(now: float = 0.0) -> Call:
    call = Call(TIMES)
    assert call.submit(now) == (Action.SPAWN,)
    call.started(now)
    return call


def outcome(call: Call) -> Any:
    return json.loads(call.outcome or b"null")


@pytest.mark.parametrize("table", [WORKER_TABLE, CALLER_TABLE], ids=["worker", "caller"])
def test_a_table_has_one_row_for_each_state_and_event(table: Any) -> None:
    keys = [(row.state, row.event) for row in table]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("table", "first", "states"), [(WORKER_TABLE, State.UNKNOWN, State), (CALLER_TABLE, CallerState.FRESH, CallerState)]
)
def test_every_state_is_reached(table: Any, first: Any, states: Any) -> None:
    reached = {first}
    for _ in table:
        reached |= {row.next for row in table if row.state in reached}
    assert reached == set(states)


def test_every_live_call_comes_to_an_end() -> None:
    for state in LIVE:
        row = next(row for row in WORKER_TABLE if (row.state, row.event) == (state, Event.GONE))
        assert row.next is State.FINISHED


def test_an_event_that_the_table_does_not_list_is_a_defect() -> None:
    with pytest.raises(ImpossibleEvent, match="outcome read cannot happen to a call that is unknown"):
        Call(TIMES).outcome_read(b"{}", 0.0)


def test_after_an_abort_no_submit_is_sent() -> None:
    assert not any(
        row.state in (CallerState.CLOSING, CallerState.ENDED) and row.event is CallerEvent.SUBMIT_SENT
        for row in CALLER_TABLE
    )


def test_a_call_that_may_have_been_admitted_is_never_fresh_again() -> None:
    risky = {CallerState.UNSURE, CallerState.ADMITTED, CallerState.CLOSING}
    assert not any(
        row.state in risky and row.next in (CallerState.FRESH, CallerState.SUBMITTING) for row in CALLER_TABLE
    )


@pytest.mark.parametrize("state", [s for s in CallerState if s is not CallerState.ENDED])
def test_every_caller_state_can_be_aborted(state: CallerState) -> None:
    machine: Machine[CallerState, CallerEvent, End] = Machine(CALLER_TABLE, state)
    assert machine.can(CallerEvent.ABORT)
    machine.apply(CallerEvent.ABORT)
    assert machine.state in (CallerState.CLOSING, CallerState.ENDED)


def test_the_outcome_is_fixed_when_it_was_read() -> None:
    call = running()
    call.outcome_read(b'{"kind":"ok","value":1}', 1.0)
    assert call.cancel("caller", 2.0) == ()
    call.gone(0, 3.0)
    assert outcome(call) == {"kind": "ok", "value": 1}
    assert call.cancelled_by is None


def test_a_cancel_that_was_accepted_wins_over_an_outcome() -> None:
    call = running()
    assert call.cancel("caller", 1.0) == (Action.SIGTERM,)
    call.outcome_read(b'{"kind":"ok","value":1}', 2.0)
    call.gone(0, 3.0)
    assert outcome(call) == {"kind": "cancelled", "by": "caller", "exit_status": 0}


def test_a_second_cancel_sends_no_signal_and_does_not_restart_the_grace() -> None:
    call = running()
    call.cancel("caller", 10.0)
    assert call.cancel("caller", 35.0) == ()
    assert call.deadline == 40.0
    assert call.tick(39.9) == ()
    assert call.tick(40.0) == (Action.SIGKILL,)
    call.gone(-9, 40.1)
    assert outcome(call) == {"kind": "cancelled", "by": "caller", "exit_status": -9}


def test_a_cancel_while_the_child_imports_is_a_cancel() -> None:
    call = Call(TIMES)
    call.submit(0.0)
    assert call.cancel("caller", 1.0) == (Action.SIGTERM,)
    call.started(1.5)
    call.gone(-15, 2.0)
    assert outcome(call) == {"kind": "cancelled", "by": "caller", "exit_status": -15}


@pytest.mark.parametrize("status", [0, 3, -9, None])
def test_a_child_that_ends_without_an_outcome_has_exited(status: int | None) -> None:
    call = running()
    call.gone(status, 1.0)
    assert outcome(call) == {"kind": "infra_abort", "reason": "ChildExited", "exit_status": status}


def test_a_child_that_does_not_exit_after_its_outcome_is_killed() -> None:
    call = running()
    call.outcome_read(b"{}", 1.0)
    assert call.tick(5.9) == ()
    assert call.tick(6.0) == (Action.SIGKILL,)
    assert call.state is State.ENDING


def test_the_orphan_timer_runs_from_admission_and_importing_does_not_restart_it() -> None:
    call = Call(TIMES)
    call.submit(100.0)
    call.started(150.0)
    assert call.tick(219.9) == ()
    assert call.tick(220.0) == (Action.SIGTERM,)
    assert call.cancelled_by == "orphan"


def test_a_held_poll_stops_the_orphan_timer_and_its_end_starts_it_again() -> None:
    call = running()
    call.hold()
    assert call.deadline is None
    assert call.tick(1000.0) == ()
    call.release(1000.0)
    assert call.deadline == 1120.0


def test_the_orphan_timer_does_not_run_once_a_call_is_cancelled_or_finished() -> None:
    call = running()
    call.hold()
    call.cancel("caller", 10.0)
    assert call.deadline == 40.0
    call.release(20.0)
    assert call.deadline == 40.0
    call.gone(0, 21.0)
    call.release(22.0)
    assert call.deadline == 21.0 + 3600.0


def test_a_kill_skips_the_grace_and_keeps_who_cancelled() -> None:
    call = running()
    call.cancel("caller", 1.0)
    assert call.kill("drain", 2.0) == (Action.SIGKILL,)
    call.gone(-9, 3.0)
    assert outcome(call)["by"] == "caller"


def test_an_outcome_is_kept_until_it_was_fetched_and_then_for_its_time() -> None:
    call = running()
    call.gone(0, 100.0)
    assert call.deadline == 3700.0
    call.fetched(200.0)
    call.fetched(700.0)
    assert call.deadline == 800.0
    call.tick(800.0)
    assert call.state is State.EXPIRED
    call.tick(4400.0)
    assert call.state is State.UNKNOWN


def test_only_imports_and_runs_are_orphanable() -> None:
    assert {
        row.state for row in WORKER_TABLE if row.event is Event.TIME_UP and Action.SIGTERM in row.actions
    } == ORPHANABLE


@pytest.mark.parametrize(("name", "table"), [("worker", WORKER_TABLE), ("caller", CALLER_TABLE)])
def test_the_diagrams_in_the_docs_are_the_tables(name: str, table: Any) -> None:
    block = re.search(rf"<!-- {name} table -->\n```mermaid\n(.*?)```\n<!-- end -->", DOCS.read_text(), re.DOTALL)
    assert block is not None
    assert block[1] == mermaid(table), "docs/agent-calls.md is stale: paste mermaid(table)"


ERROR = {"kind": "error", "phase": "run", "type": "ValueError", "message": "", "traceback": ""}


@pytest.mark.parametrize(
    "outcome",
    [
        {"kind": "ok", "value": None},
        {"kind": "ok", "value": True},
        ERROR,
        {"kind": "infra_abort", "reason": "ChildExited", "exit_status": -9},
        {"kind": "infra_abort", "reason": "ChildExited", "exit_status": None},
        {"kind": "cancelled", "by": "orphan", "exit_status": -15, "more": "of a later version"},
    ],
)
def test_outcomes_of_the_contract_s_form(outcome: Any) -> None:
    assert outcome_fault(outcome) is None


@pytest.mark.parametrize(
    ("outcome", "mentions"),
    [
        ("ok", "an object, not str"),
        ([], "an object, not list"),
        ({}, "kind must be one of"),
        ({"kind": "done"}, "not 'done'"),
        ({"kind": ["ok"]}, "kind must be one of"),
        ({"kind": "ok"}, "ok must have value"),
        *(({key: value for key, value in ERROR.items() if key != name}, name) for name in ERROR),
        (ERROR | {"message": None}, "message of an outcome error must not be NoneType"),
        ({"kind": "infra_abort", "reason": "X"}, "infra_abort must have exit_status"),
        ({"kind": "infra_abort", "exit_status": 1}, "infra_abort must have reason"),
        ({"kind": "infra_abort", "reason": "X", "exit_status": "1"}, "exit_status of an outcome infra_abort"),
        ({"kind": "infra_abort", "reason": "X", "exit_status": True}, "exit_status of an outcome infra_abort"),
        ({"kind": "cancelled", "by": "caller"}, "cancelled must have exit_status"),
    ],
)
def test_what_is_wrong_with_an_outcome_is_said(outcome: Any, mentions: str) -> None:
    assert mentions in (outcome_fault(outcome) or "")
