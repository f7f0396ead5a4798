"""agents.md, Abort: through the hook, never by calling the built-in. The matrix is in test_abort_matrix."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from miles_ref.agents import AgentSettings, InfraAbort, call_agent_abort_hook, call_agent_function
from miles_ref.agents.client import IN_FLIGHT
from tests.e2e.agents.proxy import Proxy, hold, swallow_request
from tests.e2e.agents.support import AGENTS, Reports, shorten_window, worker_process

SCOPE = "10.0.0.1:30000"


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    with worker_process("--cancel-grace", "60") as process:
        yield process.url


def start(
    url: str,
    reports: Reports,
    scope: str | None = SCOPE,
    *,
    mode: str = "worker",
    settings: AgentSettings | None = None,
) -> asyncio.Task[Any]:
    settings = settings or AgentSettings(worker_urls=(url,))
    kwargs = {"n": 2, "pause": 0.05}
    return asyncio.create_task(
        call_agent_function(
            AGENTS + "wait", mode=mode, kwargs=kwargs, scope=scope, settings=settings, on_report=reports.append
        )
    )


async def ended(task: asyncio.Task[Any]) -> str:
    with pytest.raises(InfraAbort) as caught:
        await task
    return caught.value.reason


async def finish(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_abort_ends_the_calls_of_its_scope_only(worker: str) -> None:
    scopes = [SCOPE, SCOPE, SCOPE + "0", SCOPE[:-1], "10.0.0.2:30000", None]
    reports = [Reports() for _ in scopes]
    tasks = [start(worker, report, scope) for report, scope in zip(reports, scopes, strict=True)]
    local = Reports()
    subproc = start(worker, local, mode="subproc")
    for report in [*reports, local]:
        await report.reach(1)
    await call_agent_abort_hook(SCOPE)
    assert [await ended(task) for task in tasks[:2]] == ["WorkerCancelled"] * 2
    assert reports[0] == reports[1] == ["started", "cleanup 1", "cleanup 2"]
    assert not any(task.done() for task in [*tasks[2:], subproc])
    await call_agent_abort_hook(None, every_scope=True)
    assert [await ended(task) for task in tasks[2:]] == ["WorkerCancelled"] * 4
    assert not subproc.done()
    await finish(subproc)


async def test_it_returns_when_the_delete_was_answered_and_not_when_the_cleanup_has_ended(worker: str) -> None:
    settings = AgentSettings(worker_urls=(worker,))
    reports = Reports()
    task = asyncio.create_task(
        call_agent_function(
            AGENTS + "stubborn", mode="worker", scope=SCOPE, settings=settings, on_report=reports.append
        )
    )
    await reports.reach(1)
    await call_agent_abort_hook(SCOPE)
    assert not task.done()
    await reports.reach(2)
    task.cancel()
    await asyncio.sleep(0)  # The task takes the first; two that come at once would be one.
    await finish(task)


async def test_it_gives_a_delete_up_that_nobody_answers(worker: str) -> None:
    async with Proxy(worker) as proxy:
        reports = Reports()
        settings = AgentSettings(worker_urls=(proxy.url,), poll_wait=0.5)
        task = start(proxy.url, reports, settings=settings)
        await reports.reach(1)
        shorten_window(settings, 1.0)
        proxy.on("DELETE", "/calls/", swallow_request)
        proxy.on("GET", "cancel=1", swallow_request)
        await call_agent_abort_hook(SCOPE)
        assert await ended(task) == "WorkerCancelled"
        (delete,) = {seen.path for seen in proxy.seen if seen.method == "DELETE"}
        proxy.clear()
        await _delete(proxy.url + delete)


async def _delete(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.delete(url) as reply:
        assert reply.status in (200, 202)


async def test_no_submit_is_sent_after_an_abort(worker: str) -> None:
    async with Proxy(worker) as proxy:
        gate = asyncio.Event()
        proxy.on("GET", "/health", hold(gate))
        task = start(proxy.url, Reports())
        await proxy.saw("GET", "/health")
        assert IN_FLIGHT
        await call_agent_abort_hook(SCOPE)
        assert await ended(task) == "WorkerCancelled"
        gate.set()
        await proxy.saw_answer("GET", "/health")
        assert [seen.method for seen in proxy.seen] == ["GET"]


async def test_a_call_is_there_for_an_abort_before_its_first_await(worker: str) -> None:
    task = start(worker, Reports())
    await asyncio.sleep(0)
    assert len(IN_FLIGHT) == 1
    await call_agent_abort_hook(SCOPE)
    assert await ended(task) == "WorkerCancelled"


# --- the scope --------------------------------------------------------------------------------------------------------


class Lazy:
    """A lazy scope that counts how often it is asked."""

    def __init__(self, value: Any = SCOPE) -> None:
        self.asked = 0
        self._value = value

    def __call__(self) -> Any:
        self.asked += 1
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


async def test_a_lazy_scope_is_evaluated_only_when_a_worker_call_is_in_flight(worker: str) -> None:
    lazy, broken = Lazy(), Lazy(RuntimeError("no router yet"))
    local = Reports()
    subproc = start(worker, local, mode="subproc")
    await local.reach(1)
    await call_agent_abort_hook(lazy)
    await call_agent_abort_hook(broken)
    assert lazy.asked == broken.asked == 0
    reports = Reports()
    task = start(worker, reports)
    await reports.reach(1)
    with pytest.raises(ExceptionGroup) as caught:
        await call_agent_abort_hook(broken)
    assert [str(error) for error in caught.value.exceptions] == ["no router yet"]
    assert not task.done()
    await call_agent_abort_hook(lazy)
    assert lazy.asked == 1
    assert await ended(task) == "WorkerCancelled"
    await finish(subproc)


async def test_every_scope_evaluates_no_scope(worker: str) -> None:
    broken = Lazy(RuntimeError("no router yet"))
    reports = Reports()
    task = start(worker, reports, None)
    await reports.reach(1)
    await call_agent_abort_hook(broken, every_scope=True)
    assert broken.asked == 0
    assert await ended(task) == "WorkerCancelled"


@pytest.mark.parametrize("scope", [None, Lazy(None)], ids=["null", "lazy null"])
async def test_a_null_scope_matches_nothing_and_is_logged(
    worker: str, scope: Callable[[], str | None] | None, caplog: pytest.LogCaptureFixture
) -> None:
    reports = Reports()
    task = start(worker, reports, None)
    await reports.reach(1)
    with caplog.at_level(logging.WARNING):
        await call_agent_abort_hook(scope)
    assert "matches no call" in caplog.text
    assert not task.done()
    await finish(task)


@pytest.mark.parametrize("every_scope", [False, True])
@pytest.mark.parametrize(("scope", "error"), [("", ValueError), (7, TypeError)])
async def test_a_scope_that_is_none_is_an_error(scope: Any, error: type[Exception], every_scope: bool) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await call_agent_abort_hook(scope, every_scope)
    assert [type(one) for one in caught.value.exceptions] == [error]


async def test_an_abort_from_another_event_loop(worker: str) -> None:
    reports = Reports()
    task = start(worker, reports)
    await reports.reach(1)
    await asyncio.to_thread(lambda: asyncio.run(call_agent_abort_hook(SCOPE)))
    assert await ended(task) == "WorkerCancelled"
