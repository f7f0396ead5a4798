"""The worker's book-keeping without I/O: who is known, what is kept, what is answered (agents.md, Worker).

The shell (worker_server.py) turns requests into calls of `WorkerCore` and carries out the `Act`s that they leave in
`outbox`. Time comes from the clock that is passed in, so that every deadline can be tested without waiting.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from miles_ref.agents.machine import LINGER_SECONDS, LIVE, Action, Call, State

CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)
MAX_WAIT_SECONDS = 24.0
REPLY_REPORT_BYTES = 8 << 20
MIN_AGE_SECONDS = 120.0
"""Nothing younger is evicted for room."""


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Durations in seconds, sizes in bytes or entries. The worker has flags for six of them, of the same names."""

    orphan_timeout: float = 120.0
    cancel_grace: float = 120.0
    outcome_ttl: float = 600.0
    unfetched_ttl: float = 3600.0
    known_ttl: float = 3600.0
    tombstone_ttl: float = 3600.0
    linger: float = LINGER_SECONDS
    max_calls: int = 256
    max_known: int = 100_000
    max_kept_bytes: int = 4 << 30
    report_budget_bytes: int = 64 << 20
    drain_linger: float = 5.0

    def times(self) -> dict[State, float]:
        """How long each state of a call may last."""
        return {
            State.IMPORTING: self.orphan_timeout,
            State.RUNNING: self.orphan_timeout,
            State.ENDING: self.linger,
            State.CANCELLING: self.cancel_grace,
            State.FINISHED: self.unfetched_ttl,
            State.FETCHED: self.outcome_ttl,
            State.EXPIRED: self.known_ttl,
            State.TOMBSTONE: self.tombstone_ttl,
        }


@dataclass(frozen=True, slots=True)
class Submission:
    """What the book-keeping needs of a submit: no arguments and no values, only the digest of the content."""

    call_id: str
    fn: str
    scope: str | None
    digest: bytes
    boot_id: str | None = None


class Answer(NamedTuple):
    """An HTTP answer without the boot id, which the shell adds. An error has `code`, a success `state`."""

    status: int
    body: dict[str, Any]
    retry_after: int | None = None


class PollReply(NamedTuple):
    """What a poll gets: reports from `after` on as JSON texts, the index of the next one, the outcome if all are in.

    `state` has its public name, as in every other answer.
    """

    state: str
    reports: list[bytes]
    next: int
    outcome: bytes | None


class ActKind(Enum):
    """What the shell has to do."""

    SPAWN = "spawn"
    TERMINATE = "terminate"
    KILL = "kill"
    PAUSE = "pause"
    RESUME = "resume"
    WAKE = "wake"


class Act(NamedTuple):
    """One thing to do for one call."""

    kind: ActKind
    call_id: str


_SIGNALS = {Action.SPAWN: ActKind.SPAWN, Action.SIGTERM: ActKind.TERMINATE, Action.SIGKILL: ActKind.KILL}


def error(status: int, code: str, message: str, retry_after: int | None = None) -> Answer:
    """An error answer: `{error, code}`."""
    return Answer(status, {"error": message, "code": code}, retry_after)


class ReportLog:
    """The reports of one call, kept for repeated polls within a budget of bytes.

    Those that the caller has read on from (`after` beyond them) are dropped, oldest first, when the budget needs the
    room; the others never. `full` says that the caller has to read on before more are taken. Each report costs the same
    time, however many there are.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        # The first `_dropped` places are empty. They are cut off together, since each cut moves all that is behind it.
        self._items: list[bytes] = []
        self._dropped = 0
        self._unread_bytes = 0
        self.kept_bytes = 0
        self.first = 0
        self._read_on = 0

    @property
    def count(self) -> int:
        return self.first + len(self._items) - self._dropped

    @property
    def full(self) -> bool:
        return self._unread_bytes >= self._budget

    def append(self, item: bytes) -> None:
        self._items.append(item)
        self.kept_bytes += len(item)
        self._unread_bytes += len(item)
        self._make_room()

    def read_on(self, after: int) -> None:
        """The caller has the reports below index `after`."""
        if after > self._read_on:
            self._unread_bytes -= sum(map(len, self._items[self._place(self._read_on) : self._place(after)]))
            self._read_on = after
        self._make_room()

    def page(self, after: int) -> list[bytes]:
        """Reports from index `after` on: at most 8 MiB, or one item."""
        start = end = self._place(after)
        size = 0
        while end < len(self._items):
            size += len(self._items[end])
            if end > start and size > REPLY_REPORT_BYTES:
                break
            end += 1
        return self._items[start:end]

    def _place(self, index: int) -> int:
        return index - self.first + self._dropped

    def _make_room(self) -> None:
        while self.kept_bytes > self._budget and self.first < self._read_on:
            self.kept_bytes -= len(self._items[self._dropped])
            self._items[self._dropped] = b""
            self._dropped += 1
            self.first += 1
        if self._dropped > len(self._items) // 2:
            del self._items[: self._dropped]
            self._dropped = 0


@dataclass(slots=True)
class Entry:
    """One known id. A tombstone or an expired id has no reports, and little more than its call's state."""

    call: Call
    digest: bytes = b""
    fn: str = ""
    scope: str | None = None
    admitted_at: float = 0.0
    reports: ReportLog | None = None
    pid: int | None = None
    pollers: int = 0
    counted_bytes: int = 0

    def log(self) -> ReportLog:
        if self.reports is None:
            raise AssertionError("an id without a call has no reports")
        return self.reports


