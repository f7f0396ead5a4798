"""The parent's side of a call's child process (agents.md, The child process)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from miles_ref.agents.framing import Frame, FrameError, FrameReader, pack, read_json
from miles_ref.agents.machine import json_text, outcome_fault

DRAIN_SECONDS = 1.0
"""How long the channel is read on after the child's exit, if somebody else still holds it."""

_NO_COERCION = {"PYTHONCOERCECLOCALE": "0"}
_CHILD_MAIN = Path(__file__).with_name("child_main.py")
_READ_BYTES = 256 << 10
_PAGE_BYTES = 4 << 10
_PIPE_BYTES = 64 << 10
_MAX_FINAL_READS = 64

_life_lines: set[int] = set()
"""The ends of the request pipes that this process holds. Each is in here as long as it is open."""


def _let_go() -> None:
    """In a process that this one forked: hold no child's life line, or the child would outlive this process."""
    while _life_lines:
        with contextlib.suppress(OSError):
            os.close(_life_lines.pop())


os.register_at_fork(after_in_child=_let_go)


class Listener(Protocol):
    """Who is told what a child does; every method is called on the event loop, and must not raise."""

    def started(self) -> None:
        """The function is imported, and the coroutine starts. Called at most once."""

    def reported(self, text: bytes, item: Any) -> None:
        """One item, as JSON text and as its value."""

    def outcome_read(self, text: bytes) -> None:
        """The complete outcome, of good form, as JSON text. Called at most once; nothing but `gone` follows."""

    def gone(self, exit_status: int | None) -> None:
        """The child is reaped, its group killed. The exit code, or minus the signal; None if another part reaped it."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What one child runs: the request frame (made by `request_frame`), and its whole environment.

    `report_budget` is how many bytes of reports may be kept before the child is paused; None for no such limit.
    """

    request: bytes
    env: Mapping[str, str]
    report_budget: int | None = None


def request_frame(fn: str, kwargs: Mapping[str, Any]) -> bytes:
    """The frame that tells a child to run `module:qualname` with arguments that are JSON."""
    return pack(Frame.REQUEST, json_text({"fn": fn, "kwargs": kwargs, "path": sys.path}))


