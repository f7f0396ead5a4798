"""An agent call inline, in a child process and on a worker: added latency, and whose CPU it uses.

The point of the worker is the second figure: while the agent burns CPU, the rollout host's share goes to zero. (The
worker runs on this machine here; what counts as the rollout host is this process and its children.) One reported
deployment went from 3.17 to 0 cores on the GPU host that way.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.conftest import sizes
from bench.episode import cpu_seconds
from miles_ref.agents.call import call_agent_function
from miles_ref.agents.settings import AgentSettings
from miles_ref.process import ReadyProcess

MODES = ["inline", "subproc", "worker"]


@pytest.fixture(scope="module")
def settings() -> Iterator[AgentSettings]:
    """A worker of its own process group, outside of what counts as the rollout host."""
    with ReadyProcess([sys.executable, "-m", "miles_ref.worker", "--port", "0"]) as worker:
        yield AgentSettings(worker_urls=(worker.url,))


async def call(function: str, mode: str, settings: AgentSettings, **kwargs: Any) -> Any:
    return await call_agent_function(f"bench.agents:{function}", mode=mode, kwargs=kwargs, settings=settings)


@pytest.mark.parametrize("mode", MODES)
def test_added_latency(benchmark: Any, settings: AgentSettings, mode: str) -> None:
    with asyncio.Runner() as runner:
        assert runner.run(call("nothing", mode, settings)) == {}
        benchmark.group = "agent call: latency"
        benchmark.extra_info.update(bench="call", mode=mode)
        benchmark.pedantic(lambda: runner.run(call("nothing", mode, settings)), rounds=15, warmup_rounds=2)


@pytest.mark.parametrize("mode", MODES)
def test_cpu_on_the_rollout_host(benchmark: Any, settings: AgentSettings, mode: str) -> None:
    """CPU seconds of this process, over one second of an agent's own CPU."""
    children_before = os.times()
    with asyncio.Runner() as runner:
        own = time.process_time()
        result = runner.run(call("burn", mode, settings, seconds=1.0))
        own = time.process_time() - own
        after = os.times()
        children = after.children_user + after.children_system
        children -= children_before.children_user + children_before.children_system
        assert result["cpu_s"] >= 1.0
        benchmark.group = "agent call: CPU of the rollout host for 1 s of the agent"
        benchmark.extra_info.update(bench="call-cpu", mode=mode, own_process_s=own, rollout_host_s=own + children)
        benchmark.pedantic(lambda: runner.run(call("burn", mode, settings, seconds=0.2)), rounds=3)


@pytest.mark.parametrize("calls", sizes(1, 200))
@pytest.mark.parametrize("mode", MODES)
def test_calls_at_once(benchmark: Any, settings: AgentSettings, mode: str, calls: int) -> None:
    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(call("nothing", mode, settings) for _ in range(calls)))

    with asyncio.Runner() as runner:
        assert runner.run(all_at_once()) == [{}] * calls
        before = cpu_seconds(os.getpid())
        benchmark.group = f"agent call: {calls} at once"
        benchmark.pedantic(lambda: runner.run(all_at_once()), rounds=2)
        used = (cpu_seconds(os.getpid()) - before) / 2 / calls
        benchmark.extra_info.update(bench="calls", mode=mode, calls=calls, own_cpu_s_per_call=used)
