"""agents.md, The caller's side: a real worker behind a proxy that mishandles requests."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from miles_ref.agents import AgentSettings, InfraAbort, WorkerRefusedError, WorkerReplyError, call_agent_function
from miles_ref.agents.client import IN_FLIGHT
from miles_ref.agents.http_client import Unanswered, WorkerClient
from miles_ref.errors import UsageError
from miles_ref.process import ReadyProcess
from tests.e2e.agents.proxy import (
    Act,
    Answer,
    Forward,
    Proxy,
    answer_itself,
    double,
    hold,
    hold_reply,
    lose_reply,
    lose_request,
    swallow_reply,
    swallow_request,
    truncate,
)
from tests.e2e.agents.support import AGENTS, FORGED_FRAMES, Reports, ends, shorten_window, worker_process

SHORT = 1.5
LONG = 60.0


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    with worker_process("--cancel-grace", "60") as process:
        yield process.url


@pytest.fixture
async def proxy(worker: str) -> AsyncIterator[Proxy]:
    async with Proxy(worker) as between:
        yield between


def settings(*urls: str, window: float = LONG, **more: Any) -> AgentSettings:
    return AgentSettings(worker_urls=urls, window=window, **more)


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
async def test_one_request_is_made_once(method: str) -> None:
    seen: list[bytes] = []

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(drop, "127.0.0.1", 0)
    async with server, WorkerClient(None, connect_timeout=LONG) as client:
        with pytest.raises(Unanswered) as caught:
            await client.ask(method, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/calls", silence=LONG)
    assert (caught.value.sent, len(seen)) == (True, 1)


async def call(agent: str, how: AgentSettings, on_report: Any = None, **kwargs: Any) -> Any:
    return await call_agent_function(
        AGENTS + agent, mode="worker", kwargs=kwargs, on_report=on_report, settings=how, scope="10.0.0.1:30000"
    )


async def rows(url: str) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/calls") as reply:
        return list((await reply.json())["calls"])


def submits(proxy: Proxy) -> list[dict[str, Any]]:
    return [json.loads(seen.body) for seen in proxy.seen if seen.method == "POST"]


def aborted(caught: pytest.ExceptionInfo[InfraAbort]) -> tuple[str, int | None]:
    return caught.value.reason, caught.value.exit_status


# --- how a call goes --------------------------------------------------------------------------------------------------


async def test_health_then_submit_with_its_boot_id_then_polls(proxy: Proxy) -> None:
    reports = Reports()
    assert await call("report", settings(proxy.url), reports.append, n=3) == {"reported": 3}
    assert [item["index"] for item in reports] == [0, 1, 2]
    assert [seen.method for seen in proxy.seen[:3]] == ["GET", "POST", "GET"]
    assert proxy.seen[0].path == "/health"
    (body,) = submits(proxy)
    assert set(body) == {"call_id", "boot_id", "fn", "kwargs", "env", "scope"}
    assert body["scope"] == "10.0.0.1:30000"
    assert body["boot_id"] == json.loads(proxy.answered[0][1].body)["boot_id"]
    assert proxy.seen[2].path.startswith(f"/calls/{body['call_id']}?after=0&wait=24")


async def test_two_hundred_calls_at_once(worker: str) -> None:
    values = await asyncio.gather(*(call("echo", settings(worker), number=n) for n in range(200)))
    assert [value["number"] for value in values] == list(range(200))
    assert not IN_FLIGHT


async def test_ten_thousand_reports_and_50_mib_through_the_wire(worker: str) -> None:
    reports = Reports()
    assert await call("report", settings(worker), reports.append, n=10_000) == {"reported": 10_000}
    assert [item["index"] for item in reports] == list(range(10_000))
    assert len((await call("big", settings(worker), n=50))["data"]) == 50 << 20


async def test_large_arguments_pass(worker: str) -> None:
    assert len((await call("echo", settings(worker), text="x" * (20 << 20)))["text"]) == 20 << 20


async def test_reports_beyond_the_budget_wait_for_the_caller_and_none_is_lost() -> None:
    with worker_process("--report-budget-bytes", "20000") as process:
        reports = Reports()
        assert await call("report", settings(process.url), reports.append, n=500, size=1000) == {"reported": 500}
        assert [item["index"] for item in reports] == list(range(500))


# --- single faults that a call survives -------------------------------------------------------------------------------

FAULTS: dict[str, Act] = {
    "request lost": lose_request,
    "reply lost": lose_reply,
    "request doubled": double,
    "reply truncated": truncate(10),
    "reply empty": truncate(0),
    "proxy says 404": answer_itself(404),
    "proxy says 502": answer_itself(502),
    "proxy says 503": answer_itself(503, b'{"error": "busy"}'),
    "proxy says 401": answer_itself(401),
    "proxy says 200": answer_itself(200, b'{"state": "running"}'),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("method", "part"), [("GET", "/health"), ("POST", "/calls"), ("GET", "/calls/")])
async def test_a_request_that_goes_wrong_twice_is_repeated_and_the_call_runs_once(
    proxy: Proxy, worker: str, method: str, part: str, fault: str
) -> None:
    before = len(await rows(worker))
    proxy.on(method, part, FAULTS[fault], times=2)
    reports = Reports()
    assert await call("report", settings(proxy.url), reports.append, n=20) == {"reported": 20}
    assert [item["index"] for item in reports] == list(range(20))
    assert len(await rows(worker)) == before + 1
    assert len({body["call_id"] for body in submits(proxy)}) == 1


async def test_a_submit_whose_response_was_lost_is_repeated_with_the_same_id_and_boot(proxy: Proxy) -> None:
    proxy.on("POST", "/calls", lose_reply, times=1)
    assert await call("echo", settings(proxy.url), x=1) == {"x": 1}
    first, second = submits(proxy)
    assert first == second


async def test_a_proxy_that_cuts_slow_replies_does_no_harm(proxy: Proxy, worker: str) -> None:
    async def slow(forward: Any) -> Any:
        async with asyncio.timeout(1.0):
            return await forward()

    async def cut_slow(forward: Any) -> Any:
        try:
            return await slow(forward)
        except TimeoutError:
            return await lose_request(forward)

    proxy.on("GET", "/calls/", cut_slow)
    reports = Reports()
    running = asyncio.create_task(call("wait", settings(proxy.url), reports.append))
    await proxy.saw("GET", "/calls/", count=4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert reports == ["started", "cleanup 1", "cleanup 2"]


async def test_a_network_that_is_cut_for_a_while(proxy: Proxy) -> None:
    reports = Reports()
    running = asyncio.create_task(call("steady", settings(proxy.url), reports.append))
    await reports.reach(5)
    proxy.on("GET", "/calls/", lose_request)
    proxy.seen.clear()
    await proxy.saw("GET", "/calls/", count=5)
    proxy.clear()
    await reports.reach(len(reports) + 5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert reports == [*range(len(reports) - 1), "cleanup 1"]


# --- nothing answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [lose_request, lose_reply, swallow_request, swallow_reply])
async def test_a_network_that_is_cut_for_good_after_the_submit(proxy: Proxy, act: Act) -> None:
    reports = Reports()
    how = settings(proxy.url, poll_wait=0.5, poll_margin=1)
    running = asyncio.create_task(call("wait", how, reports.append))
    await reports.reach(1)
    shorten_window(how, SHORT)
    proxy.on("GET", "/calls/", act)
    with pytest.raises(InfraAbort) as caught:
        await running
    assert aborted(caught) == ("WorkerUnreachable", None)
    assert reports == ["started"]
    deletes = [seen for seen in proxy.seen if seen.method == "DELETE"]
    assert len(deletes) == 1


@pytest.mark.parametrize("act", [lose_request, lose_reply, swallow_request, swallow_reply])
async def test_a_submit_that_is_never_answered(proxy: Proxy, worker: str, act: Act) -> None:
    proxy.on("POST", "/calls", act)
    with pytest.raises(InfraAbort, match="WorkerUnreachable"):
        await call("wait", settings(proxy.url, window=SHORT, request_timeout=0.5))
    (call_id,) = {body["call_id"] for body in submits(proxy)}
    assert [seen.path for seen in proxy.seen if seen.method == "DELETE"] == [f"/calls/{call_id}"]
    if act in (lose_reply, swallow_reply):
        (row,) = [row for row in await rows(worker) if row["call_id"] == call_id]
        assert row["pid"] is None or ends(row["pid"])


async def test_nobody_listens() -> None:
    with pytest.raises(InfraAbort, match="WorkerUnreachable"):
        await call("echo", settings("http://127.0.0.1:9", window=0.5))
    assert not IN_FLIGHT


async def test_something_else_listens(proxy: Proxy) -> None:
    for method in ("GET", "POST", "DELETE"):
        proxy.on(method, "/", answer_itself(404))
    with pytest.raises(InfraAbort, match="WorkerUnreachable"):
        await call("echo", settings(proxy.url, window=0.5))
    assert submits(proxy) == []


# --- the worker is lost -----------------------------------------------------------------------------------------------


class Restartable:
    """A worker that can be killed and started again on the same port."""

    def __init__(self) -> None:
        self._process = ReadyProcess([sys.executable, "-m", "miles_ref.worker"])
        self.url = self._process.url

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.stop(grace=0)

    def start(self) -> None:
        port = self.url.rpartition(":")[2]
        self._process = ReadyProcess([sys.executable, "-m", "miles_ref.worker", "--port", port])
        assert self._process.url == self.url

    def stop(self) -> None:
        self._process.stop(grace=0)


@pytest.fixture
def restartable() -> Iterator[Restartable]:
    process = Restartable()
    try:
        yield process
    finally:
        process.stop()


async def test_a_worker_that_was_killed_and_restarted_has_lost_the_call(restartable: Restartable) -> None:
    reports = Reports()
    running = asyncio.create_task(call("wait", settings(restartable.url), reports.append))
    await reports.reach(1)
    (row,) = await rows(restartable.url)
    restartable.kill()
    assert ends(row["pid"])
    restartable.start()
    with pytest.raises(InfraAbort) as caught:
        await running
    assert aborted(caught) == ("WorkerLost", None)
    assert await rows(restartable.url) == []


async def test_a_submit_that_may_have_reached_the_former_worker_is_never_run_again(restartable: Restartable) -> None:
    async with Proxy(restartable.url) as proxy:
        proxy.on("POST", "/calls", lose_reply, times=1)
        gate = asyncio.Event()
        proxy.on("POST", "/calls", hold(gate))
        proxy.on("POST", "/calls", lose_reply, times=1)
        running = asyncio.create_task(call("wait", settings(proxy.url)))
        await proxy.saw("POST", "/calls", count=2)
        restartable.kill()
        restartable.start()
        gate.set()
        with pytest.raises(InfraAbort, match="WorkerLost"):
            await running
        assert await rows(restartable.url) == []


async def test_a_submit_that_surely_did_not_reach_it_is_made_anew(restartable: Restartable) -> None:
    async with Proxy(restartable.url) as proxy:
        gate = asyncio.Event()
        proxy.on("POST", "/calls", hold(gate), times=1)
        running = asyncio.create_task(call("echo", settings(proxy.url), x=1))
        await proxy.saw("POST", "/calls")
        restartable.kill()
        restartable.start()
        gate.set()
        assert await running == {"x": 1}
        first, second = submits(proxy)
        assert first["call_id"] != second["call_id"]
        assert first["boot_id"] != second["boot_id"]


async def test_a_call_that_the_worker_no_longer_knows_is_lost(proxy: Proxy) -> None:
    reports = Reports()
    running = asyncio.create_task(call("wait", settings(proxy.url), reports.append))
    await reports.reach(1)

    async def forgotten(forward: Any) -> Answer:
        async with aiohttp.ClientSession() as session, session.get(f"{proxy.upstream}/calls/never-seen") as reply:
            return Answer(reply.status, {"Content-Type": "application/json"}, await reply.read())

    proxy.on("GET", "/calls/", forgotten)
    proxy.on("GET", "cancel=1", forgotten)
    with pytest.raises(InfraAbort, match="WorkerLost"):
        await running
    call_id = submits(proxy)[0]["call_id"]
    async with aiohttp.ClientSession() as session, session.delete(f"{proxy.upstream}/calls/{call_id}") as reply:
        assert reply.status == 202


# --- ended by somebody else -------------------------------------------------------------------------------------------


async def delete(url: str, call_id: str) -> int:
    async with aiohttp.ClientSession() as session, session.delete(f"{url}/calls/{call_id}") as reply:
        return reply.status


async def test_a_call_that_another_ends_is_worker_cancelled_once_its_cleanup_is_in(proxy: Proxy) -> None:
    reports = Reports()
    running = asyncio.create_task(call("wait", settings(proxy.url), reports.append, n=3, pause=0.05))
    await reports.reach(1)
    assert await delete(proxy.upstream, submits(proxy)[0]["call_id"]) == 202
    with pytest.raises(InfraAbort) as caught:
        await running
    assert aborted(caught) == ("WorkerCancelled", -15)
    assert reports == ["started", "cleanup 1", "cleanup 2", "cleanup 3"]


async def test_a_submit_that_a_tombstone_refuses_is_worker_cancelled(proxy: Proxy) -> None:
    gate = asyncio.Event()
    proxy.on("POST", "/calls", hold(gate))
    running = asyncio.create_task(call("wait", settings(proxy.url)))
    await proxy.saw("POST", "/calls")
    assert await delete(proxy.upstream, submits(proxy)[0]["call_id"]) == 202
    gate.set()
    with pytest.raises(InfraAbort, match="WorkerCancelled"):
        await running


async def test_a_repeated_submit_that_is_refused_as_cancelled_still_brings_the_reports(proxy: Proxy) -> None:
    gate = asyncio.Event()
    proxy.on("POST", "/calls", hold(gate))
    proxy.on("POST", "/calls", lose_reply, times=1)
    reports = Reports()
    running = asyncio.create_task(call("wait", settings(proxy.url), reports.append, n=2))
    await proxy.saw("POST", "/calls", count=2)
    call_id = submits(proxy)[0]["call_id"]
    for _ in range(600):
        if any(row["call_id"] == call_id and row["reports"] for row in await rows(proxy.upstream)):
            break
        await asyncio.sleep(0.05)
    await delete(proxy.upstream, call_id)
    gate.set()
    with pytest.raises(InfraAbort, match="WorkerCancelled"):
        await running
    assert reports == ["started", "cleanup 1", "cleanup 2"]


async def test_a_drained_worker_cancels_its_calls_and_is_fetched_before_it_exits() -> None:
    with worker_process() as process:
        reports = Reports()
        running = asyncio.create_task(call("wait", settings(process.url), reports.append, n=3, pause=0.05))
        await reports.reach(1)
        os.kill(process.pid, signal.SIGTERM)
        with pytest.raises(InfraAbort, match="WorkerCancelled"):
            await running
        assert reports == ["started", "cleanup 1", "cleanup 2", "cleanup 3"]
        assert process.stop() == 0


# --- full workers, several workers ------------------------------------------------------------------------------------


async def test_a_full_worker_is_waited_for_outside_the_window() -> None:
    with worker_process("--max-calls", "1") as process:
        reports = Reports()
        first = asyncio.create_task(call("wait", settings(process.url), reports.append))
        await reports.reach(1)
        async with Proxy(process.url) as proxy:
            second = asyncio.create_task(call("echo", settings(proxy.url, window=2.5), x=2))
            _, answer = await proxy.saw_answer("POST", "/calls", count=5)
            assert answer.status == 429
            assert not second.done()
            first.cancel()
            assert await second == {"x": 2}
            ids = [body["call_id"] for body in submits(proxy)]
            assert len(set(ids)) == len(ids)
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_what_a_full_worker_asks_for_is_outside_the_window_beside_one_that_is_gone(worker: str) -> None:
    async with Proxy(worker) as proxy:

        async def full(forward: Forward) -> Answer:
            _, health = await proxy.saw_answer("GET", "/health")
            body = {"boot_id": json.loads(health.body)["boot_id"], "code": "full", "error": "full"}
            return Answer(429, {"Retry-After": "5"}, json.dumps(body).encode())

        proxy.on("POST", "/calls", full, times=1)
        assert await call("echo", settings("http://127.0.0.1:9", proxy.url, window=4), x=3) == {"x": 3}
        assert len(submits(proxy)) == 2


async def test_an_abort_while_a_worker_is_full_deletes_there_too() -> None:
    with worker_process("--max-calls", "1") as process:
        reports = Reports()
        first = asyncio.create_task(call("wait", settings(process.url), reports.append))
        await reports.reach(1)
        async with Proxy(process.url) as proxy:
            second = asyncio.create_task(call("echo", settings(proxy.url)))
            await proxy.saw_answer("POST", "/calls")
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            _, answer = await proxy.saw_answer("DELETE", "/calls/")
            assert answer.status == 202
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_the_worker_with_the_fewest_calls_is_taken(worker: str) -> None:
    async with Proxy(worker) as first, Proxy(worker) as second:
        how = settings(first.url, second.url)
        running = []
        for count in (1, 2, 3, 4):
            reports = Reports()
            running.append(asyncio.create_task(call("wait", how, reports.append)))
            await reports.reach(1)
            assert len(submits(first)) == (count + 1) // 2
            assert len(submits(second)) == count // 2
        for task in running:
            task.cancel()
        assert all(isinstance(end, asyncio.CancelledError) for end in await gather(running))


async def gather(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("how", ["nobody listens", "draining", "full"])
async def test_another_worker_is_taken_where_the_first_surely_did_not_admit(worker: str, how: str) -> None:
    with worker_process("--max-calls", "1") as other:
        blocker = None
        first = "http://127.0.0.1:9" if how == "nobody listens" else other.url
        if how != "nobody listens":
            reports = Reports()
            blocker = asyncio.create_task(call("stubborn", settings(other.url), reports.append))
            await reports.reach(1)
        if how == "draining":
            os.kill(other.pid, signal.SIGTERM)
            await reports.reach(2)
        async with Proxy(worker) as second:
            assert await call("echo", settings(first, second.url, window=20), x=1) == {"x": 1}
            assert len(submits(second)) == 1
        if blocker is not None:
            blocker.cancel()
            await asyncio.sleep(0)
            blocker.cancel()
            await gather([blocker])


async def test_a_call_that_may_have_been_admitted_never_moves(worker: str) -> None:
    async with Proxy(worker) as first, Proxy(worker) as second:
        first.on("POST", "/calls", lose_reply)
        with pytest.raises(InfraAbort, match="WorkerUnreachable"):
            await call("wait", settings(first.url, second.url, window=SHORT))
        assert submits(second) == []


async def test_a_draining_worker_with_no_other_is_unreachable_in_the_end() -> None:
    with worker_process() as process:
        reports = Reports()
        blocker = asyncio.create_task(call("stubborn", settings(process.url), reports.append))
        await reports.reach(1)
        os.kill(process.pid, signal.SIGTERM)
        await reports.reach(2)
        with pytest.raises(InfraAbort, match="WorkerUnreachable"):
            await call("echo", settings(process.url, window=0.5))
        blocker.cancel()
        await asyncio.sleep(0)
        blocker.cancel()
        await gather([blocker])


# --- configuration errors ---------------------------------------------------------------------------------------------


async def test_a_refused_configuration_propagates(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    with worker_process("--token-file", str(token), "--allow-function", "allowed.*:*") as process:
        with pytest.raises(WorkerRefusedError, match="401") as caught:
            await call("echo", settings(process.url))
        assert (caught.value.status, caught.value.code) == (401, "token")
        with pytest.raises(WorkerRefusedError) as caught:
            await call("echo", settings(process.url, worker_token_file=token))
        assert (caught.value.status, caught.value.code) == (403, "function")
        assert "t0ken" not in str(caught.value)
    assert not IN_FLIGHT


async def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="worker-url"):
        await call("echo", settings())
    with pytest.raises(UsageError, match="token-file"):
        await call("echo", settings("http://127.0.0.1:9", worker_token_file=Path("/no/such/file")))
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        await call("echo", settings("http://127.0.0.1:9", worker_token_file=Path(sys.executable)))
    with pytest.raises(UsageError, match="scope"):
        await call_agent_function(AGENTS + "echo", mode="worker", scope="", settings=settings("http://127.0.0.1:9"))


async def test_an_orphan_timeout_within_the_window_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with worker_process("--orphan-timeout", "30") as process:
        for _ in range(2):
            await call("echo", settings(process.url))
    assert caplog.text.count("--orphan-timeout") == 1


# --- a worker that answers otherwise than it must ---------------------------------------------------------------------


def as_the_worker(proxy: Proxy, status: int, retry_after: str | None = None) -> Act:
    """An answer with the worker's boot id that the worker would not give."""

    async def act(forward: Forward) -> Answer:
        first = proxy.answered[0][1] if proxy.answered else await forward()
        body = {"boot_id": json.loads(first.body)["boot_id"], "code": "odd", "error": "odd"}
        headers = {} if retry_after is None else {"Retry-After": retry_after}
        return Answer(status, headers, json.dumps(body).encode())

    return act


