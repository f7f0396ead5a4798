"""The child process of one agent call (agents.md, The child process).

`python child_main.py REQUEST_FD CHANNEL_FD [NAME...]`; the names are of variables to hide from the agent. Executed by
path in a fresh interpreter, so the file imports nothing of the package before the request has told where modules are
found. The request pipe brings one frame and then stays silent: its end means that the parent is gone. The channel pipe
takes frames up: started, reports, one outcome.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from miles_ref.agents.api import InfraAbort
    from miles_ref.agents.framing import Frame

CLEANUP_SECONDS = 5.0
"""How long the tasks that the agent left behind may take to end once its coroutine has ended."""

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Channel:
    """Writes whole frames to the parent. Blocks while the parent does not read: that is the report budget at work."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    def send(self, kind: Frame, payload: bytes = b"", *, last: bool = False) -> None:
        """Write one frame; `last` closes the channel for the threads that still run."""
        from miles_ref.agents.framing import pack

        if os.getpid() != self._pid:
            raise RuntimeError("report_to_caller was called in a process that the agent forked: report from the agent")
        with self._lock:
            if self._closed:
                raise RuntimeError("report_to_caller was called after the agent function had ended")
            self._closed = last
            rest = memoryview(pack(kind, payload))
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


def main(request_fd: int, channel_fd: int, not_for_agent: Iterable[str] = ()) -> NoReturn:
    """Run one call and exit."""
    # The parent may ignore or block SIGTERM, and both are inherited. While the agent's module is imported, SIGTERM ends
    # the process at once: there is nothing to clean up yet.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    for descriptor in (request_fd, channel_fd):
        os.set_inheritable(descriptor, False)
    for name in not_for_agent:
        os.environ.pop(name, None)
    request = read_request(request_fd)
    guard(request_fd)
    add_paths(request["path"])

    from miles_ref.agents.api import set_process_reporter
    from miles_ref.agents.framing import Frame
    from miles_ref.agents.functions import resolve

    channel = Channel(channel_fd)
    set_process_reporter(lambda item: channel.send(Frame.REPORT, item))
    try:
        function = resolve(request["fn"])
    except SystemExit as exc:
        leave(exit_code(exc))
    except BaseException as exc:
        channel.send(Frame.OUTCOME, raised("import", exc), last=True)
        leave(0)
    leave(Run(function, request["kwargs"], channel).result())


class Run:
    """The coroutine of the call on an event loop of its own, and what SIGTERM does to it."""

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any], channel: Channel) -> None:
        self._function = function
        self._kwargs = kwargs
        self._channel = channel
        self._terminated = False
        self._task: asyncio.Task[Any] | None = None

    def result(self) -> int | None:
        """Run to the end, send the outcome; return the exit code, or None to die of SIGTERM."""
        from miles_ref.agents.framing import Frame

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            self._task = loop.create_task(self._coroutine())
            loop.add_signal_handler(signal.SIGTERM, self._terminate)
            self._channel.send(Frame.STARTED)
            outcome = self._outcome(loop)
            # The outcome is known: what a task that was left behind raises, even KeyboardInterrupt, is not the agent's.
            # It stops the loop, though, and the others' cleanup goes on; finish_tasks bounds the time.
            finish = loop.create_task(finish_tasks(loop))
            while not finish.done():
                with contextlib.suppress(KeyboardInterrupt):
                    loop.run_until_complete(finish)
        except SystemExit as exc:
            return exit_code(exc)
        if outcome is None:
            return None
        self._channel.send(Frame.OUTCOME, outcome, last=True)
        return 0

    async def _coroutine(self) -> Any:
        value = self._function(**self._kwargs)
        if not hasattr(value, "__await__"):
            raise TypeError(f"an agent function must be async: it returned {type(value).__name__}, not a coroutine")
        return await value

    def _terminate(self) -> None:
        if not self._terminated and self._task is not None:
            self._terminated = True
            self._task.cancel()

    def _outcome(self, loop: asyncio.AbstractEventLoop) -> bytes | None:
        from miles_ref.agents.api import strict_json

        assert self._task is not None
        try:
            value = loop.run_until_complete(self._task)
        except SystemExit:
            raise
        except asyncio.CancelledError as exc:
            return None if self._terminated else raised("run", exc)
        except BaseException as exc:
            return raised("run", exc)
        try:
            return b'{"kind":"ok","value":' + strict_json(value) + b"}"
        except SystemExit:
            raise
        except BaseException as exc:
            return raised("result", exc)


