"""What a worker case may say beyond single requests: flags, repeating, and a restart while the old worker drains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from miles_ref.testing.cases import parse_case
from miles_ref.testing.kinds.worker import WorkerRun, repeated, run_worker_case, worker_flags

WORKER = [sys.executable, "-m", "miles_ref.worker"]


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({"keep_env": "A,B"}, ["--keep-env", "A,B"]),
        ({"keep_env": ["A", "B"]}, ["--keep-env", "A,B"]),
        ({"clean_env": True, "pass_env": ["A"]}, ["--clean-env", "--pass-env", "A"]),
        ({"allow_function": "mod:fn"}, ["--allow-function", "mod:fn"]),
        ({"allow_function": ["a:*", "b:*"]}, ["--allow-function", "a:*", "--allow-function", "b:*"]),
        ({"max_calls": 3, "cancel_grace": 0.5}, ["--max-calls", "3", "--cancel-grace", "0.5"]),
    ],
)
def test_a_config_becomes_flags(config: dict[str, Any], flags: list[str], tmp_path: Path) -> None:
    assert worker_flags(config, tmp_path) == flags


def test_what_an_until_repeats() -> None:
    expect = {"body": {"done": True}}
    poll = {"do": "poll", "call": "a", "after": 1}
    assert repeated({"do": "until", "step": {**poll, "expect": expect}}) == {**poll, "expect": expect}
    assert repeated({"do": "until", "step": {**poll, "expect": {"status": 200}}, "expect": expect}) == {
        **poll,
        "expect": {"status": 200, **expect},
    }
    assert repeated({"do": "until", "call": "a", "after": 1, "expect": expect}) == {**poll, "expect": expect}
    assert repeated({"do": "until", "step": {**poll, "expect": expect}, "save": "last"}) == {
        **poll,
        "save": "last",
        "expect": expect,
    }
    assert repeated({"do": "until", "expect": expect}) == {"do": "calls", "expect": expect}


def run(*steps: dict[str, Any], **config: Any) -> list[str]:
    return run_worker_case(
        parse_case({"id": "a/b", "kind": "worker", "input": {"config": config, "steps": list(steps)}, "expect": {}}),
        WORKER,
    )


SUBMIT = {"do": "submit", "call": "a", "fn": "block", "kwargs": {}}


@pytest.mark.parametrize("told", [[{"do": "sigterm"}], []], ids=["after-sigterm", "while-it-runs"])
def test_a_restart_waits_for_a_worker_that_drains(told: list[dict[str, Any]]) -> None:
    steps: list[dict[str, Any]] = [
        {"do": "health", "save": "before"},
        {**SUBMIT, "expect": {"status": 200}},
        {"do": "until", "call": "a", "after": 0, "wait": 0, "expect": {"body": {"state": "running"}}},
        *told,
        {"do": "restart"},
        {"do": "until", "expect": {"status": 200}},
        {"do": "poll", "call": "a", "expect": {"status": 404}},
        {"do": "health", "expect": {"body": {"boot_id": {"$not": {"$ref": "before.boot_id"}}}}},
    ]
    assert run(*steps, cancel_grace=1.0) == []


def test_a_worker_that_does_not_end_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    restart = WorkerRun._restart

    def impatient(self: WorkerRun) -> list[str]:
        # Here alone, so that the call has its time to start.
        monkeypatch.setattr("miles_ref.testing.kinds.worker.UNTIL_TIMEOUT", 0.2)
        return restart(self)

    monkeypatch.setattr(WorkerRun, "_restart", impatient)
    started = {"do": "until", "call": "a", "after": 0, "wait": 0, "expect": {"body": {"state": "running"}}}
    (found,) = run(SUBMIT, started, {"do": "sigterm"}, {"do": "restart"}, cancel_grace=60.0)
    assert found.startswith("step 3 (restart) the worker still runs after")


def test_the_flat_until_polls_until_it_holds() -> None:
    submit = {"do": "submit", "call": "a", "fn": "echo", "kwargs": {"x": 1}}
    done = {"outcome": {"kind": "ok", "value": {"x": 1}}}
    assert run(submit, {"do": "until", "call": "a", "after": 0, "wait": 0, "expect": {"body": done}}) == []


def test_a_cancel_of_one_is_true_and_a_case_may_expect_nothing() -> None:
    cancel = {"do": "poll", "call": "a", "cancel": 1}
    ended = {
        "do": "until",
        "step": {"do": "poll", "call": "a", "after": 0},
        "expect": {"body": {"outcome": {"kind": "cancelled"}}},
    }
    assert run({**SUBMIT, "fn": "wait"}, cancel, {**ended, "save": "last"}, cancel_grace=5.0) == []
    assert run({**SUBMIT, "fn": "wait"}) == []


def test_an_until_that_never_holds_shows_the_last_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_ref.testing.kinds.worker.UNTIL_TIMEOUT", 0.0)
    found = run({"do": "until", "expect": {"status": 404}})
    assert "still: status: got 200" in found[0]
    assert found[-1].startswith("step 0 (until) the last reply was 200 ")