@pytest.mark.parametrize("retry_after", [None, "0", "nan", "-7"])
@pytest.mark.parametrize("status", [408, 429, 500, 503])
@pytest.mark.parametrize(("method", "part"), [("GET", "/health"), ("GET", "/calls/")])
async def test_what_asks_for_a_repeat_is_repeated(
    proxy: Proxy, status: int, method: str, part: str, retry_after: str | None
) -> None:
    proxy.on(method, part, as_the_worker(proxy, status, retry_after), times=2)
    reports = Reports()
    assert await call("report", settings(proxy.url), reports.append, n=5) == {"reported": 5}
    assert [item["index"] for item in reports] == list(range(5))
    assert len(submits(proxy)) == 1


async def test_a_submit_that_a_time_out_of_the_worker_answers_may_have_been_admitted(proxy: Proxy) -> None:
    proxy.on("POST", "/calls", as_the_worker(proxy, 408), times=2)
    assert await call("echo", settings(proxy.url), x=1) == {"x": 1}
    assert len({body["call_id"] for body in submits(proxy)}) == 1


async def test_a_call_whose_polls_are_to_wait_can_be_cancelled(proxy: Proxy) -> None:
    reports = Reports()
    running = asyncio.create_task(call("wait", settings(proxy.url), reports.append))
    await reports.reach(1)
    proxy.seen.clear()
    proxy.on("GET", "/calls/", as_the_worker(proxy, 429, "0.1"), times=2)
    await proxy.saw("GET", "/calls/", count=3)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert reports == ["started", "cleanup 1", "cleanup 2"]


