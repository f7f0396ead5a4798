"""agents.md, The caller's side, through generate: subproc and worker calls, and the rollout's abort."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from miles_ref.agents import AgentSettings, WorkerRefusedError
from miles_ref.driver import abort_rollout, generate
from miles_ref.process import ReadyProcess
from miles_ref.sample import Sample, Status
from tests.e2e.agents.proxy import Answer, Forward, Proxy
from tests.e2e.driver.scripted import ScriptedSessionServer

COLLECTED = ["POST /sessions", "POST /sessions/abc/samples", "DELETE /sessions/abc"]
DELETED = ["POST /sessions", "DELETE /sessions/abc"]
AGENTS = "miles_ref.testing.agents"


class Reports(list[Any]):
    """What the agent reported; `begun` is set by the first."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    def append(self, item: Any) -> None:
        super().append(item)
        self.begun.set()


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    argv = [sys.executable, "-m", "miles_ref.worker", "--port", "0", "--allow-function", f"{AGENTS}:*"]
    with ReadyProcess(argv) as process:
        yield process.url


@pytest.fixture(params=["subproc", "worker"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def run(
    server: ScriptedSessionServer,
    worker: str,
    mode: str,
    agent: str,
    reports: Reports | None = None,
    *,
    window: float = 60.0,
    **more: Any,
) -> list[Any]:
    agents = AgentSettings(worker_urls=(worker,), window=window)
    settings = server.settings(agent_function=f"{AGENTS}.{agent}", agent_mode=mode, agent=agents, **more)
    return await generate(settings, Sample(prompt="p"), {}, on_report=None if reports is None else reports.append)


async def test_what_the_agent_returns_becomes_metadata(server: ScriptedSessionServer, worker: str, mode: str) -> None:
    [sample] = await run(server, worker, mode, "echo", session_server_instance_id="i-1")
    assert sample.status is Status.COMPLETED
    assert sample.metadata == {
        "base_url": f"http://127.0.0.1:{server.port}/sessions/abc",
        "prompt": "p",
        "request_kwargs": {},
        "metadata": {
            "max_seq_len": None,
            "session_server_id": f"127.0.0.1:{server.port}",
            "session_server_instance_id": "i-1",
        },
    }
    assert server.calls == COLLECTED


async def test_reports_arrive_in_order(server: ScriptedSessionServer, worker: str, mode: str) -> None:
    reports = Reports()
    await run(server, worker, mode, "report", reports)
    assert [report["index"] for report in reports] == [0, 1, 2]


@pytest.mark.parametrize("agent", ["fail", "not_json", "no_such_function"])
async def test_an_agents_own_error_is_collected(
    server: ScriptedSessionServer, worker: str, mode: str, agent: str
) -> None:
    [sample] = await run(server, worker, mode, agent)
    assert (sample.status, sample.metadata, sample.remove_sample) == (Status.COMPLETED, {}, False)
    assert server.calls == COLLECTED


@pytest.mark.parametrize(
    ("agent", "reason", "exit_status"),
    [("infra", "SandboxLost", None), ("exit", "ChildExited", 0), ("killed", "ChildExited", -9)],
)
async def test_an_infrastructure_failure_is_not(
    server: ScriptedSessionServer, worker: str, mode: str, agent: str, reason: str, exit_status: int | None
) -> None:
    [sample] = await run(server, worker, mode, agent)
    assert (sample.status, sample.remove_sample) == (Status.ABORTED, True)
    assert sample.metadata == {"infra_abort": {"reason": reason, "exit_status": exit_status}}
    assert server.calls == DELETED


async def test_a_cancelled_task_gets_the_cleanups_reports(
    server: ScriptedSessionServer, worker: str, mode: str
) -> None:
    reports = Reports()
    task = asyncio.create_task(run(server, worker, mode, "wait", reports))
    await reports.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reports == ["started", "cleanup 1", "cleanup 2"]
    assert server.calls == DELETED


async def test_a_worker_that_is_gone(server: ScriptedSessionServer, unused_tcp_port: int) -> None:
    [sample] = await run(server, f"http://127.0.0.1:{unused_tcp_port}", "worker", "echo", window=0.5)
    assert sample.metadata["infra_abort"]["reason"] == "WorkerUnreachable"
    assert server.calls == DELETED


async def test_a_worker_that_answers_otherwise_than_it_must_is_no_agents_error(
    server: ScriptedSessionServer, worker: str
) -> None:
    async def without_its_value(forward: Forward) -> Answer:
        answer = await forward()
        body = json.loads(answer.body)
        if body["outcome"] is not None:
            del body["outcome"]["value"]
        return Answer(answer.status, answer.headers, json.dumps(body).encode())

    async with Proxy(worker) as proxy:
        proxy.on("GET", "/calls/", without_its_value)
        [sample] = await run(server, proxy.url, "worker", "echo")
    assert (sample.status, sample.remove_sample) == (Status.ABORTED, True)
    assert sample.metadata == {"infra_abort": {"reason": "WorkerReply", "exit_status": None}}
    assert server.calls == DELETED


@pytest.mark.parametrize(
    ("metadata", "error"), [({"odd": object()}, TypeError), ({1: 2}, TypeError), ({"odd": float("nan")}, ValueError)]
)
async def test_an_input_that_is_not_json_is_no_agents_error(
    server: ScriptedSessionServer, worker: str, mode: str, metadata: Any, error: type[Exception]
) -> None:
    agents = AgentSettings(worker_urls=(worker,))
    settings = server.settings(agent_function=f"{AGENTS}.echo", agent_mode=mode, agent=agents)
    with pytest.raises(error, match="JSON"):
        await generate(settings, Sample(metadata=metadata), {})
    assert server.calls == DELETED


async def test_a_workers_refusal_propagates(server: ScriptedSessionServer, worker: str) -> None:
    agents = AgentSettings(worker_urls=(worker,))
    settings = server.settings(agent_function="json:dumps", agent_mode="worker", agent=agents)
    with pytest.raises(WorkerRefusedError, match="json:dumps"):
        await generate(settings, Sample(), {})
    assert server.calls == DELETED


async def test_an_abort_ends_the_calls_of_its_rollout_only(server: ScriptedSessionServer, worker: str) -> None:
    reports = {"10.0.0.1:1": Reports(), "10.0.0.1:10": Reports()}
    ours, other = (
        asyncio.create_task(run(server, worker, "worker", "wait", seen, scope=scope)) for scope, seen in reports.items()
    )
    for seen in reports.values():
        await seen.begun.wait()
    await abort_rollout(SimpleNamespace(sglang_router_ip="10.0.0.1", sglang_router_port=1))
    [sample] = await ours
    assert (sample.status, sample.remove_sample) == (Status.ABORTED, True)
    assert sample.metadata["infra_abort"]["reason"] == "WorkerCancelled"
    assert reports["10.0.0.1:1"] == ["started", "cleanup 1", "cleanup 2"]
    assert not other.done()
    await abort_rollout(SimpleNamespace(), every_scope=True)
    [sample] = await other
    assert sample.metadata["infra_abort"]["reason"] == "WorkerCancelled"
