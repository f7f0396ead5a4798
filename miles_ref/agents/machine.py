"""The life cycle of a call as two tables, without I/O or a clock of its own (agents.md).

`WORKER_TABLE` is the life of a call where its child process runs: on a worker, or on this host for mode subproc.
`CALLER_TABLE` is the same call as its caller sees it across a network. What a table does not list cannot happen, and
raises. docs/agent-calls.md shows both as diagrams made by `mermaid`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

# --- where the child process runs ------------------------------------------------------------------------------------


class State(StrEnum):
    """States of a call where it runs."""

    UNKNOWN = "unknown"
    IMPORTING = "importing"
    RUNNING = "running"
    ENDING = "ending"
    CANCELLING = "cancelling"
    KILLED = "killed"
    FINISHED = "finished"
    FETCHED = "fetched"
    EXPIRED = "expired"
    TOMBSTONE = "tombstone"


class Event(StrEnum):
    """What can happen to a call where it runs."""

    SUBMIT = "submit"
    STARTED = "function imported"
    OUTCOME = "outcome read"
    CANCEL = "cancel"
    KILL = "kill"
    GONE = "child gone"
    FETCHED = "outcome written to a caller"
    TIME_UP = "time up"


class Action(StrEnum):
    """What the shell, or the book-keeping, has to do on a transition."""

    SPAWN = "spawn"
    SIGTERM = "SIGTERM"
    SIGKILL = "SIGKILL"
    FIX_OUTCOME = "fix the outcome"
    SETTLE_EXITED = "outcome is ChildExited"
    SETTLE_CANCELLED = "outcome is cancelled"


# --- at the caller ---------------------------------------------------------------------------------------------------


class CallerState(StrEnum):
    """States of a worker call at its caller."""

    FRESH = "fresh"
    SUBMITTING = "submitting"
    UNSURE = "unsure"
    ADMITTED = "admitted"
    CLOSING = "closing"
    ENDED = "ended"


class CallerEvent(StrEnum):
    """What can happen to a worker call at its caller."""

    SUBMIT_SENT = "submit sent"
    ACCEPTED = "200 to a submit"
    NOT_ADMITTED = "429, 503 or no connection"
    NO_ANSWER = "no answer"
    REBOOTED = "other boot id"
    GONE = "404 or 410 expired"
    CANCELLED = "410 cancelled"
    TOMBSTONED = "410 tombstone"
    MISCONFIGURED = "400, 401, 403, 409 or 413"
    OUTCOME = "outcome received"
    ABORT = "abort or own task cancelled"
    WINDOW_OVER = "window over"


class End(StrEnum):
    """How a worker call ends at its caller; the first is whatever the outcome says."""

    OUTCOME = "the outcome"
    CANCELLED = "WorkerCancelled"
    LOST = "WorkerLost"
    UNREACHABLE = "WorkerUnreachable"
    MISCONFIGURED = "configuration error"


S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
A = TypeVar("A", bound=StrEnum)


class Row(NamedTuple, Generic[S, E, A]):
    """One transition: in `state`, `event` leads to `next`, with `actions` in order."""

    state: S
    event: E
    next: S
    actions: tuple[A, ...] = ()


WORKER_TABLE: tuple[Row[State, Event, Action], ...] = (
    Row(State.UNKNOWN, Event.SUBMIT, State.IMPORTING, (Action.SPAWN,)),
    Row(State.UNKNOWN, Event.CANCEL, State.TOMBSTONE),
    Row(State.TOMBSTONE, Event.CANCEL, State.TOMBSTONE),
    Row(State.TOMBSTONE, Event.TIME_UP, State.UNKNOWN),
    Row(State.IMPORTING, Event.STARTED, State.RUNNING),
    Row(State.IMPORTING, Event.OUTCOME, State.ENDING, (Action.FIX_OUTCOME,)),
    Row(State.IMPORTING, Event.CANCEL, State.CANCELLING, (Action.SIGTERM,)),
    Row(State.IMPORTING, Event.TIME_UP, State.CANCELLING, (Action.SIGTERM,)),
    Row(State.IMPORTING, Event.KILL, State.KILLED, (Action.SIGKILL,)),
    Row(State.IMPORTING, Event.GONE, State.FINISHED, (Action.SETTLE_EXITED,)),
    Row(State.RUNNING, Event.OUTCOME, State.ENDING, (Action.FIX_OUTCOME,)),
    Row(State.RUNNING, Event.CANCEL, State.CANCELLING, (Action.SIGTERM,)),
    Row(State.RUNNING, Event.TIME_UP, State.CANCELLING, (Action.SIGTERM,)),
    Row(State.RUNNING, Event.KILL, State.KILLED, (Action.SIGKILL,)),
    Row(State.RUNNING, Event.GONE, State.FINISHED, (Action.SETTLE_EXITED,)),
    # The outcome is fixed; only the child's exit is still awaited.
    Row(State.ENDING, Event.CANCEL, State.ENDING),
    Row(State.ENDING, Event.TIME_UP, State.ENDING, (Action.SIGKILL,)),
    Row(State.ENDING, Event.KILL, State.ENDING, (Action.SIGKILL,)),
    Row(State.ENDING, Event.GONE, State.FINISHED),
    # A cancel that was accepted wins over whatever the coroutine still returns.
    Row(State.CANCELLING, Event.STARTED, State.CANCELLING),
    Row(State.CANCELLING, Event.OUTCOME, State.CANCELLING),
    Row(State.CANCELLING, Event.CANCEL, State.CANCELLING),
    Row(State.CANCELLING, Event.TIME_UP, State.KILLED, (Action.SIGKILL,)),
    Row(State.CANCELLING, Event.KILL, State.KILLED, (Action.SIGKILL,)),
    Row(State.CANCELLING, Event.GONE, State.FINISHED, (Action.SETTLE_CANCELLED,)),
    Row(State.KILLED, Event.STARTED, State.KILLED),
    Row(State.KILLED, Event.OUTCOME, State.KILLED),
    Row(State.KILLED, Event.CANCEL, State.KILLED),
    Row(State.KILLED, Event.KILL, State.KILLED),
    Row(State.KILLED, Event.GONE, State.FINISHED, (Action.SETTLE_CANCELLED,)),
    Row(State.FINISHED, Event.CANCEL, State.FINISHED),
    Row(State.FINISHED, Event.FETCHED, State.FETCHED),
    Row(State.FINISHED, Event.TIME_UP, State.EXPIRED),
    Row(State.FETCHED, Event.CANCEL, State.FETCHED),
    Row(State.FETCHED, Event.FETCHED, State.FETCHED),
    Row(State.FETCHED, Event.TIME_UP, State.EXPIRED),
    Row(State.EXPIRED, Event.CANCEL, State.EXPIRED),
    Row(State.EXPIRED, Event.FETCHED, State.EXPIRED),
    Row(State.EXPIRED, Event.TIME_UP, State.UNKNOWN),
)

CALLER_TABLE: tuple[Row[CallerState, CallerEvent, End], ...] = (
    # Nothing was sent that could have admitted the call, or every answer proved that it was not.
    Row(CallerState.FRESH, CallerEvent.SUBMIT_SENT, CallerState.SUBMITTING),
    Row(CallerState.FRESH, CallerEvent.NOT_ADMITTED, CallerState.FRESH),
    Row(CallerState.FRESH, CallerEvent.NO_ANSWER, CallerState.FRESH),
    Row(CallerState.FRESH, CallerEvent.MISCONFIGURED, CallerState.ENDED, (End.MISCONFIGURED,)),
    Row(CallerState.FRESH, CallerEvent.ABORT, CallerState.ENDED, (End.CANCELLED,)),
    Row(CallerState.FRESH, CallerEvent.WINDOW_OVER, CallerState.ENDED, (End.UNREACHABLE,)),
    # One submit is on its way, and every earlier one was answered.
    Row(CallerState.SUBMITTING, CallerEvent.ACCEPTED, CallerState.ADMITTED),
    Row(CallerState.SUBMITTING, CallerEvent.NOT_ADMITTED, CallerState.FRESH),
    Row(CallerState.SUBMITTING, CallerEvent.REBOOTED, CallerState.FRESH),
    Row(CallerState.SUBMITTING, CallerEvent.NO_ANSWER, CallerState.UNSURE),
    Row(CallerState.SUBMITTING, CallerEvent.GONE, CallerState.ENDED, (End.LOST,)),
    Row(CallerState.SUBMITTING, CallerEvent.CANCELLED, CallerState.CLOSING),
    Row(CallerState.SUBMITTING, CallerEvent.TOMBSTONED, CallerState.ENDED, (End.CANCELLED,)),
    Row(CallerState.SUBMITTING, CallerEvent.MISCONFIGURED, CallerState.ENDED, (End.MISCONFIGURED,)),
    Row(CallerState.SUBMITTING, CallerEvent.ABORT, CallerState.CLOSING),
    # A submit ended without an answer: it may arrive still, so only its own worker can tell.
    Row(CallerState.UNSURE, CallerEvent.SUBMIT_SENT, CallerState.UNSURE),
    Row(CallerState.UNSURE, CallerEvent.ACCEPTED, CallerState.ADMITTED),
    Row(CallerState.UNSURE, CallerEvent.NOT_ADMITTED, CallerState.UNSURE),
    Row(CallerState.UNSURE, CallerEvent.NO_ANSWER, CallerState.UNSURE),
    Row(CallerState.UNSURE, CallerEvent.REBOOTED, CallerState.ENDED, (End.LOST,)),
    Row(CallerState.UNSURE, CallerEvent.GONE, CallerState.ENDED, (End.LOST,)),
    Row(CallerState.UNSURE, CallerEvent.CANCELLED, CallerState.CLOSING),
    Row(CallerState.UNSURE, CallerEvent.TOMBSTONED, CallerState.ENDED, (End.CANCELLED,)),
    Row(CallerState.UNSURE, CallerEvent.MISCONFIGURED, CallerState.ENDED, (End.MISCONFIGURED,)),
    Row(CallerState.UNSURE, CallerEvent.ABORT, CallerState.CLOSING),
    Row(CallerState.UNSURE, CallerEvent.WINDOW_OVER, CallerState.ENDED, (End.UNREACHABLE,)),
    Row(CallerState.ADMITTED, CallerEvent.NO_ANSWER, CallerState.ADMITTED),
    Row(CallerState.ADMITTED, CallerEvent.REBOOTED, CallerState.ENDED, (End.LOST,)),
    Row(CallerState.ADMITTED, CallerEvent.GONE, CallerState.ENDED, (End.LOST,)),
    Row(CallerState.ADMITTED, CallerEvent.TOMBSTONED, CallerState.ENDED, (End.CANCELLED,)),
    Row(CallerState.ADMITTED, CallerEvent.MISCONFIGURED, CallerState.ENDED, (End.MISCONFIGURED,)),
    Row(CallerState.ADMITTED, CallerEvent.OUTCOME, CallerState.ENDED, (End.OUTCOME,)),
    Row(CallerState.ADMITTED, CallerEvent.ABORT, CallerState.CLOSING),
    Row(CallerState.ADMITTED, CallerEvent.WINDOW_OVER, CallerState.ENDED, (End.UNREACHABLE,)),
    # DELETE is on its way, polls carry cancel=1, and no submit is sent any more.
    Row(CallerState.CLOSING, CallerEvent.NO_ANSWER, CallerState.CLOSING),
    Row(CallerState.CLOSING, CallerEvent.REBOOTED, CallerState.ENDED, (End.LOST,)),
    Row(CallerState.CLOSING, CallerEvent.GONE, CallerState.ENDED, (End.LOST,)),
    Row(CallerState.CLOSING, CallerEvent.TOMBSTONED, CallerState.ENDED, (End.CANCELLED,)),
    Row(CallerState.CLOSING, CallerEvent.MISCONFIGURED, CallerState.ENDED, (End.MISCONFIGURED,)),
    Row(CallerState.CLOSING, CallerEvent.OUTCOME, CallerState.ENDED, (End.OUTCOME,)),
    Row(CallerState.CLOSING, CallerEvent.ABORT, CallerState.CLOSING),
    Row(CallerState.CLOSING, CallerEvent.WINDOW_OVER, CallerState.ENDED, (End.CANCELLED,)),
    Row(CallerState.ENDED, CallerEvent.ABORT, CallerState.ENDED),
)


class ImpossibleEvent(RuntimeError):
    """An event that the table does not list for the state: a defect of the shell that sent it."""


class Machine(Generic[S, E, A]):
    """A current state and the table that moves it."""

    def __init__(self, table: Sequence[Row[S, E, A]], state: S) -> None:
        self._rows = {(row.state, row.event): row for row in table}
        self.state = state

    def can(self, event: E) -> bool:
        """Whether the table lists `event` for the current state."""
        return (self.state, event) in self._rows

    def apply(self, event: E) -> tuple[A, ...]:
        """Move by `event`; return what has to be done. Raises ImpossibleEvent."""
        row = self._rows.get((self.state, event))
        if row is None:
            raise ImpossibleEvent(f"{event!s} cannot happen to a call that is {self.state!s}")
        self.state = row.next
        return row.actions


def mermaid(table: Sequence[Row[Any, Any, Any]]) -> str:
    """Draw a table as a mermaid state diagram, one line a transition, in the table's order."""
    lines = ["stateDiagram-v2"]
    for row in table:
        actions = f" / {', '.join(row.actions)}" if row.actions else ""
        lines.append(f"    {row.state} --> {row.next} : {row.event}{actions}")
    return "\n".join(lines) + "\n"


# --- one call where it runs: the machine, its timer, its outcome ------------------------------------------------------

LIVE = frozenset({State.IMPORTING, State.RUNNING, State.ENDING, State.CANCELLING, State.KILLED})
"""States in which the child process exists."""

LINGER_SECONDS = 5.0
"""How long a child may take to exit once its outcome was read."""

ORPHANABLE = frozenset({State.IMPORTING, State.RUNNING})
"""States in which the orphan timer runs."""


def json_text(value: Any) -> bytes:
    """Compact ASCII JSON text of a value that should be JSON. Raises TypeError or ValueError if it is not."""
    try:
        return json.dumps(value, separators=(",", ":")).encode("ascii")
    except RecursionError:
        raise ValueError("not JSON: nested too deeply to be written") from None


OUTCOME_MEMBERS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "ok": {"value": object},
    "error": {"phase": str, "type": str, "message": str, "traceback": str},
    "infra_abort": {"reason": str, "exit_status": (int, NoneType)},
    "cancelled": {"by": str, "exit_status": (int, NoneType)},
}
"""What each kind of outcome holds beside `kind`."""


def outcome_fault(outcome: Any) -> str | None:
    """What is wrong with the form of an outcome (agents.md, Outcomes), or None. Says no values of the agent's."""
    if not isinstance(outcome, dict):
        return f"it must be an object, not {type(outcome).__name__}"
    kind = outcome.get("kind")
    members = OUTCOME_MEMBERS.get(kind) if isinstance(kind, str) else None
    if members is None:
        return f"its kind must be one of {', '.join(OUTCOME_MEMBERS)}, not {kind!r}"
    for name, types in members.items():
        if name not in outcome:
            return f"an outcome {kind} must have {name}"
        value = outcome[name]
        if not isinstance(value, types) or (isinstance(value, bool) and types is not object):
            return f"{name} of an outcome {kind} must not be {type(value).__name__}"
    return None


