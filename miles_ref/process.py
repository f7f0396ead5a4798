"""Start a server of this project as a process, wait until it can serve, and end it for good.

A server says that it is ready by one JSON line with `url` and `pid` on its standard output (session-http.md, serve).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

from miles_ref.errors import MilesRefError

_TAIL = 4000  # characters of standard error that an error message shows
_OUTPUT_SECONDS = 5  # a grandchild that left the group may hold standard output open for ever


class ProcessStartError(MilesRefError):
    """The process ended, or was not ready in time; the message has the end of its standard error."""


class ReadyProcess:
    """A server process. `url` and `pid` are what it printed when it could serve.

    It leads a process group of its own, and the whole group is killed at the end, so that nothing it started stays.
    `env` replaces the environment; None inherits it. `timeout` (seconds) is for the start.
    Raises ProcessStartError; OSError where there is no such program.
    """

    url: str
    pid: int

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 60) -> None:
        self._argv = list(argv)
        self._last_words = ""
        # A file rather than a pipe: nobody has to read it for the process to go on.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        try:
            self._process = subprocess.Popen(
                self._argv,
                env=None if env is None else dict(env),
                stdin=subprocess.PIPE,  # never written to; it closes when we die, for who wants to die with us
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except BaseException:
            self._errors.close()
            raise
        self._ready: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_output, name=f"output of {argv[0]}", daemon=True)
        self._reader.start()
        try:
            self._await_ready(timeout)
        except BaseException:
            self.stop(grace=0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the signal that ended it; None while it runs."""
        return self._process.poll()

    def stderr(self) -> str:
        """What the process wrote to standard error so far."""
        if self._errors.closed:
            return self._last_words
        # Not seek and read: the process writes at the position that the two share.
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode(errors="replace")

    def stop(self, grace: float = 10) -> int:
        """SIGTERM, up to `grace` seconds, then SIGKILL for the group. The exit status; may be called again."""
        if not self._errors.closed:
            if self._process.poll() is None and grace > 0:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._reader.join(timeout=_OUTPUT_SECONDS)
            self._last_words = self.stderr()
            self._errors.close()
        return self._process.wait()

    def _read_output(self) -> None:
        """Report the first line that says ready; read on, so that the process never waits for us."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            waiting = True
            for line in output:
                if waiting and (said := _ready_line(line)) is not None:
                    waiting = False
                    self._ready.put(said)
        self._ready.put(None)

    def _await_ready(self, timeout: float) -> None:
        try:
            said = self._ready.get(timeout=timeout)
        except queue.Empty:
            raise ProcessStartError(self._failure(f"was not ready after {timeout:g} s")) from None
        if said is None:
            raise ProcessStartError(self._failure("ended before it was ready"))
        self.url, self.pid = said["url"], said["pid"]

    def _failure(self, what: str) -> str:
        tail = self.stderr()[-_TAIL:]
        return f"{' '.join(self._argv)} {what}; its standard error ends with:\n{tail}"


def url_of(host: str, port: int) -> str:
    """The http URL of an address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def say_ready(url: str) -> None:
    """Print the line that `ReadyProcess` waits for."""
    print(json.dumps({"url": url, "pid": os.getpid()}), flush=True)


def _ready_line(line: bytes) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    usable = isinstance(said, dict) and isinstance(said.get("url"), str) and isinstance(said.get("pid"), int)
    return said if usable else None
