"""One turn: attach and render, call the backend, commit (session-http.md, A turn)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from multidict import CIMultiDict

from miles_ref.assembly.reading import Meta
from miles_ref.errors import BudgetExceededError, SessionNotFoundError
from miles_ref.server.sessions import Session
from miles_ref.server.upstream import Upstream
from miles_ref.trajectory.commit import Committer, Times
from miles_ref.trajectory.reply import Reply, read_reply
from miles_ref.trajectory.request import ChatRequest
from miles_ref.trajectory.turn import Turn, TurnPlanner

_LARGE = 4 << 20
"""Bodies of this many bytes or more are read off the event loop, so that other sessions do not wait for them."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What the client gets: `reply` for a turn, else the backend's own `status` and `body` as they came."""

    status: int
    headers: CIMultiDict[str]
    body: bytes
    reply: Reply | None
    stream: bool
    committed: bool


class TurnRunner:
    """Runs turns. `clock` gives epoch seconds."""

    def __init__(
        self,
        planner: TurnPlanner,
        committer: Committer,
        upstream: Upstream,
        clock: Callable[[], float],
        max_session_bytes: int = 0,
    ) -> None:
        self._planner = planner
        self._committer = committer
        self._upstream = upstream
        self._clock = clock
        self._max_session_bytes = max_session_bytes

    async def run(self, session: Session, headers: CIMultiDict[str], body: bytes, requested: float) -> TurnResult:
        """Raises the errors of session-http.md, each with its status; the session is then as it was before."""
        async with session.lock:
            # The session may have been closed while the body came in, the lock was waited for, or a thread prepared it.
            _check_open(session)
            self._check_budget(session)
            request, turn = await _work(len(body), lambda: self._prepare(session, body))
            _check_open(session)
            session.in_flight += 1
        try:
            status, reply_headers, raw = await self._upstream.chat(headers, turn.body())
            if status != 200:
                return TurnResult(status, reply_headers, raw, None, False, False)
            reply, meta = await _work(len(raw), lambda: self._read(turn, raw))
            async with session.lock:
                committed = await self._commit(session, request, turn, reply, meta, requested)
        finally:
            session.in_flight -= 1
        return TurnResult(status, reply_headers, reply.client_body, reply, request.stream, committed)

    def _prepare(self, session: Session, body: bytes) -> tuple[ChatRequest, Turn]:
        request = ChatRequest(body, session.seen)
        self._planner.check(request)
        trajectory = session.trajectory
        attachment = trajectory.attach(request.messages, session.in_flight)
        return request, self._planner.plan(attachment, trajectory.snapshot(attachment), request)

    def _read(self, turn: Turn, raw: bytes) -> tuple[Reply, Meta]:
        reply = read_reply(raw)
        return reply, self._committer.read(turn, reply)

    async def _commit(
        self, session: Session, request: ChatRequest, turn: Turn, reply: Reply, meta: Meta, requested: float
    ) -> bool:
        trajectory = session.trajectory
        if session.closed or not trajectory.can_commit(turn.attachment):
            return False
        times = Times(requested=requested, committed=self._clock())
        size = sum(len(payload) for payload in reply.payloads.values())
        node = await _work(size, lambda: self._committer.node(turn, reply, meta, trajectory.next_seq, times))
        if not session.commit(turn.attachment, node):
            return False
        session.seen = request.as_seen(node.seq)
        return True

    def _check_budget(self, session: Session) -> None:
        if self._max_session_bytes and session.stored_bytes >= self._max_session_bytes:
            raise BudgetExceededError(
                f"session {session.id} stores {session.stored_bytes} bytes, at most {self._max_session_bytes} are "
                "allowed (--max-session-bytes): collect it and open another"
            )


def _check_open(session: Session) -> None:
    if session.closed:
        raise SessionNotFoundError(f"session {session.id} has been closed")


async def _work(size: int, work: Callable[[], T]) -> T:
    """Do CPU work on `size` bytes: here, or in a thread if it would hold up the event loop."""
    return work() if size < _LARGE else await asyncio.to_thread(work)
