"""The window of a worker call, by a fake clock (agents.md, The caller's side)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from typing import Any

import pytest

from miles_ref.agents import AgentSettings, InfraAbort
from miles_ref.agents.abort import abort_worker_calls
from miles_ref.agents.client import IN_FLIGHT, Attempt, Content, WorkerCall, _Aborted, deliver
from miles_ref.agents.http_client import Reply, Unanswered
from miles_ref.agents.machine import CallerEvent

ATTEMPT = Attempt("http://worker", "call", "boot")
WINDOW = 10.0


class Clock:
    """The loop's time, of which only the test knows."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class Worker:
    """Gives the answers that the test lists, and then none."""

    def __init__(self, *answers: Reply) -> None:
        self.answers = list(answers)
        self.methods: list[str] = []

    async def ask(self, method: str, url: str, **more: Any) -> Reply:
        self.methods.append(method)
        if not self.answers:
            raise Unanswered("nobody", sent=True)
        return self.answers.pop(0)


def answer(status: int, retry_after: float | None = None, **body: Any) -> Reply:
    return Reply(status, {"boot_id": ATTEMPT.boot_id, **body}, retry_after)


def fresh(monkeypatch: pytest.MonkeyPatch, *urls: str, **settings: Any) -> tuple[WorkerCall, Clock]:
    how = AgentSettings(worker_urls=urls, window=WINDOW, **settings)
    call = WorkerCall(Content("m:f", {}, {}, None), how)
    clock = Clock()
    monkeypatch.setattr(call, "_loop", clock)
    monkeypatch.setattr(call, "_answered_at", clock.now)
    monkeypatch.setattr(call, "_sleep", clock.sleep)
    return call, clock


async def admitted(monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerCall, Clock]:
    call, clock = fresh(monkeypatch, ATTEMPT.url)
    monkeypatch.setattr(call, "_latest", ATTEMPT)
    call._apply(CallerEvent.SUBMIT_SENT)
    call._apply(CallerEvent.ACCEPTED)
    return call, clock


async def unreachable_at(call: WorkerCall, clock: Clock, worker: Worker) -> float:
    with pytest.raises(InfraAbort, match="WorkerUnreachable"):
        await asyncio.wait_for(call._follow(worker, ATTEMPT), 60)  # type: ignore[arg-type]
    return clock.now


async def test_without_an_answer_a_call_ends_with_the_window_after_one_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    call, clock = await admitted(monkeypatch)
    worker = Worker()
    ended = await unreachable_at(call, clock, worker)
    assert WINDOW <= ended <= WINDOW + AgentSettings().longest_pause
    assert worker.methods.count("DELETE") == 1
    assert worker.methods[-1] == "DELETE"


@pytest.mark.parametrize("asked", [0.5, WINDOW - 1, WINDOW + 1, 6 * WINDOW])
async def test_the_time_that_polls_are_to_wait_is_outside_the_window(
    monkeypatch: pytest.MonkeyPatch, asked: float
) -> None:
    call, clock = await admitted(monkeypatch)
    ended = await unreachable_at(call, clock, Worker(answer(429, asked), answer(429, asked)))
    assert 2 * asked + WINDOW <= ended <= 2 * asked + WINDOW + AgentSettings().longest_pause


async def test_the_window_counts_from_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    call, clock = await admitted(monkeypatch)
    empty = answer(200, reports=[], next=0, outcome=None)

    class Slow(Worker):
        async def ask(self, method: str, url: str, **more: Any) -> Reply:
            if self.answers:
                clock.now += 0.9 * WINDOW
            return await super().ask(method, url, **more)

    ended = await unreachable_at(call, clock, Slow(empty, empty, empty))
    assert math.isclose(ended, 2.7 * WINDOW + WINDOW, abs_tol=AgentSettings().longest_pause)


async def test_a_caller_that_stood_still_asks_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What timed out meanwhile says nothing of the worker."""
    call, clock = await admitted(monkeypatch)
    polled: list[tuple[float, str]] = []

    class Busy(Worker):
        async def ask(self, method: str, url: str, **more: Any) -> Reply:
            polled.append((more["first_byte"], url))
            if len(polled) == 1:
                clock.now += 2 * WINDOW
                raise Unanswered("timed out", sent=True)
            return await super().ask(method, url, **more)

    outcome = {"kind": "ok", "value": 1}
    worker = Busy(answer(200, reports=[], next=0, outcome=outcome))
    assert await asyncio.wait_for(call._follow(worker, ATTEMPT), 60) == outcome  # type: ignore[arg-type]
    (_, (first_byte, url)) = polled
    assert first_byte >= 1
    assert "wait=0" in url


async def test_a_result_that_is_here_is_none_that_an_abort_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort comes while the reply is read; a worker that drains may be gone after it."""
    call, _ = await admitted(monkeypatch)
    outcome = {"kind": "ok", "value": 1}

    class ReadsLong(Worker):
        async def ask(self, method: str, url: str, **more: Any) -> Reply:
            received: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            received.set_result(answer(200, reports=[], next=0, outcome=outcome))
            reply = await more["within"](received)
            call._machine.apply(CallerEvent.ABORT)
            call._aborted.set()
            await asyncio.sleep(0)
            self.answers.clear()
            return reply

    assert await asyncio.wait_for(call._follow(ReadsLong(), ATTEMPT), 60) == outcome  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ValueError("mine"), asyncio.CancelledError()])
def test_what_on_report_raises_does_not_end_the_call(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def on_report(item: Any) -> None:
        raise error

    deliver(on_report, 1)
    assert "on_report raised" in caplog.text


async def test_an_abort_leaves_a_call_whose_loop_is_closed_to_its_orphan_timer() -> None:
    loop = asyncio.new_event_loop()

    async def made() -> WorkerCall:
        return WorkerCall(Content("m:f", {}, {}, "r:1"), AgentSettings(worker_urls=(ATTEMPT.url,)))

    call = await asyncio.to_thread(loop.run_until_complete, made())
    loop.close()
    IN_FLIGHT[id(call)] = call
    await abort_worker_calls("r:1")
    assert id(call) not in IN_FLIGHT


@pytest.mark.parametrize("late", [0.0, 0.5 * WINDOW, 0.9 * WINDOW])
async def test_an_answered_health_counts_for_the_window(monkeypatch: pytest.MonkeyPatch, late: float) -> None:
    call, clock = fresh(monkeypatch, ATTEMPT.url)

    class LateHealth(Worker):
        async def ask(self, method: str, url: str, **more: Any) -> Reply:
            self.methods.append(method)
            if method == "GET" and clock.now >= late:
                answered.append(clock.now)
                return answer(200, draining=False)
            raise Unanswered("nobody", sent=True)

    answered: list[float] = []
    worker = LateHealth()
    with pytest.raises(InfraAbort, match="WorkerUnreachable"):
        await asyncio.wait_for(call._admit(worker), 60)  # type: ignore[arg-type]
    (last,) = answered
    assert last + WINDOW <= clock.now <= last + WINDOW + AgentSettings().longest_pause
    assert worker.methods[-1] == "DELETE"


async def test_each_worker_is_warned_of_once_also_at_the_same_url(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call, _ = fresh(monkeypatch, ATTEMPT.url)
    boots = ["first-of-this-test", "first-of-this-test", "second-of-this-test"]
    worker = Worker(*(answer(200, draining=False, orphan_timeout=WINDOW, boot_id=boot) for boot in boots))
    warned = []
    for _ in boots:
        await call._health(worker, ATTEMPT.url)  # type: ignore[arg-type]
        warned.append(caplog.text.count("--orphan-timeout"))
    assert warned == [1, 1, 2]


async def test_a_draining_worker_s_health_does_not_count_and_it_gets_no_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    call, clock = fresh(monkeypatch, ATTEMPT.url)
    worker = Worker(*[answer(200, draining=True)] * 100)
    with pytest.raises(InfraAbort, match="WorkerUnreachable"):
        await asyncio.wait_for(call._admit(worker), 60)  # type: ignore[arg-type]
    assert WINDOW <= clock.now <= WINDOW + AgentSettings().longest_pause
    assert set(worker.methods) == {"GET"}


async def test_an_abort_deletes_the_last_attempt_at_each_url_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = ("http://first", "http://second")
    call, _ = fresh(monkeypatch, *urls, "http://third", first_pause=0.0)
    submitted: dict[str, list[str]] = {url: [] for url in urls}
    deleted: list[str] = []

    class Full(Worker):
        async def ask(self, method: str, url: str, **more: Any) -> Reply:
            if url.startswith("http://third"):
                raise Unanswered("nobody listens", sent=False)
            match method:
                case "DELETE":
                    deleted.append(url)
                    return answer(202, state="tombstone")
                case "POST":
                    ids = submitted[url.removesuffix("/calls")]
                    ids.append(json.loads(more["body"])["call_id"])
                    if len(ids) == 3 and url.startswith(urls[1]):
                        call._begin_abort()
                    return answer(429, 0.0, code="full")
            return answer(200, draining=False)

    worker = Full()
    monkeypatch.setattr(call, "_client", lambda: contextlib.nullcontext(worker))
    monkeypatch.setattr(call, "_loop", asyncio.get_running_loop())
    with pytest.raises(_Aborted):
        await asyncio.wait_for(call._admit(worker), 60)  # type: ignore[arg-type]
    await call.abort()
    assert [len(ids) for ids in submitted.values()] == [3, 3]
    assert sorted(deleted) == [f"{url}/calls/{ids[-1]}" for url, ids in submitted.items()]