@pytest.mark.parametrize("status", [408, 429])
async def test_a_delete_that_is_to_wait_is_repeated(proxy: Proxy, status: int) -> None:
    reports = Reports()
    running = asyncio.create_task(call("stubborn", settings(proxy.url), reports.append))
    await reports.reach(1)
    proxy.on("DELETE", "/calls/", as_the_worker(proxy, status), times=2)
    running.cancel()
    await proxy.saw_answer("DELETE", "/calls/")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len([seen for seen in proxy.seen if seen.method == "DELETE"]) == 3


ODD_OUTCOMES: dict[str, tuple[Any, str]] = {
    "text": ("done", "an object, not str"),
    "unknown kind": ({"kind": "done"}, "not 'done'"),
    "no exit status": ({"kind": "infra_abort", "reason": "X"}, "must have exit_status"),
    "no value": ({"kind": "ok"}, "must have value"),
    "no traceback": ({"kind": "error", "phase": "run", "type": "X", "message": ""}, "must have traceback"),
}


@pytest.mark.parametrize("odd", ODD_OUTCOMES)
async def test_an_outcome_that_is_none_names_the_worker_and_the_fault(proxy: Proxy, odd: str) -> None:
    outcome, fault = ODD_OUTCOMES[odd]

    async def replaced(forward: Forward) -> Answer:
        answer = await forward()
        body = json.loads(answer.body)
        if body["outcome"] is not None:
            body["outcome"] = outcome
        return Answer(answer.status, answer.headers, json.dumps(body).encode())

    proxy.on("GET", "/calls/", replaced)
    with pytest.raises(WorkerReplyError, match=fault) as caught:
        await call("echo", settings(proxy.url))
    assert proxy.url in str(caught.value)
    assert caught.value.url == proxy.url
    assert aborted(caught) == ("WorkerReply", None)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not IN_FLIGHT


