"""The backend that a case's steps script."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from miles_ref.testing.case_backend import CaseBackend
from miles_ref.testing.loop_thread import LoopThread


@pytest.fixture
def backend() -> Iterator[CaseBackend]:
    thread = LoopThread()
    backend = CaseBackend(thread)
    yield backend
    backend.close()
    thread.close()


def ask(backend: CaseBackend) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(backend.url).netloc, timeout=30)
    try:
        connection.request("DELETE", "/v1/thing")
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


@pytest.mark.parametrize("kind", ["connect", "cut"])
def test_a_connection_fails_once_and_what_is_sent_again_is_told(backend: CaseBackend, kind: str) -> None:
    exchange = backend.begin([{"fail": kind}])
    with pytest.raises((http.client.HTTPException, OSError)):
        ask(backend)
    status, body = ask(backend)
    assert (status, len(exchange.requests)) == (599, 2)
    assert "nothing may be sent twice" in body["error"]
    backend.end(exchange)


def test_replies_after_a_failing_connection_are_given(backend: CaseBackend) -> None:
    exchange = backend.begin([{"fail": "connect"}, {"body": {"a": 1}}])
    with pytest.raises((http.client.HTTPException, OSError)):
        ask(backend)
    assert ask(backend) == (200, {"a": 1})
    status, body = ask(backend)
    assert status == 599
    assert "no further backend reply" in body["error"]
    backend.end(exchange)
