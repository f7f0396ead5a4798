"""Children that start a few at a time, also where none can be made: no process and no server."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import json
import time
import weakref
from typing import Any

import pytest

from miles_ref.agents import local, starts, worker_server
from miles_ref.agents.core import Act, ActKind, CoreSettings, Submission, WorkerCore
from miles_ref.agents.local import LocalCall
from miles_ref.agents.starts import Start, Starts
from miles_ref.agents.submission import Order
from miles_ref.agents.worker_server import ServerSettings, WorkerServer

MANY = 1000
"""So many that a few Python calls for each of them, one inside the other, would be too many."""


@pytest.fixture
async def loading(monkeypatch: pytest.MonkeyPatch) -> Start:
    """A start that holds the only place until it is told that it is ready."""
    monkeypatch.setattr(starts, "HELD_SECONDS", 3600)
    loop = asyncio.get_running_loop()
    monkeypatch.setitem(starts._of_loop, loop, Starts(loop, at_once=1))
    start = Start(lambda: None)
    starts.starts().ask(start)
    return start


class NoChild:
    """Stands for Child where no process can be made."""

    def __init__(self, *_: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")


class QuietChild:
    """Stands for a child of which nothing is heard."""

    pid = 4711

    def __init__(self, *_: Any) -> None: ...


class Worker:
    """A worker's server without a socket."""

    def __init__(self) -> None:
        settings = CoreSettings(max_calls=MANY)
        self.server = WorkerServer(WorkerCore(time.monotonic, settings, boot_id="boot-1"), ServerSettings())
        self.core = self.server.core

    def submit(self, call_id: str) -> None:
        submission = Submission(call_id, "module:function", None, b"content")
        assert self.core.submit(submission).status == 200
        self.server.settle(Order(submission, {}, {}), b"")

    def outcome(self, call_id: str) -> Any:
        reply = self.core.poll(call_id, 0)
        assert reply is not None
        return json.loads(reply.outcome or b"null")


async def test_many_starts_that_fail_in_a_row_are_run_one_after_the_other(loading: Start) -> None:
    ran: list[int] = []

    def ask_for_one_that_fails(number: int) -> None:
        def fail() -> None:
            start.ready()
            ran.append(number)

        start = Start(fail)
        starts.starts().ask(start)

    for number in range(MANY):
        ask_for_one_that_fails(number)
    assert ran == []
    loading.ready()
    assert ran == list(range(MANY))
    ask_for_one_that_fails(MANY)
    assert ran[-1] == MANY, "the place is free again"


async def test_a_start_keeps_nothing_of_what_it_has_started(loading: Start) -> None:
    class Arguments: ...

    arguments = Arguments()
    kept = weakref.ref(arguments)
    start = Start(functools.partial(id, arguments))
    del arguments
    starts.starts().ask(start)
    assert kept() is not None
    loading.ready()
    gc.collect()
    assert kept() is None
    start.ready()


async def test_each_call_here_whose_process_cannot_be_made_ends(
    loading: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "Child", NoChild)
    calls = [LocalCall("module:function", {}, {}, cancel_grace=60) for _ in range(MANY)]
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(call.run()) for call in calls]
        await asyncio.sleep(0)  # Each has asked for its start.
        loading.ready()
    ended = {"kind": "infra_abort", "reason": "SpawnFailed", "exit_status": None}
    assert [task.result() for task in running] == [ended] * MANY


async def test_each_call_of_a_worker_whose_process_cannot_be_made_ends_and_the_worker_drains(
    loading: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "Child", NoChild)
    worker = Worker()
    ids = [f"c{number}" for number in range(MANY)]
    for call_id in ids:
        worker.submit(call_id)
    assert worker.core.running == MANY
    loading.ready()
    assert worker.core.running == 0
    ended = {"kind": "infra_abort", "reason": "SpawnFailed", "exit_status": None}
    assert [worker.outcome(call_id) for call_id in ids] == [ended] * MANY
    for call_id in ids:
        worker.core.fetched(call_id)
    worker.server.drain()
    assert worker.server.ended.is_set()


async def test_a_call_here_has_ended_before_its_place_is_given_on(
    loading: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "Child", QuietChild)
    monkeypatch.setattr(QuietChild, "abandon", lambda self: None, raising=False)
    call = LocalCall("module:function", {}, {}, cancel_grace=60)
    running = asyncio.create_task(call.run())
    await asyncio.sleep(0)
    loading.ready()
    assert call.pid == 4711
    seen: list[int | None] = []
    following = Start(lambda: seen.append(call.pid))
    starts.starts().ask(following)
    call.gone(3)
    assert seen == [None]
    assert (await running)["exit_status"] == 3
    following.ready()


async def test_a_call_of_a_worker_has_ended_before_its_place_is_given_on(
    loading: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "Child", QuietChild)
    worker = Worker()
    worker.submit("c")
    loading.ready()
    seen: list[int] = []
    following = Start(lambda: seen.append(worker.core.running))
    starts.starts().ask(following)
    worker.server.gone("c", 3)
    assert seen == [0]
    following.ready()


async def test_a_signal_for_a_call_whose_child_is_gone_is_dropped(
    loading: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "Child", QuietChild)
    worker = Worker()
    worker.submit("c")
    loading.ready()
    worker.server.gone("c", 3)
    for kind in (ActKind.TERMINATE, ActKind.KILL, ActKind.PAUSE, ActKind.RESUME):
        worker.core.outbox.append(Act(kind, "c"))
    worker.server.settle()
    assert worker.outcome("c") == {"kind": "infra_abort", "reason": "ChildExited", "exit_status": 3}
