"""What an agent function may use, and the errors that its caller sees (agents.md). Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from miles_ref.errors import MilesRefError, UsageError
from miles_ref.limits import MAX_DEPTH


class InfraAbort(Exception):
    """The infrastructure failed, not the agent: the trial is aborted and not trained (agents.md, The caller's side).

    `reason` is one word: WorkerUnreachable, WorkerLost, WorkerCancelled, WorkerReply, ChildExited, SpawnFailed, or
    an agent's own.
    `exit_status` is the child's exit code, minus the number of the signal that ended it, or None if it has none.
    """

    # For an agent's subclass that does not call __init__.
    reason: str = "InfraAbort"
    exit_status: int | None = None

    def __init__(self, reason: str, exit_status: int | None = None) -> None:
        super().__init__(reason, exit_status)
        self.reason = reason
        self.exit_status = exit_status

    def __str__(self) -> str:
        return self.reason if self.exit_status is None else f"{self.reason} (exit status {self.exit_status})"


class AgentFunctionError(MilesRefError):
    """The agent's own error in another process: the outcome `error` (agents.md, The child process).

    `phase` is import, run or result; `type` and `message` are the exception's; `traceback` is its text in the child.
    """

    def __init__(self, phase: str, type: str, message: str, traceback: str) -> None:
        super().__init__(phase, type, message, traceback)
        self.phase = phase
        self.type = type
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        return f"the agent function failed ({self.phase}): {self.type}: {self.message}"


class WorkerRefusedError(UsageError):
    """A worker refused a call for its configuration: 400, 401, 403, 409 or 413 (agents.md, The caller's side)."""

    def __init__(self, message: str, *, url: str, status: int, code: str) -> None:
        super().__init__(message)
        self.url = url
        self.status = status
        self.code = code


class WorkerReplyError(InfraAbort):
    """What a worker answered is not what the contract says: an outcome of another form (agents.md, Outcomes).

    An InfraAbort, because it says nothing of the agent; `fault` says what was wrong.
    """

    def __init__(self, fault: str, url: str) -> None:
        super().__init__("WorkerReply")
        self.args = (fault, url)
        self.fault = fault
        self.url = url

    def __str__(self) -> str:
        return f"{self.reason}: the worker {self.url} gave an outcome that is none: {self.fault}"


Reporter = Callable[[bytes], None]
"""Takes one item as JSON text."""

_call_reporter: ContextVar[Reporter | None] = ContextVar("miles_ref_agent_reporter", default=None)
_process_reporter: Reporter | None = None


def report_to_caller(item: Any) -> None:
    """Send one JSON value to the caller, ahead of the result, in order, exactly once (agents.md, The child process).

    May be called any number of times, from any thread of the call's process, also in the cleanup after a cancel; inline
    from the call's tasks and from asyncio.to_thread, where `on_report` runs then, too. Blocks while the caller has not
    read on and the call's report budget is used up. Raises TypeError or ValueError for what is not JSON, or nested more
    than MAX_DEPTH levels deep, RuntimeError outside of a call.
    """
    reporter = _call_reporter.get() or _process_reporter
    if reporter is None:
        raise RuntimeError("report_to_caller was called outside of an agent call: run the agent by call_agent_function")
    reporter(strict_json(item))


@contextlib.contextmanager
def reporting_to(reporter: Reporter) -> Iterator[None]:
    """Make `reporter` the target of report_to_caller in this context: one inline call."""
    token = _call_reporter.set(reporter)
    try:
        yield
    finally:
        _call_reporter.reset(token)


def set_process_reporter(reporter: Reporter) -> None:
    """Make `reporter` the target in every thread of this process: a child process serves one call."""
    global _process_reporter
    _process_reporter = reporter


def strict_json(value: Any) -> bytes:
    """Return the JSON text of `value`; ASCII only.

    Raises TypeError for what JSON has no form for, ValueError for NaN, infinities, circular references and more than
    MAX_DEPTH levels: json.dumps alone would write NaN as no JSON, turn keys that are not strings into other keys, and
    write what other parsers refuse as too deep.
    """
    _check_levels(value)
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def check_json(value: Any) -> None:
    """Check that `value` is JSON, of any depth that can be written. Raises TypeError or ValueError as strict_json."""
    try:
        json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("not JSON: nested too deeply to be written") from None
    for _ in _levels(value):  # Ends: what json.dumps has written does not hold itself.
        pass


def _check_levels(value: Any) -> None:
    for depth, _ in enumerate(_levels(value), start=1):
        if depth > MAX_DEPTH:
            raise ValueError(f"not JSON that others can read: nested more than {MAX_DEPTH} levels deep, or circular")


def _levels(value: Any) -> Iterator[None]:
    """Go down level by level, each object once in a level; there is no end to circular references.

    Yields before it looks at a level. Raises TypeError for keys that are not strings.
    """
    level = [value] if isinstance(value, (dict, list, tuple)) else []
    while level:
        yield
        below: dict[int, Any] = {}
        for item in level:
            if isinstance(item, dict):
                for key in item:
                    if not isinstance(key, str):
                        raise TypeError(f"not JSON: the key {key!r} of an object is not a string")
            inner = item.values() if isinstance(item, dict) else item
            below.update((id(one), one) for one in inner if isinstance(one, (dict, list, tuple)))
        level = list(below.values())
