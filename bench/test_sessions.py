"""Many sessions at once, on 1 and 2 server processes, with and without collects; and memory as sessions grow."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from bench.conftest import sizes
from bench.episode import Client, Episode, exponent, resident_bytes, session_server
from miles_ref.process import ReadyProcess

TURNS = 8


def load(urls: list[str], sessions: int, collected: int) -> dict[str, list[float]]:
    """What bench/load.py measured, from a process of its own."""
    argv = [sys.executable, "-m", "bench.load", ",".join(urls), str(sessions), str(TURNS), f"--collect={collected}"]
    done = subprocess.run(argv, check=True, capture_output=True, timeout=300)
    result: dict[str, list[float]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("collected", [0, 128], ids=["", "while collecting 128 turns"])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("sessions", sizes(1, 16, 64))
def test_sessions_at_once(
    benchmark: Any, plain_backend: ReadyProcess, sessions: int, processes: int, collected: int
) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(session_server(plain_backend.url)) for _ in range(processes)]
        urls = [server.url for server in servers]
        results = []
        benchmark.group = f"sessions at once: {sessions}"
        benchmark.pedantic(lambda: results.append(load(urls, sessions, collected)), rounds=2)
        chats = [latency for result in results for latency in result["chats_ms"]]
        collects = [latency for result in results for latency in result["collects_ms"]]
        assert len(chats) == sessions * TURNS * len(results)
        assert bool(collects) == bool(collected)
        p50, p99 = (float(np.percentile(chats, percent)) for percent in (50, 99))
        benchmark.extra_info.update(bench="sessions", sessions=sessions, processes=processes, p50_ms=p50, p99_ms=p99)
        benchmark.extra_info["longest_wait_ms"] = max(max(result["health_ms"]) for result in results)
        if collects:
            benchmark.extra_info["collect_p50_ms"] = float(np.median(collects))


@pytest.mark.parametrize("shape", ["plain", "replay"])
def test_memory_of_a_session(benchmark: Any, request: pytest.FixtureRequest, shape: str) -> None:
    """Resident bytes kept a session: the slope over further sessions, after a first that warmed everything up."""
    backend: ReadyProcess = request.getfixturevalue(f"{shape}_backend")
    flags = (
        ["--use-rollout-routing-replay", "--num-layers", "8", "--moe-router-topk", "32"] if shape == "replay" else []
    )
    all_sizes = sizes(16, 32) if shape == "replay" else sizes(16, 32, 64, 128)
    kept = {}
    for turns in all_sizes:
        with session_server(backend.url, *flags) as server:
            client = Client(server.url)
            episode = Episode(client).run(turns)
            assert len(episode.messages) == 2 * turns
            before, sessions = resident_bytes(server.pid), 8
            for _ in range(sessions):
                Episode(client).run(turns)
            kept[turns] = (resident_bytes(server.pid) - before) / sessions
            if turns == all_sizes[-1]:
                benchmark.group = f"memory of a session, {shape}"
                benchmark.pedantic(episode.turn, rounds=1)
            client.close()
    benchmark.extra_info.update(bench="memory", **{f"mb_at_{turns}": value / 1e6 for turns, value in kept.items()})
    if len(kept) > 1:
        benchmark.extra_info["exponent"] = exponent(list(kept), list(kept.values()))