@dataclass(slots=True)
class WorkerCore:
    """Everything that a worker knows. Not thread-safe: one event loop calls it."""

    clock: Callable[[], float]
    settings: CoreSettings
    boot_id: str
    version: str = ""
    outbox: deque[Act] = field(default_factory=deque)
    draining: bool = False
    _entries: dict[str, Entry] = field(default_factory=dict)
    _live: set[str] = field(default_factory=set)
    _timers: list[tuple[float, str]] = field(default_factory=list)
    _kept_bytes: int = 0
    _quiet_since: float = 0.0
    _times: Mapping[State, float] = field(init=False)

    def __post_init__(self) -> None:
        self._times = self.settings.times()

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> Answer:
        """POST /calls for a body of good form: 412, the known id by its state, 503, 429, or admission."""
        self.tick()
        if submission.boot_id is not None and submission.boot_id != self.boot_id:
            return error(
                412, "boot", f"this worker is not the one with boot id {submission.boot_id!r}: it was restarted"
            )
        entry = self._entries.get(submission.call_id)
        if entry is not None:
            return self._resubmit(entry, submission)
        if self.draining:
            return error(503, "draining", "this worker is ending and takes no new calls")
        if self.running >= self.settings.max_calls:
            return error(429, "full", f"this worker runs {self.running} calls, its maximum (--max-calls)", 1)
        if not self._make_room():
            return error(429, "full", "the table of known calls is full of entries younger than 120 s", 10)
        return self._admit(submission)

    def delete(self, call_id: str) -> Answer:
        """DELETE /calls/{id}: cancel, or leave a tombstone for a submit that may still come."""
        self.tick()
        if CALL_ID.fullmatch(call_id) is None:
            return error(400, "form", "call_id must match [A-Za-z0-9_-]{1,128}")
        entry = self._entries.get(call_id)
        if entry is None:
            if not self._make_room():
                return error(503, "tombstones_full", "no room for a tombstone: the table holds only younger entries")
            entry = self._entries[call_id] = Entry(Call(self._times), admitted_at=self.clock())
        self._do(call_id, entry.call.cancel("caller", self.clock()))
        done = entry.call.state in (State.FINISHED, State.FETCHED, State.EXPIRED)
        return Answer(200 if done else 202, {"state": _public(entry.call.state)})

    def check_poll(self, call_id: str, after: int, cancel: bool) -> Answer | None:
        """What GET /calls/{id} is refused with, or None; with `cancel` it is a DELETE first."""
        self.tick()
        entry = self._entries.get(call_id)
        if entry is not None and entry.reports is not None and after > entry.reports.count:
            return error(400, "form", f"after={after} is over the number of reports, {entry.reports.count}")
        if cancel:
            answer = self.delete(call_id)
            if answer.status >= 400:
                return answer
            entry = self._entries[call_id]
        if entry is None:
            return error(404, "unknown", "no call of this id is known here")
        if entry.call.state is State.TOMBSTONE:
            return error(410, "tombstone", "the call was deleted before it was submitted")
        if entry.call.state is State.EXPIRED:
            return error(410, "expired", "the call has ended, and its outcome is no longer kept")
        if after < entry.log().first:
            return error(410, "expired", f"reports before {entry.log().first} were dropped for the report budget")
        return None

    def poll(self, call_id: str, after: int) -> PollReply | None:
        """What a poll that check_poll let pass gets now; None if it would have to wait.

        No deadline takes effect in between: what check_poll saw must still be there.
        """
        entry = self._entries[call_id]
        log = entry.log()
        self._read_on(call_id, entry, after)
        page = log.page(after)
        over = entry.call.state not in LIVE
        if not page and not over:
            return None
        return self._reply(entry, after, page)

    def empty_poll(self, call_id: str, after: int) -> PollReply:
        """What a poll gets when its time is over."""
        return self._reply(self._entries[call_id], after, [])

    def begin_poll(self, call_id: str) -> None:
        """A poll is held: the orphan timer does not run."""
        entry = self._entries[call_id]
        entry.pollers += 1
        entry.call.hold()

    def end_poll(self, call_id: str) -> None:
        """A held poll has ended, however it did: with the last one the orphan timer starts again."""
        entry = self._entries.get(call_id)
        if entry is None or entry.pollers == 0:
            return
        entry.pollers -= 1
        self.polled(call_id)

    def polled(self, call_id: str) -> None:
        """A client was there just now: unless a poll is held, the orphan timer starts again."""
        entry = self._entries.get(call_id)
        if entry is not None and entry.pollers == 0:
            entry.call.release(self.clock())
            self._keep_time(call_id, entry)

    def fetched(self, call_id: str) -> None:
        """A reply with the outcome was written in full."""
        entry = self._entries.get(call_id)
        if entry is not None and entry.call.state in (State.FINISHED, State.FETCHED):
            entry.call.fetched(self.clock())
            self._keep_time(call_id, entry)

    def listing(self) -> list[dict[str, Any]]:
        """GET /calls: what runs and what is kept; no kwargs, no values."""
        self.tick()
        now = self.clock()
        return [
            {
                "call_id": call_id,
                "state": _public(entry.call.state),
                "scope": entry.scope,
                "age": round(now - entry.admitted_at, 3),
                "pid": entry.pid,
                "fn": entry.fn,
                "reports": entry.reports.count,
            }
            for call_id, entry in self._entries.items()
            if entry.reports is not None
        ]

    def health(self) -> dict[str, Any]:
        """GET /health."""
        return {
            "version": self.version,
            "running": self.running,
            "max_calls": self.settings.max_calls,
            "orphan_timeout": self.settings.orphan_timeout,
            "cancel_grace": self.settings.cancel_grace,
            "draining": self.draining,
        }

    # --- what children do --------------------------------------------------------------------------------------------

    def spawned(self, call_id: str, pid: int) -> None:
        """The child process of an admitted call exists."""
        self._entries[call_id].pid = pid

    def started(self, call_id: str) -> None:
        """The child has imported its function."""
        self._entries[call_id].call.started(self.clock())

    def reported(self, call_id: str, item: bytes) -> None:
        """The child reported an item (JSON text)."""
        entry = self._entries[call_id]
        entry.log().append(item)
        self._count_bytes(entry)
        self._act(ActKind.WAKE, call_id)
        if entry.log().full:
            self._act(ActKind.PAUSE, call_id)

    def outcome_read(self, call_id: str, outcome: bytes) -> None:
        """The complete outcome of the child was read (JSON text)."""
        self._do(call_id, self._entries[call_id].call.outcome_read(outcome, self.clock()))

    def gone(self, call_id: str, exit_status: int | None, reason: str = "ChildExited") -> None:
        """The child has ended and was reaped."""
        entry = self._entries[call_id]
        entry.pid = None
        self._do(call_id, entry.call.gone(exit_status, self.clock(), reason))
        self._count_bytes(entry)
        self._act(ActKind.WAKE, call_id)
        if not self._live:
            self._quiet_since = self.clock()

    # --- time and the end --------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Calls whose child process exists."""
        return len(self._live)

    def tick(self) -> None:
        """Let every deadline that is reached take effect."""
        now = self.clock()
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, call_id = heapq.heappop(self._timers)
            self._do(call_id, self._entries[call_id].call.tick(now))

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        while self._timers:
            deadline, call_id = self._timers[0]
            entry = self._entries.get(call_id)
            if entry is not None and entry.call.deadline == deadline:
                return deadline
            heapq.heappop(self._timers)
        return None

    def drain(self) -> None:
        """Take no more calls, cancel those that run. The second time: kill them."""
        now = self.clock()
        again = self.draining
        self.draining = True
        if not again and not self._live:
            self._quiet_since = now
        for call_id in sorted(self._live):
            call = self._entries[call_id].call
            self._do(call_id, call.kill("drain", now) if again else call.cancel("drain", now))

    def drained(self) -> bool:
        """Whether a draining worker may exit: all outcomes fetched, or 5 s passed since the last child ended."""
        if not self.draining or self._live:
            return False
        waiting = any(entry.call.state is State.FINISHED for entry in self._entries.values())
        return not waiting or self.clock() >= self.drain_deadline()

    def drain_deadline(self) -> float:
        """When a draining worker without children exits at the latest."""
        return self._quiet_since + self.settings.drain_linger

    # --- inside ------------------------------------------------------------------------------------------------------

    def _resubmit(self, entry: Entry, submission: Submission) -> Answer:
        state = entry.call.state
        if state is State.TOMBSTONE:
            return error(410, "tombstone", "the call was deleted before it was submitted")
        if entry.call.cancelled_by is not None and state is not State.EXPIRED:
            return error(410, "cancelled", f"the call was cancelled by {entry.call.cancelled_by}")
        if state is State.EXPIRED:
            return error(410, "expired", "the call has ended, and its outcome is no longer kept")
        if entry.digest != submission.digest:
            return error(409, "conflict", "another call was submitted with this call_id: its content differs")
        return Answer(200, {"state": _public(state)})

    def _admit(self, submission: Submission) -> Answer:
        now = self.clock()
        call = Call(self._times)
        log = ReportLog(self.settings.report_budget_bytes)
        entry = Entry(call, submission.digest, submission.fn, submission.scope, now, log)
        self._entries[submission.call_id] = entry
        self._do(submission.call_id, call.submit(now))
        return Answer(200, {"state": _public(call.state)})

    def _read_on(self, call_id: str, entry: Entry, after: int) -> None:
        log = entry.log()
        was_full = log.full
        log.read_on(after)
        self._count_bytes(entry)
        if was_full and not log.full and entry.call.state in LIVE:
            self._act(ActKind.RESUME, call_id)

    def _reply(self, entry: Entry, after: int, page: list[bytes]) -> PollReply:
        end = after + len(page)
        complete = end == entry.log().count and entry.call.state not in LIVE
        return PollReply(_public(entry.call.state), page, end, entry.call.outcome if complete else None)

    def _make_room(self) -> bool:
        """See that one more id has room, by forgetting what has ended and is not younger than 120 s, oldest first."""
        if not self._full():
            return True
        horizon = self.clock() - MIN_AGE_SECONDS
        evictable = sorted(
            (entry.call.state is State.FINISHED, entry.call.since, call_id)
            for call_id, entry in self._entries.items()
            if call_id not in self._live and entry.call.since <= horizon and not entry.pollers
        )
        spare = self.settings.max_known // 100
        for unfetched, _, call_id in evictable:
            if not self._full() and (unfetched or spare <= 0):
                break
            self._forget(call_id)
            spare -= 1
        return not self._full()

    def _full(self) -> bool:
        return len(self._entries) >= self.settings.max_known or self._kept_bytes > self.settings.max_kept_bytes

    def _forget(self, call_id: str) -> None:
        self._kept_bytes -= self._entries.pop(call_id).counted_bytes

    def _count_bytes(self, entry: Entry) -> None:
        kept = len(entry.call.outcome or b"") + (entry.reports.kept_bytes if entry.reports else 0)
        self._kept_bytes += kept - entry.counted_bytes
        entry.counted_bytes = kept

    def _do(self, call_id: str, actions: Iterable[Action]) -> None:
        """After an event of a call: pass on what has to be done, and bring the tables up to date with its state."""
        entry = self._entries[call_id]
        for action in actions:
            if action in _SIGNALS:
                self._act(_SIGNALS[action], call_id)
        state = entry.call.state
        if state in LIVE:
            self._live.add(call_id)
        else:
            self._live.discard(call_id)
        if state is State.UNKNOWN:
            self._forget(call_id)
            return
        if state is State.EXPIRED and entry.reports is not None:
            entry.reports = entry.call.outcome = None
            self._count_bytes(entry)
        self._keep_time(call_id, entry)

    def _keep_time(self, call_id: str, entry: Entry) -> None:
        if entry.call.deadline is not None:
            heapq.heappush(self._timers, (entry.call.deadline, call_id))

    def _act(self, kind: ActKind, call_id: str) -> None:
        self.outbox.append(Act(kind, call_id))


def _public(state: State) -> str:
    """A caller needs no difference between finished and fetched, nor between ways of being cancelled."""
    if state is State.FETCHED:
        return State.FINISHED.value
    if state is State.KILLED:
        return State.CANCELLING.value
    return state.value
