"""Implementations of others that a run starts: given back whole, with their process group and files, whatever happens.

They print no ready line as ours do (`miles_ref.process`): a server is ready when it answers GET /health.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from miles_ref.errors import MilesRefError

_LOWEST_PORT = 10_000

START_TIMEOUT = 90.0
"""Seconds that a program may need until it serves."""

_STREAM_SECONDS = 2.0  # a process that left the program's group may hold its pipes open for ever


class ProgramError(MilesRefError):
    """A program does not start, does not answer, or does not end; the message has its last words."""


class Program:
    """A child process in a group of its own. Its standard error goes to a file that messages quote."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bool = False) -> None:
        self.argv = list(argv)
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._threads: list[tuple[IO[bytes], threading.Thread]] = []
        try:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._words,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            self._words.close()
            raise ProgramError(f"{self.argv[0]!r} cannot be started: {error}") from error

    def last_words(self, most: int = 1500) -> str:
        """The end of what it wrote to standard error."""
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - most))
        return self._words.read().decode("utf-8", "replace").strip()

    def in_background(self, stream: IO[bytes], work: Callable[[], object]) -> None:
        """Do in a thread what may block on `stream`, one of the process's pipes; `close` waits for it."""
        thread = threading.Thread(target=work, name=f"pipe of {self.argv[0]}", daemon=True)
        self._threads = [one for one in self._threads if one[1].is_alive()]
        self._threads.append((stream, thread))
        thread.start()

    def wait_healthy(self, url: str, timeout: float = START_TIMEOUT) -> None:
        """Return when GET /health answers 200. Raises ProgramError when it ends or the time is over."""
        assert self.process.stdout is not None
        self.in_background(self.process.stdout, self.process.stdout.read)
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise ProgramError(f"{self._name()} ended with status {self.process.returncode}: {self.last_words()}")
            if healthy(url):
                return
            time.sleep(0.05)
        raise ProgramError(f"{self._name()} answers no GET {url}/health within {timeout:.0f} s: {self.last_words()}")

    def _name(self) -> str:
        return " ".join(self.argv[:4]) + (" ..." if len(self.argv) > 4 else "")

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self, grace: float = 15.0) -> None:
        """SIGTERM, after the grace SIGKILL to the group; then every descriptor is given back.

        Except a pipe that a process out of the group's reach holds open, with a thread of ours blocked on it: to close
        it would wait for that thread.
        """
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        self.kill()
        self.process.wait()
        end = time.monotonic() + _STREAM_SECONDS
        for _, thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        busy = [stream for stream, thread in self._threads if thread.is_alive()]
        for stream in (self.process.stdin, self.process.stdout, self._words):
            if stream is not None and stream not in busy:
                with contextlib.suppress(OSError):
                    stream.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def healthy(url: str) -> bool:
    """Whether GET /health answers 200."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "127.0.0.1", at.port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_port() -> int:
    """A port that was free a moment ago, for programs that cannot choose one themselves.

    Not of those that the system gives away by itself, where it says which: one that it had given back could belong to
    any connection by the time that the program listens.
    """
    given_away = _first_given_away()
    for _ in range(100):
        port = _LOWEST_PORT + secrets.randbelow(given_away - _LOWEST_PORT) if given_away > 2 * _LOWEST_PORT else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise ProgramError(f"no free port among a hundred from {_LOWEST_PORT} to {given_away}; end what uses them")


def _first_given_away() -> int:
    """Where the range begins from which the system takes ports for connections; 0 where it does not say."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
