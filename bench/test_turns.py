"""What a turn costs over a bare proxy that only parses and emits the JSON (the floor): by depth, and by width."""

from __future__ import annotations

from typing import Any

import pytest

from bench.conftest import sizes
from bench.episode import Client, Episode, cpu_seconds, floor, session_server
from miles_ref.process import ReadyProcess

REPLAY = ["--use-rollout-routing-replay", "--num-layers", "8", "--moe-router-topk", "32"]
TURNS = 8
"""Turns that are measured at each depth."""


def cpu_per_turn(episode: Episode, pid: int) -> float:
    """CPU seconds of the process for each of TURNS turns from here on."""
    before = cpu_seconds(pid)
    episode.run(TURNS)
    return (cpu_seconds(pid) - before) / TURNS


@pytest.mark.parametrize("depth", sizes(1, 16, 64, 128))
@pytest.mark.parametrize("serving", ["floor", "v1", "v2"])
def test_turn_by_depth(benchmark: Any, plain_backend: ReadyProcess, serving: str, depth: int) -> None:
    opened = (
        floor(plain_backend.url)
        if serving == "floor"
        else session_server(plain_backend.url, "--use-session-server", serving)
    )
    with opened as server:
        client = Client(server.url)
        episode = FloorEpisode(client) if serving == "floor" else Episode(client)
        episode.run(depth)
        assert len(episode.messages) == 2 * depth
        assert episode.messages[-1]["content"].startswith("word ")
        benchmark.group = f"turn at depth {depth:3}"
        benchmark.extra_info.update(bench="turn", serving=serving, depth=depth, cpu_s=cpu_per_turn(episode, server.pid))
        benchmark.pedantic(episode.turn, rounds=TURNS, iterations=1, warmup_rounds=1)
        client.close()


class FloorEpisode(Episode):
    """The floor keeps no sessions: the id is only a path."""

    def __post_init__(self) -> None:
        self.session, self.messages = "none", []


@pytest.mark.parametrize("width", sizes(1, 64, 512))
def test_turn_by_width(benchmark: Any, plain_backend: ReadyProcess, width: int) -> None:
    """A turn at a node that has `width` children already (v2): branches of one root, each its own first question."""
    with session_server(plain_backend.url, "--use-session-server", "v2") as server:
        client = Client(server.url)
        episode = Episode(client).run(1)
        stem = list(episode.messages)
        for branch in range(width):
            episode.messages = [*stem, {"role": "user", "content": f"branch {branch}"}]
            episode.turn()

        def turn() -> None:
            episode.messages = list(stem)
            episode.turn()

        turn()
        assert len(episode.messages) == len(stem) + 2
        benchmark.group = "turn by width of the tree"
        benchmark.extra_info.update(bench="width", width=width)
        benchmark.pedantic(turn, rounds=TURNS, iterations=1, warmup_rounds=1)
        client.close()


@pytest.mark.parametrize("serving", ["floor", "v1", "v1 additional rows"])
def test_turn_with_replay_rows(benchmark: Any, replay_backend: ReadyProcess, serving: str) -> None:
    """Replay rows of 1024 bytes a token at 32 turns; the floor receives, parses and decodes the same replies."""
    flags = [*REPLAY, *(["--pause-generation-mode", "in_place"] if "additional" in serving else [])]
    with (
        floor(replay_backend.url, rows=True)
        if serving == "floor"
        else session_server(replay_backend.url, *flags) as server
    ):
        client = Client(server.url)
        episode = FloorEpisode(client) if serving == "floor" else Episode(client)
        episode.run(sizes(1, 32)[-1])
        benchmark.group = "turn with replay rows"
        benchmark.extra_info.update(bench="turn-replay", serving=serving, cpu_s=cpu_per_turn(episode, server.pid))
        benchmark.pedantic(episode.turn, rounds=TURNS, iterations=1)
        client.close()
