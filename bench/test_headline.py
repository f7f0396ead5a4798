"""The headline: download every record and assemble on the driver, against one samples payload from the server.

Each size runs one episode, checks that both ways give the same sample, then times both on the same session in the same
run. `extra_info` holds bytes on the wire, CPU of driver and server, wall clock and peak memory of each way.
"""

from __future__ import annotations

import time
import tracemalloc
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pytest

from bench import baseline
from bench.conftest import sizes
from bench.episode import Client, Episode, cpu_seconds, session_server
from miles_ref.process import ReadyProcess
from miles_ref.sample import Sample
from miles_ref.tokens.tokenizer import Tokenizer
from miles_ref.wire import SAMPLES_VALUE_SPEC, decode_samples_and_merge_input_sample

LAYERS, TOPK = 8, 32
SHAPES = {"plain": 0, "replay": LAYERS}


def server_flags(layers: int) -> list[str]:
    if not layers:
        return []
    return ["--use-rollout-routing-replay", "--num-layers", str(LAYERS), "--moe-router-topk", str(TOPK)]


class Way(ABC):
    """One way to get the sample, and what it costs."""

    def __init__(self, episode: Episode, server_pid: int) -> None:
        self.episode, self.server_pid = episode, server_pid

    @abstractmethod
    def fetch(self) -> bytes:
        """What crosses the wire."""

    @abstractmethod
    def assemble(self, body: bytes) -> Any:
        """The sample, on the driver."""

    def run(self) -> Any:
        return self.assemble(self.fetch())

    def cost(self, rounds: int) -> dict[str, float]:
        """Medians over `rounds`; the driver's peak is of its own allocations while it assembles."""
        wall, driver, server = [], [], []
        for _ in range(rounds):
            server_before, driver_before, begin = cpu_seconds(self.server_pid), time.process_time(), time.perf_counter()
            body = self.fetch()
            self.assemble(body)
            wall.append(time.perf_counter() - begin)
            driver.append(time.process_time() - driver_before)
            server.append(cpu_seconds(self.server_pid) - server_before)
        tracemalloc.start()
        self.assemble(body)
        peak = tracemalloc.get_traced_memory()[1] + len(body)
        tracemalloc.stop()
        return {
            "wire_bytes": len(body),
            "wall_s": float(np.median(wall)),
            "driver_cpu_s": float(np.median(driver)),
            "server_cpu_s": float(np.median(server)),
            "driver_peak_bytes": float(peak),
        }


class Quadratic(Way):
    """GET every record, then parse, compute, truncate and merge here."""

    def __init__(self, episode: Episode, server_pid: int, tokenizer: Tokenizer, layers: int) -> None:
        super().__init__(episode, server_pid)
        self.tokenizer, self.layers = tokenizer, layers

    def fetch(self) -> bytes:
        return self.episode.records()

    def assemble(self, body: bytes) -> baseline.TurnSample:
        return baseline.assemble(body, self.tokenizer.decode, layers=self.layers)


class ServerSide(Way):
    """POST samples, then decode here."""

    def fetch(self) -> bytes:
        return self.episode.samples()

    def assemble(self, body: bytes) -> Sample:
        reply = decode_samples_and_merge_input_sample(body, Sample(), fields=SAMPLES_VALUE_SPEC)
        return reply.samples[0]


def assert_same(before: baseline.TurnSample, now: Sample) -> None:
    """Both ways must give the same sample, field for field."""
    assert now.tokens == before.tokens
    assert now.response == before.response
    assert now.response_length == before.response_length
    assert now.loss_mask == before.loss_mask
    assert now.rollout_log_probs == before.rollout_log_probs
    assert now.status == before.status
    assert now.weight_versions == before.weight_versions
    assert now.prefix_cache_info.cached_tokens == before.cached_tokens
    assert now.prefix_cache_info.total_prompt_tokens == before.prompt_tokens
    lifecycle = now.metadata["lifecycle"]
    assert (lifecycle if isinstance(lifecycle, list) else [lifecycle]) == before.lifecycle
    if before.routed_experts is None:
        assert now.rollout_routed_experts is None
    else:
        assert np.array_equal(now.rollout_routed_experts, before.routed_experts)


CASES = [("plain", turns) for turns in sizes(8, 16, 32, 64, 128, 256)]
CASES += [("replay", turns) for turns in sizes(8, 16, 32, 64)]


@pytest.fixture(scope="module", params=list(SHAPES))
def serving(request: pytest.FixtureRequest) -> Any:
    """A backend and a session server for one shape: (shape, server process)."""
    backend: ReadyProcess = request.getfixturevalue(f"{request.param}_backend")
    with session_server(backend.url, *server_flags(SHAPES[request.param])) as server:
        yield request.param, server


@pytest.mark.parametrize("turns", sizes(8, 16, 32, 64, 128, 256))
@pytest.mark.parametrize("way", ["quadratic", "server"])
def test_collect(benchmark: Any, serving: tuple[str, ReadyProcess], tokenizer: Tokenizer, turns: int, way: str) -> None:
    shape, server = serving
    if (shape, turns) not in CASES:
        pytest.skip("records of this size with replay rows are more than 2 GB of JSON")
    client = Client(server.url)
    episode = Episode(client).run(turns)
    ways = {
        "quadratic": Quadratic(episode, server.pid, tokenizer, SHAPES[shape]),
        "server": ServerSide(episode, server.pid),
    }
    assert_same(ways["quadratic"].run(), ways["server"].run())
    rounds = 3 if turns >= 128 or shape == "replay" else 5
    benchmark.group = f"collect {shape} {turns:3} turns"
    benchmark.extra_info.update(bench="headline", shape=shape, way=way, turns=turns, **ways[way].cost(rounds))
    benchmark.pedantic(ways[way].run, rounds=rounds, iterations=1)
    episode.delete()
    client.close()
