"""Sessions by id: dropped when idle, kept within budgets (session-http.md, Life of a session)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from miles_ref.errors import BudgetExceededError, SessionExpiredError, SessionNotFoundError
from miles_ref.server.settings import Trajectory
from miles_ref.trajectory.linear import LinearTrajectory
from miles_ref.trajectory.node import Node
from miles_ref.trajectory.request import Seen
from miles_ref.trajectory.turn import Attachment

_EXPIRED_KEPT = 100_000
"""How many ids of dropped sessions are remembered."""
_EXPIRED_SECONDS = 24 * 3600.0
"""How long they are answered with 410 instead of 404."""


class Session:
    """One session. `lock` is held where a turn is attached and where it is committed, never while the backend works.

    `last_used` is in seconds of the server's monotonic clock.
    """

    def __init__(self, session_id: str, trajectory: Trajectory, now: float) -> None:
        self.id = session_id
        self.trajectory = trajectory
        self.lock = asyncio.Lock()
        self.last_used = now
        self.users = 0
        """Requests that are under way, of any kind."""
        self.in_flight = 0
        """Turns that the backend works on."""
        self.closed = False
        self.seen: Seen | None = None
        """The last committed request's beginning."""
        self.mismatches: dict[int, Any] = {}
        """Mismatch reports by node, as far as they have been computed."""

    @property
    def stored_bytes(self) -> int:
        """What the session stores, about."""
        seen = 0 if self.seen is None else len(self.seen.head) + len(self.seen.text)
        return seen + sum(node.size for node in self.trajectory.nodes())

    def commit(self, attachment: Attachment, node: Node) -> bool:
        """Commit the node, unless the session was closed meanwhile. Not to be called without the lock."""
        if self.closed:
            return False
        self.trajectory.commit(attachment, node)
        if isinstance(self.trajectory, LinearTrajectory):
            self.mismatches.clear()  # A retry drops turns; their reports would stay for ever.
        return True


class SessionStore:
    """The open sessions. `clock` is monotonic, seconds; `new_id` gives ids. Limits of 0 are none.

    `on_expired` is called once for each session that is dropped for idleness.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        new_trajectory: Callable[[], Trajectory],
        *,
        on_expired: Callable[[], None] = lambda: None,
        ttl: float = 0,
        max_sessions: int = 0,
    ) -> None:
        self._clock = clock
        self._new_id = new_id
        self._new_trajectory = new_trajectory
        self._on_expired = on_expired
        self._ttl = ttl
        self._max_sessions = max_sessions
        self._sessions: dict[str, Session] = {}
        self._expired: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def create(self) -> Session:
        """A new session. Raises BudgetExceededError (429) when there are as many as may be."""
        self.sweep()
        if self._max_sessions and len(self._sessions) >= self._max_sessions:
            raise BudgetExceededError(
                f"{len(self._sessions)} sessions are open, at most {self._max_sessions} are allowed "
                "(--max-sessions): delete one first",
                429,
            )
        session = Session(self._new_id(), self._new_trajectory(), self._clock())
        self._sessions[session.id] = session
        return session

    def get(self, session_id: str) -> Session:
        """The open session of that id, which counts as used now.

        Raises SessionNotFoundError (404), SessionExpiredError (410) for one that was dropped for idleness.
        """
        session = self._sessions.get(session_id)
        if session is not None and self._is_idle(session):
            self._expire(session)
            session = None
        if session is None:
            if session_id in self._expired:
                raise SessionExpiredError(
                    f"session {session_id} was dropped: nobody used it for {self._ttl:g} s (--session-ttl)"
                )
            raise SessionNotFoundError(f"there is no session {session_id:.100}")
        session.last_used = self._clock()
        return session

    @contextmanager
    def using(self, session_id: str) -> Iterator[Session]:
        """The open session of that id, which is not idle before the block ends. Raises as `get`."""
        session = self.get(session_id)
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            session.last_used = self._clock()

    def delete(self, session_id: str) -> Session:
        """Close the session. Raises as `get`."""
        session = self.get(session_id)
        self._close(session)
        return session

    def sweep(self) -> int:
        """Drop all idle sessions, forget ids that were dropped long ago; how many were dropped now."""
        idle = [session for session in self._sessions.values() if self._is_idle(session)]
        for session in idle:
            self._expire(session)
        now = self._clock()
        while self._expired and (
            len(self._expired) > _EXPIRED_KEPT or now - next(iter(self._expired.values())) > _EXPIRED_SECONDS
        ):
            self._expired.popitem(last=False)
        return len(idle)

    def _is_idle(self, session: Session) -> bool:
        return self._ttl > 0 and not session.users and self._clock() - session.last_used >= self._ttl

    def _expire(self, session: Session) -> None:
        self._close(session)
        self._expired[session.id] = self._clock()
        self._on_expired()

    def _close(self, session: Session) -> None:
        session.closed = True
        del self._sessions[session.id]
