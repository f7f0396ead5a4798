"""The abort matrix of agents.md: its cells, why some cannot occur, and what each must show.

What is expected is not written down cell by cell: it follows from the two tables of the life cycle, by walking them
through the cell's events.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from miles_ref.agents.machine import (
    CALLER_TABLE,
    LIVE,
    Call,
    CallerEvent,
    CallerState,
    End,
    Machine,
    State,
)


class AbortScope(StrEnum):
    """What the abort asks for."""

    OWN = "own"
    ANOTHER = "another"
    NULL = "null"
    EVERY = "every"


class CallScope(StrEnum):
    """Whether the call belongs to a scope."""

    SET = "set"
    NONE = "none"


class Moment(StrEnum):
    """Where the call is when the abort comes."""

    SUBMITTING = "submitting"
    HELD = "submit-held"
    IMPORTING = "importing"
    RUNNING = "running"
    BLOCKED = "blocked-in-thread"
    REPORTING = "reporting"
    CLEANUP = "in-cleanup"
    UNFETCHED = "finished-not-fetched"
    LOST = "worker-lost"


class Delete(StrEnum):
    """What becomes of the DELETE."""

    ARRIVES = "arrives"
    OVERTAKES = "overtakes"
    LOST = "lost"


class Caller(StrEnum):
    """What becomes of the task that made the call."""

    ALIVE = "alive"
    CANCELLED = "task-cancelled"


STATES: dict[Moment, tuple[CallerState, State | None]] = {
    Moment.SUBMITTING: (CallerState.SUBMITTING, State.IMPORTING),
    Moment.HELD: (CallerState.SUBMITTING, State.UNKNOWN),
    Moment.IMPORTING: (CallerState.ADMITTED, State.IMPORTING),
    Moment.RUNNING: (CallerState.ADMITTED, State.RUNNING),
    Moment.BLOCKED: (CallerState.ADMITTED, State.RUNNING),
    Moment.REPORTING: (CallerState.ADMITTED, State.RUNNING),
    Moment.CLEANUP: (CallerState.ADMITTED, State.CANCELLING),
    Moment.UNFETCHED: (CallerState.ADMITTED, State.FINISHED),
    Moment.LOST: (CallerState.ADMITTED, None),
}
"""The call's state at its caller and at the worker, None if there is no worker any more."""

CANCELLED_ERROR = "CancelledError"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell."""

    abort: AbortScope
    call: CallScope
    moment: Moment
    delete: Delete
    caller: Caller

    @property
    def id(self) -> str:
        return f"abort-{self.abort}/call-{self.call}/{self.moment}/delete-{self.delete}/{self.caller}"

    @property
    def aborted(self) -> bool:
        """Whether the abort takes the call."""
        return self.abort is AbortScope.EVERY or (self.abort is AbortScope.OWN and self.call is CallScope.SET)

    @property
    def deleted(self) -> bool:
        """Whether a DELETE is sent."""
        return self.aborted or self.caller is Caller.CANCELLED

    def impossible(self) -> str | None:
        """Why the cell cannot occur, or None."""
        if self.abort is AbortScope.OWN and self.call is CallScope.NONE:
            return "a call without a scope has no scope of its own to abort: see abort-null"
        if not self.deleted and self.delete is not Delete.ARRIVES:
            return "the abort does not take the call, so that no DELETE is sent: see delete-arrives, the call let be"
        if self.delete is Delete.OVERTAKES and self.moment is not Moment.HELD:
            return "the submit has arrived already, so that no DELETE can overtake it"
        if self.moment is Moment.LOST and self.deleted and self.delete is Delete.ARRIVES:
            return "no worker is there for the DELETE to arrive at"
        return None


@dataclass(frozen=True, slots=True)
class Expected:
    """What a cell must show. `outcome` is "ok", an InfraAbort's reason, or CancelledError; the child is always gone.

    `reports` says which the caller has: "all" that the agent made, or those "before" the abort.
    """

    outcome: str
    reports: str


def cells() -> Iterator[Cell]:
    """All cells, possible or not."""
    for abort, call, moment, delete, caller in itertools.product(AbortScope, CallScope, Moment, Delete, Caller):
        yield Cell(abort, call, moment, delete, caller)


def expected(cell: Cell) -> Expected:
    """Walk the tables through the events of a possible cell."""
    caller_state, worker_state = STATES[cell.moment]
    caller: Machine[CallerState, CallerEvent, End] = Machine(CALLER_TABLE, caller_state)
    call = None if worker_state is None else Call({}, worker_state)
    if call is not None and worker_state is State.CANCELLING:
        call.cancelled_by = "caller"
    if cell.deleted:
        caller.apply(CallerEvent.ABORT)
    heard = call is not None and not (cell.deleted and cell.delete is Delete.LOST)
    if not heard:
        (end,) = caller.apply(CallerEvent.WINDOW_OVER)
    else:
        assert call is not None
        end = _end_of_heard(cell, caller, call)
    outcome = "ok" if end is End.OUTCOME else end.value
    return Expected(CANCELLED_ERROR if cell.caller is Caller.CANCELLED else outcome, "all" if heard else "before")


def _end_of_heard(cell: Cell, caller: Machine[CallerState, CallerEvent, End], call: Call) -> End:
    """How the call ends at a caller that the worker still answers."""
    if call.state is State.UNKNOWN and cell.delete is Delete.OVERTAKES:
        call.cancel("caller", 0.0)
    elif call.state is State.UNKNOWN:
        call.submit(0.0)
    if caller.state is CallerState.SUBMITTING:
        caller.apply(CallerEvent.ACCEPTED)
    if call.state is State.TOMBSTONE:
        return caller.apply(CallerEvent.TOMBSTONED)[0]
    if cell.deleted:
        call.cancel("caller", 0.0)
    if call.state in LIVE:
        if call.cancelled_by is None:
            call.outcome_read(b'{"kind": "ok"}', 0.0)
        call.gone(0, 0.0)
    end = caller.apply(CallerEvent.OUTCOME)[0]
    kind = json.loads(call.outcome or b'{"kind": "ok"}')["kind"]
    return End.CANCELLED if kind == "cancelled" else end