def read_request(descriptor: int) -> dict[str, Any]:
    """Read the one frame of the request pipe; its length field is all that matters before framing can be imported."""
    header = _read_exactly(descriptor, 9)
    request: dict[str, Any] = json.loads(_read_exactly(descriptor, int.from_bytes(header[1:], "big")))
    return request


def _read_exactly(descriptor: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            os._exit(1)  # The parent is gone before it had asked for anything.
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def guard(descriptor: int, *, by_kernel: bool = True) -> None:
    """See that the process group ends when the parent does, however it does: the request pipe then ends.

    Linux can send the group SIGKILL by itself when a pipe ends, even if a thread of the agent holds the interpreter.
    Elsewhere a thread waits for the end.
    """
    if by_kernel and hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            os.read(descriptor, 1)
            os.killpg(0, signal.SIGKILL)  # It had ended before the signal was armed.
        return
    threading.Thread(target=_watch, args=(descriptor,), name="guardian", daemon=True).start()


def _watch(descriptor: int) -> None:
    os.read(descriptor, 1)
    os.killpg(0, signal.SIGKILL)


def add_paths(parent_path: list[str]) -> None:
    """Find modules where the parent finds them; what the call's own PYTHONPATH adds comes first."""
    own = [entry for entry in sys.path if entry not in parent_path]
    sys.path[:] = own + parent_path
    if PACKAGE_PARENT not in sys.path:
        sys.path.append(PACKAGE_PARENT)


def raised(phase: str, exc: BaseException) -> bytes:
    """The outcome, as JSON text, of an agent that raised in `phase`: import, run or result.

    InfraAbort is `infra_abort` in every phase, anything else `error`. That the exception is no Exception, as pytest's
    Skipped and CancelledError are none, changes nothing; only SystemExit is no outcome: it ends the process.
    """
    from miles_ref.agents.api import InfraAbort

    if isinstance(exc, InfraAbort):
        reason = _shown(lambda: exc.reason, "InfraAbort")
        return json_text({"kind": "infra_abort", "reason": reason, "exit_status": _exit_status(exc)})
    return json_text(failure(phase, exc))


def failure(phase: str, exc: BaseException) -> dict[str, Any]:
    """The outcome `error` for an exception of the agent."""
    message = _shown(lambda: exc, "(its message cannot be shown: str() of the exception raised)")
    text = "".join(traceback.format_exception(exc))
    return {"kind": "error", "phase": phase, "type": type(exc).__name__, "message": message, "traceback": text}


def _shown(thing: Callable[[], object], otherwise: str) -> str:
    """The text of something of the agent's, whose code may raise whatever it likes."""
    try:
        return str(thing())
    except BaseException:
        return otherwise


def _exit_status(exc: InfraAbort) -> int | None:
    """The exit status that an agent gave, if it is one; a subclass may have no such attribute."""
    try:
        status: object = exc.exit_status
    except BaseException:
        return None
    return int(status) if isinstance(status, int) and not isinstance(status, bool) else None


def json_text(value: Any) -> bytes:
    """ASCII JSON text, so that lone surrogates in messages do no harm."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


async def finish_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks that the agent left behind, so that their cleanup still runs and may still report."""
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLEANUP_SECONDS)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(loop.shutdown_asyncgens(), CLEANUP_SECONDS)


def exit_code(exc: SystemExit) -> int:
    """What the interpreter makes of sys.exit(...)."""
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code & 0xFF
    print(exc.code, file=sys.stderr)
    return 1


def leave(code: int | None) -> NoReturn:
    """Run the exit functions and exit at once, without waiting for threads; code None is death by SIGTERM."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code is None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(code or 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