@pytest.mark.parametrize(("kind", "text", "times"), FORGED_FRAMES)
async def test_a_frame_that_cannot_be_read_ends_the_child_on_a_worker_too(
    worker: str, kind: str, text: str, times: int
) -> None:
    reports = Reports()
    forged = {"kind": kind, "text": text, "times": times}
    agent = "tests.e2e.agents.odd:forges"
    with pytest.raises(InfraAbort) as caught:
        await call_agent_function(
            agent, mode="worker", kwargs=forged, on_report=reports.append, settings=settings(worker)
        )
    assert aborted(caught) == ("ChildExited", -9)
    assert reports == ["before"]


async def test_a_reply_too_deep_to_be_read_is_one_that_did_not_come(proxy: Proxy) -> None:
    async def deep(forward: Forward) -> Answer:
        answer = await forward()
        return Answer(answer.status, answer.headers, answer.body[:-1] + b',"x":' + b"[" * 5000 + b"]" * 5000 + b"}")

    proxy.on("GET", "/calls/", deep, times=2)
    assert await call("echo", settings(proxy.url), x=1) == {"x": 1}
    proxy.on("GET", "/calls/", deep)
    with pytest.raises(InfraAbort, match="WorkerUnreachable"):
        await call("echo", settings(proxy.url, window=SHORT), x=1)


# --- the caller's own task is cancelled -------------------------------------------------------------------------------


async def test_the_last_reports_of_the_cleanup_arrive_after_the_caller_s_task_was_cancelled(proxy: Proxy) -> None:
    reports = Reports()
    running = asyncio.create_task(call("wait", settings(proxy.url), reports.append, n=5, pause=0.05))
    await reports.reach(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert reports == ["started", *(f"cleanup {n}" for n in range(1, 6))]
    cancels = [seen for seen in proxy.seen if seen.method == "DELETE" or "cancel=1" in seen.path]
    assert cancels
    assert not IN_FLIGHT


async def test_a_second_cancellation_stops_at_once(proxy: Proxy) -> None:
    reports = Reports()
    running = asyncio.create_task(call("stubborn", settings(proxy.url), reports.append))
    await reports.reach(1)
    running.cancel()
    await reports.reach(2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not IN_FLIGHT


async def test_the_wait_for_the_cleanup_is_bounded_by_the_grace() -> None:
    with worker_process("--cancel-grace", "0.5") as process:
        reports = Reports()
        running = asyncio.create_task(call("stubborn", settings(process.url), reports.append))
        await reports.reach(1)
        (row,) = await rows(process.url)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ends(row["pid"])


async def test_a_cancel_before_anything_was_sent(proxy: Proxy) -> None:
    gate = asyncio.Event()
    proxy.on("GET", "/health", hold_reply(gate))
    running = asyncio.create_task(call("echo", settings(proxy.url)))
    await proxy.saw("GET", "/health")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert {seen.path for seen in proxy.seen} == {"/health"}