class Child:
    """One child process: a fresh interpreter in a session and process group of its own.

    Two pipes lead to it: the request goes down one, whose later end tells the child's guardian that this process is
    gone; frames come up the other. What the agent prints goes to `log`, or to this process's standard error.
    """

    def __init__(self, spec: ChildSpec, listener: Listener, log: IO[bytes] | None = None) -> None:
        """Spawn the child; needs a running event loop. Raises OSError if no process can be made."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._frames = FrameReader()
        self._unsent = memoryview(spec.request)
        self._paused = False
        self._told_started = False
        self._told_outcome = False
        self._ended = False
        self._exited = False
        self._drain_timer: asyncio.TimerHandle | None = None
        with contextlib.ExitStack() as undo:
            request_out, self._request = _pipe(undo)
            # Before the spawn: another thread may fork meanwhile.
            _life_lines.add(self._request)
            undo.callback(_life_lines.discard, self._request)
            self._channel, channel_in = _pipe(undo)
            if spec.report_budget is not None:
                _shorten(channel_in, spec.report_budget)
            self._process = _spawn(spec.env, request_out, channel_in, log)
            undo.pop_all()
        os.close(request_out)
        os.close(channel_in)
        os.set_blocking(self._request, False)
        os.set_blocking(self._channel, False)
        self._exit_watch = _watch_exit(self.pid, self._loop, self._on_exit)
        self._loop.add_reader(self._channel, self._on_readable)
        self._on_writable()

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM to the child; its coroutine sees a CancelledError."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the child's process group."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def pause(self) -> None:
        """Take no more frames for now: report_to_caller blocks in the child once the pipe is full.

        Till then the child may report as much as the pipe holds, and as much again may have been read already: on Linux
        together twice the report budget, at least 8 KiB and at most 128 KiB, elsewhere as the system makes pipes.
        """
        if not self._paused and not self._exited:
            self._paused = True
            self._loop.remove_reader(self._channel)

    def resume(self) -> None:
        """Take frames again, first those that were read but not delivered."""
        if self._paused:
            self._paused = False
            self._deliver()
            if not self._paused and not self._ended:
                self._loop.add_reader(self._channel, self._on_readable)

    def abandon(self) -> None:
        """Kill the group and reap the child now, without the event loop; `gone` is told."""
        if not self._ended:
            self.kill()
            self._told_outcome = True
            self._finish()

    # --- the pipes ---------------------------------------------------------------------------------------------------

    def _on_writable(self) -> None:
        """Write what the pipe takes of the request. The pipe stays open afterwards: it is the child's life line."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._request, self._unsent) :]
        except BlockingIOError:
            self._loop.add_writer(self._request, self._on_writable)
            return
        except BrokenPipeError:
            pass
        self._unsent = memoryview(b"")  # An empty slice would keep the whole frame.
        self._loop.remove_writer(self._request)

    def _on_readable(self) -> None:
        data = self._read()
        if data is None:
            return
        if not data:
            self._loop.remove_reader(self._channel)
            if self._exited:
                self._finish()
            return
        self._frames.feed(data)
        self._deliver()

    def _read(self) -> bytes | None:
        """Bytes of the channel, b"" at its end, None if there are none now."""
        try:
            return os.read(self._channel, _READ_BYTES)
        except BlockingIOError:
            return None

    def _deliver(self) -> None:
        try:
            while not self._paused and not self._told_outcome and (frame := self._frames.next_frame()) is not None:
                self._tell(*frame)
        except FrameError:
            # Somebody else wrote to the channel: what follows cannot be trusted, so there will be no outcome. Nor may a
            # listener get it: what is no JSON text would spoil every reply that it stands in.
            self._told_outcome = True
            self.kill()

    def _tell(self, kind: Frame, payload: bytes) -> None:
        """Tell the listener of a frame. Raises FrameError for one that our own child_main would not have sent."""
        if kind is Frame.REPORT:
            self._listener.reported(payload, read_json(payload))
        elif kind is Frame.STARTED:
            if self._told_started:
                raise FrameError("a second frame that says that the function is imported")
            self._told_started = True
            self._listener.started()
        elif kind is Frame.OUTCOME:
            fault = outcome_fault(read_json(payload))
            if fault is not None:
                raise FrameError(f"an outcome of a wrong form: {fault}")
            self._told_outcome = True
            self._listener.outcome_read(payload)
        else:
            raise FrameError(f"a frame of kind {kind.name} comes from no child")

    # --- the end -----------------------------------------------------------------------------------------------------

    def _on_exit(self) -> None:
        """The child has exited and is not reaped yet, so that its process group cannot become somebody else's."""
        if self._exited:
            return
        self._exited = True
        self._paused = False
        self._deliver()
        if self._told_outcome:
            self._finish()
            return
        self._drain_timer = self._loop.call_later(DRAIN_SECONDS, self._finish)
        self._loop.add_reader(self._channel, self._on_readable)

    def _finish(self) -> None:
        if self._ended:
            return
        for _ in range(_MAX_FINAL_READS):
            data = self._read()
            if not data:
                break
            self._frames.feed(data)
        self._deliver()
        self.kill()
        self._ended = True
        exit_status = _reap(self._process)
        self._release()
        self._listener.gone(exit_status)

    def _release(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._exit_watch()
        self._loop.remove_reader(self._channel)
        self._loop.remove_writer(self._request)
        os.close(self._channel)
        # Out of the set first: once it is closed, its number may be that of something else.
        _life_lines.discard(self._request)
        os.close(self._request)


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    undo.callback(os.close, read_end)
    undo.callback(os.close, write_end)
    return read_end, write_end


def _shorten(pipe: int, budget: int) -> None:
    """Let a pipe hold no more bytes than the budget, or one page, where the system can."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # A user who has many pipes may not even ask for less than is usual.
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, max(_PAGE_BYTES, min(_PIPE_BYTES, budget)))


def _spawn(env: Mapping[str, str], request: int, channel: int, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    # In the C locale the interpreter would set LC_CTYPE, and the agent would see it. The child takes away again what is
    # added here.
    added = {name: value for name, value in _NO_COERCION.items() if name not in env}
    command = [sys.executable, "-u", "-P", str(_CHILD_MAIN), str(request), str(channel), *added]
    output = log if log is not None else _standard_error()
    return subprocess.Popen(
        command,
        env={**env, **added},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(request, channel),
        start_new_session=True,
    )


def _standard_error() -> int:
    """Where agents print: never to standard output, which belongs to whoever reads this process's results."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def _watch_exit(pid: int, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` on the loop once the process has exited, without reaping it. Returns what ends the watch."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        threading.Thread(target=_wait_for_exit, args=(pid, loop, callback), daemon=True).start()
        return lambda: None

    def ready() -> None:
        loop.remove_reader(descriptor)
        callback()

    def end() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)

    loop.add_reader(descriptor, ready)
    return end


def _wait_for_exit(pid: int, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(RuntimeError):  # The loop may have been closed in the meantime.
        loop.call_soon_threadsafe(callback)


def _reap(process: subprocess.Popen[bytes]) -> int | None:
    """Reap an exited child. None if another part of this process has reaped it."""
    try:
        _, status = os.waitpid(process.pid, 0)
    except ChildProcessError:
        process.returncode = 0
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode
