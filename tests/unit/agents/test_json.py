"""JSON at the edges: what an agent may send, and what a caller makes of a reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_ref.agents.api import strict_json
from miles_ref.agents.framing import FrameError, read_json
from miles_ref.agents.http_client import MAX_RETRY_AFTER, Unanswered, _parse, _seconds
from miles_ref.agents.machine import json_text
from miles_ref.limits import MAX_DEPTH


def nested(levels: int, inner: Any = None) -> Any:
    value: Any = [] if inner is None else inner
    for level in range(levels - 1):
        value = {"in": value} if level % 2 else (value,)
    return value


def test_a_value_as_deep_as_the_limit_is_written_and_one_deeper_is_not() -> None:
    assert json.loads(strict_json(nested(MAX_DEPTH))) == json.loads(json.dumps(nested(MAX_DEPTH)))
    for levels in (MAX_DEPTH + 1, 950, 100_000):
        with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} levels"):
            strict_json(nested(levels))


def test_one_object_in_several_places_counts_where_it_is_deepest() -> None:
    shared = nested(MAX_DEPTH - 1)
    assert strict_json([shared, shared])
    with pytest.raises(ValueError, match="levels"):
        strict_json([shared, [shared]])


def test_what_holds_itself_is_refused_however_often_it_does() -> None:
    circular: list[Any] = []
    circular += [circular, circular, {"in": circular}]
    with pytest.raises(ValueError, match="circular"):
        strict_json(circular)


def test_odd_keys_are_found_at_every_level() -> None:
    with pytest.raises(TypeError, match="the key 7"):
        strict_json(nested(MAX_DEPTH, {7: 1}))


def test_arguments_too_deep_to_be_written_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        json_text({"kwargs": nested(100_000)})


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"1 2", b"NaN", b"[-Infinity]", b"\xff", '"ä"'.encode("utf-16"), b"\xef\xbb\xbf1", b"[" * 5000],
)
def test_a_payload_that_would_spoil_the_json_around_it_is_no_frame(payload: bytes) -> None:
    with pytest.raises(FrameError, match="no JSON text"):
        read_json(payload)


@pytest.mark.parametrize("raw", [b"{", b"\xff", b'{"boot_id":"b","outcome":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
async def test_a_reply_that_cannot_be_read_is_no_worker_s(raw: bytes) -> None:
    with pytest.raises(Unanswered, match="a reply 200 that cannot be read") as caught:
        await _parse(200, raw)
    assert caught.value.sent


async def test_a_reply_with_a_value_as_deep_as_the_limit_is_read() -> None:
    value = json.loads(strict_json(nested(MAX_DEPTH)))
    body = {"boot_id": "b", "reports": [value], "outcome": {"kind": "ok", "value": value}}
    assert await _parse(200, json.dumps(body).encode()) == body


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("3", 3.0), ("0", 0.0), ("1.5", 1.5), ("60", 60.0)),
        *(("61", MAX_RETRY_AFTER), ("1000000000", MAX_RETRY_AFTER), ("1e300", MAX_RETRY_AFTER)),
        *((None, None), ("", None), ("-1", None), ("inf", None), ("-inf", None), ("nan", None), ("9" * 400, None)),
        ("Mon, 30 Nov 2026 00:00:00 GMT", None),
    ],
)
def test_retry_after_is_bounded(text: str | None, seconds: float | None) -> None:
    assert _seconds(text) == seconds
