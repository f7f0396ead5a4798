"""What the tests of agent calls share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest

from miles_ref.agents import AgentSettings
from miles_ref.agents.child import request_frame
from miles_ref.process import ReadyProcess

AGENTS = "miles_ref.testing.agents:"
ODD = "tests.e2e.agents.odd:"

FORGED_FRAMES = [
    *(("R", "{", 1), ("R", "[", 5000), ("R", "NaN", 1), ("R", "1],", 1), ("R", "", 1), ("S", "", 1), ("Q", "{}", 1)),
    *(("O", "{", 1), ("O", "[", 5000), ("O", '"text"', 1), ("O", "null", 1), ("O", '{"kind": "done"}', 1)),
    *(("O", '{"kind": "infra_abort", "reason": "X"}', 1), ("O", '{"kind": "ok", "value": Infinity}', 1)),
]
"""Frames that no child of ours sends once its function runs: kind, text, and how often the text is repeated."""


@contextlib.contextmanager
def worker_process(*flags: str, env: dict[str, str] | None = None) -> Iterator[ReadyProcess]:
    """A worker on a free port of loopback. It is killed at the end: draining would wait for what no test fetches."""
    environment = None if env is None else {**os.environ, **env}
    with ReadyProcess([sys.executable, "-m", "miles_ref.worker", *flags], env=environment) as process:
        try:
            yield process
        finally:
            process.stop(grace=0)


async def exchange(url: str, request: bytes) -> bytes:
    """Send bytes as they are; all that comes back until the worker closes the connection."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()


def shorten_window(settings: AgentSettings, seconds: float) -> None:
    """Let the calls of these settings give a worker up so soon from now on.

    A call whose window is short from the start may be over before it is where the test wants it.
    """
    object.__setattr__(settings, "window", seconds)


class Reports(list[Any]):
    """What an agent reported; can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def append(self, item: Any) -> None:
        super().append(item)
        self._changed.set()

    async def reach(self, count: int) -> None:
        """Wait until there are `count` reports."""
        while len(self) < count:
            self._changed.clear()
            await self._changed.wait()


def lives(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pid: int) -> bool:
    """Whether the process ends within a generous time."""
    for _ in range(400):
        if not lives(pid):
            return True
        time.sleep(0.05)
    return False


def children(pid: int | None = None) -> list[int]:
    """Children of a process, zombies included; by default of this one."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == (pid or os.getpid()):
                    found.append(int(name))
    return found


class Watched(bytearray):
    """Bytes of which a weak reference tells whether they are still kept."""


def watch_frames(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[weakref.ref[Watched]]:
    """References to the request frames that `module` makes from now on."""
    made: list[weakref.ref[Watched]] = []

    def watched_frame(fn: str, kwargs: Mapping[str, Any]) -> Watched:
        frame = Watched(request_frame(fn, kwargs))
        made.append(weakref.ref(frame))
        return frame

    monkeypatch.setattr(module, "request_frame", watched_frame)
    return made


def descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