class Call:
    """One call where it runs. Every method takes the time `now` in seconds of one monotonic clock.

    `times` gives how long a state may last, in seconds; a state without an entry lasts. `deadline` is when the current
    one is over. `outcome` is JSON text as soon as it is fixed, and may be shown once the state has left LIVE.
    """

    def __init__(self, times: Mapping[State, float], state: State = State.UNKNOWN) -> None:
        self._machine: Machine[State, Event, Action] = Machine(WORKER_TABLE, state)
        self._times = times
        self.deadline: float | None = None
        self.since = 0.0
        self.outcome: bytes | None = None
        self.cancelled_by: str | None = None

    @property
    def state(self) -> State:
        return self._machine.state

    def submit(self, now: float) -> tuple[Action, ...]:
        """Admit the call: its child is to be spawned."""
        return self._apply(Event.SUBMIT, now)

    def started(self, now: float) -> tuple[Action, ...]:
        """The child has imported the function and runs it."""
        return self._apply(Event.STARTED, now)

    def outcome_read(self, outcome: bytes, now: float) -> tuple[Action, ...]:
        """The complete outcome frame of the child was read: it is fixed, unless a cancel came first."""
        actions = self._apply(Event.OUTCOME, now)
        if Action.FIX_OUTCOME in actions:
            self.outcome = outcome
        return actions

    def gone(self, exit_status: int | None, now: float, reason: str = "ChildExited") -> tuple[Action, ...]:
        """The child has exited and was reaped, or could not be started; settle the outcome if it is not fixed."""
        actions = self._apply(Event.GONE, now)
        if Action.SETTLE_EXITED in actions:
            self.outcome = json_text({"kind": "infra_abort", "reason": reason, "exit_status": exit_status})
        if Action.SETTLE_CANCELLED in actions:
            self.outcome = json_text({"kind": "cancelled", "by": self.cancelled_by, "exit_status": exit_status})
        return actions

    def cancel(self, by: str, now: float) -> tuple[Action, ...]:
        """Accept a cancel by caller, orphan or drain. Only the first one signals, and starts the grace."""
        return self._cancel(Event.CANCEL, by, now)

    def kill(self, by: str, now: float) -> tuple[Action, ...]:
        """Accept a cancel without a grace."""
        return self._cancel(Event.KILL, by, now)

    def fetched(self, now: float) -> None:
        """A reply that holds the outcome was written in full."""
        self._apply(Event.FETCHED, now)

    def hold(self) -> None:
        """Stop the orphan timer while a poll is held."""
        if self.state in ORPHANABLE:
            self.deadline = None

    def release(self, now: float) -> None:
        """Start the orphan timer again: the last held poll has ended."""
        if self.state in ORPHANABLE:
            self._start_timer(now)

    def tick(self, now: float) -> tuple[Action, ...]:
        """Let the time pass: if the deadline is reached, the state is over."""
        if self.deadline is None or now < self.deadline:
            return ()
        self.deadline = None
        if self.state in ORPHANABLE:
            return self._cancel(Event.TIME_UP, "orphan", now)
        return self._apply(Event.TIME_UP, now)

    def _cancel(self, event: Event, by: str, now: float) -> tuple[Action, ...]:
        if self.cancelled_by is None and self.state in ORPHANABLE:
            self.cancelled_by = by
        return self._apply(event, now)

    def _apply(self, event: Event, now: float) -> tuple[Action, ...]:
        before = self.state
        actions = self._machine.apply(event)
        timed_as_one = before in ORPHANABLE and self.state in ORPHANABLE
        if self.state is not before and not timed_as_one:
            self.since = now
            self._start_timer(now)
        return actions

    def _start_timer(self, now: float) -> None:
        duration = self._times.get(self.state)
        self.deadline = None if duration is None else now + duration
