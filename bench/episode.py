"""What the benches share: servers as processes, episodes against them, and what a process has used.

CPU is user + system seconds of a process and its children; memory is resident bytes. Both are read from outside.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson
import psutil

from miles_ref.process import ReadyProcess

OBSERVATION = "some tool output with words and 123 numbers, "


@contextlib.contextmanager
def backend(out_tokens: int = 200, layers: int = 0, topk: int = 0) -> Iterator[ReadyProcess]:
    """The scripted backend of bench/backend.py on a free port."""
    flags = [f"--out-tokens={out_tokens}", f"--layers={layers}", f"--topk={topk}"]
    with ReadyProcess([sys.executable, "-m", "bench.backend", *flags]) as process:
        yield process


@contextlib.contextmanager
def floor(backend_url: str, rows: bool = False) -> Iterator[ReadyProcess]:
    """The bare proxy of bench/floor.py."""
    flags = ["--rows"] if rows else []
    with ReadyProcess([sys.executable, "-m", "bench.floor", "--backend", backend_url, *flags]) as process:
        yield process


@contextlib.contextmanager
def session_server(backend_url: str, *flags: str) -> Iterator[ReadyProcess]:
    """`miles-ref serve` with the shipped tokenizer tiny-chatml and family qwen3."""
    argv = [sys.executable, "-m", "miles_ref", "serve", "--port", "0", "--backend-url", backend_url]
    argv += ["--hf-checkpoint", "tiny-chatml", "--tito-model", "qwen3", *flags]
    with ReadyProcess(argv) as process:
        yield process


class Client:
    """A blocking HTTP client on one kept connection; it counts the bytes of bodies."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        self._connection = HTTPConnection(at.hostname or "127.0.0.1", at.port, timeout=300)
        self._connection.connect()
        self._connection.sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        self.sent = self.received = 0

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        """The body of a reply below 300; anything else raises."""
        raw = b"" if body is None else orjson.dumps(body)
        self._connection.request(method, path, raw, {"content-type": "application/json"})
        reply = self._connection.getresponse()
        data = reply.read()
        self.sent += len(raw)
        self.received += len(data)
        if reply.status >= 300:
            raise RuntimeError(f"{method} {path}: {reply.status} {data[:300]!r}")
        return data

    def close(self) -> None:
        self._connection.close()


@dataclass
class Episode:
    """A linear conversation of user observations and model turns; a session of its own."""

    client: Client
    observation_chars: int = 1200
    session: str = ""

    def __post_init__(self) -> None:
        self.session = orjson.loads(self.client.call("POST", "/sessions", {}))["session_id"]
        self.messages: list[dict[str, Any]] = []

    def turn(self) -> None:
        """One turn: an observation is appended, the reply's message too."""
        filler = OBSERVATION * (self.observation_chars // len(OBSERVATION) + 1)
        content = f"{len(self.messages)} {filler[: self.observation_chars]}"
        self.messages.append({"role": "user", "content": content})
        body = {"model": "m", "messages": self.messages}
        reply = orjson.loads(self.client.call("POST", f"/sessions/{self.session}/v1/chat/completions", body))
        self.messages.append(reply["choices"][0]["message"])

    def run(self, turns: int) -> Episode:
        """`turns` turns in a row."""
        for _ in range(turns):
            self.turn()
        return self

    def records(self) -> bytes:
        """The GET dump: the quadratic transfer."""
        return self.client.call("GET", f"/sessions/{self.session}")

    def samples(self) -> bytes:
        """The samples payload: the linear transfer."""
        return self.client.call("POST", f"/sessions/{self.session}/samples", {"max_seq_len": None})

    def delete(self) -> None:
        self.client.call("DELETE", f"/sessions/{self.session}")


def processes(pid: int) -> list[psutil.Process]:
    """A process and what it started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """User + system seconds that a process and its children have used.

    From the scheduler's nanoseconds of each thread where the kernel tells them: a turn is much shorter than the ticks
    of 10 ms that processes are counted in. A thread that has ended is not counted then; those of a server stay.
    """
    return sum(_own_seconds(process) for process in processes(pid))


def _own_seconds(process: psutil.Process) -> float:
    threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    try:
        nanoseconds = [int(thread.read_text().split()[0]) for thread in threads]
    except OSError:
        nanoseconds = []
    return sum(nanoseconds) / 1e9 if nanoseconds else float(sum(process.cpu_times()[:2]))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its children."""
    return sum(process.memory_info().rss for process in processes(pid))


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log(cost) over log(size): 1 is linear, 2 is quadratic."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(costs, 1e-9)), 1)[0])


def timed(call: Any, rounds: int = 5) -> tuple[float, Any]:
    """Median wall seconds of `rounds` calls, and the last result."""
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds)), result
