"""The store of sessions: idle times, budgets, what is remembered (session-http.md, Life of a session)."""

from itertools import count
from typing import Any

import pytest

from miles_ref.errors import BudgetExceededError, SessionExpiredError, SessionNotFoundError
from miles_ref.server.sessions import SessionStore
from miles_ref.tokens.matching import strict
from miles_ref.trajectory.linear import LinearTrajectory
from miles_ref.trajectory.request import ChatRequest
from miles_ref.trajectory.turn import Matching


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def store(time: Time, **limits: Any) -> SessionStore:
    ids = count()
    return SessionStore(
        time,
        lambda: f"s{next(ids)}",
        lambda: LinearTrajectory(Matching(strict)),
        **limits,
    )


def test_a_session_lives_while_it_is_used() -> None:
    time = Time()
    expired: list[None] = []
    sessions = store(time, ttl=10, on_expired=lambda: expired.append(None))
    session = sessions.create()
    for _ in range(5):
        time.now += 9
        assert sessions.get(session.id) is session
    time.now += 10
    with pytest.raises(SessionExpiredError):
        sessions.get(session.id)
    assert session.closed
    assert len(expired) == 1


def test_a_request_under_way_is_a_use_to_its_end() -> None:
    time = Time()
    sessions = store(time, ttl=10)
    session = sessions.create()
    with sessions.using(session.id) as used, sessions.using(session.id):
        assert used is session
        time.now += 1000
        assert sessions.sweep() == 0
    time.now += 9
    assert sessions.get(session.id) is session
    time.now += 10
    with pytest.raises(SessionExpiredError), sessions.using(session.id):
        pass


def test_all_that_is_kept_of_the_last_request_is_counted() -> None:
    session = store(Time()).create()
    assert session.stored_bytes == 0
    session.seen = ChatRequest(b'{"tools": [], "messages": [{}], "n": 1}').as_seen(0)
    assert session.stored_bytes == len(b'{"tools": [], "messages": [{}')


def test_what_was_dropped_is_forgotten_after_a_while() -> None:
    time = Time()
    sessions = store(time, ttl=10)
    session = sessions.create()
    time.now += 10
    assert sessions.sweep() == 1
    with pytest.raises(SessionExpiredError):
        sessions.get(session.id)
    time.now += 100_000
    sessions.sweep()
    with pytest.raises(SessionNotFoundError):
        sessions.get(session.id)


def test_without_a_ttl_nothing_is_dropped() -> None:
    time = Time()
    sessions = store(time)
    session = sessions.create()
    time.now += 1e9
    assert sessions.sweep() == 0
    assert sessions.get(session.id) is session


def test_an_idle_session_makes_room_for_a_new_one() -> None:
    time = Time()
    sessions = store(time, ttl=10, max_sessions=1)
    sessions.create()
    with pytest.raises(BudgetExceededError) as caught:
        sessions.create()
    assert caught.value.status_code == 429
    time.now += 10
    sessions.create()
    assert len(sessions) == 1


def test_a_deleted_session_is_unknown() -> None:
    sessions = store(Time(), ttl=10)
    session = sessions.create()
    assert sessions.delete(session.id) is session
    for method in (sessions.get, sessions.delete):
        with pytest.raises(SessionNotFoundError):
            method(session.id)
