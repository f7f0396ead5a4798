"""What is said of two samples payloads that differ."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from miles_ref.sample import Sample
from miles_ref.testing.compare import expectation_difference
from miles_ref.testing.payloads import payload_difference
from miles_ref.wire import SAMPLES_VALUE_SPEC, encode_samples


def encoded(**changed: Any) -> bytes:
    values: dict[str, Any] = {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 1], "response": "ab"}
    return encode_samples([Sample(**(values | changed))], {"a": 1}, None, fields=SAMPLES_VALUE_SPEC)


def split(payload: bytes) -> tuple[dict[str, Any], bytes]:
    start = 8 + int.from_bytes(payload[:8], "little")
    return json.loads(payload[8:start]), payload[start:]


def joined(header: Any, data: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data


def told(left: bytes, right: bytes) -> str:
    return payload_difference(*(base64.b64encode(data).decode() for data in (left, right)))


GOOD = encoded()
HEADER, DATA = split(GOOD)
OTHER_DTYPE = {**HEADER, "tokens.0": {**HEADER["tokens.0"], "dtype": "F64"}}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (encoded(response="ac"), 'in _samples_meta: samples[0].response: expected "ab", got "ac"'),
        (encoded(tokens=[1, 2, 4]), "the tensor tokens.0 has other values, first at element 2"),
        (encoded(loss_mask=None), "in _samples_meta: samples[0].nulls"),
        (joined(OTHER_DTYPE, DATA), 'in the header: tokens.0.dtype: expected "I64", got "F64"'),
        (joined({**HEADER, "x": HEADER["tokens.0"]}, DATA), "the tensor x is unexpected"),
        (joined({k: v for k, v in HEADER.items() if k != "tokens.0"}, DATA), "the tensor tokens.0 is missing"),
        (joined(dict(reversed(HEADER.items())), DATA), "the same entries in another order"),
        (joined({**HEADER, "__metadata__": {}}, DATA), "in the header: __metadata__: unexpected"),
        (GOOD + b"x", "the end after"),
        (b"word", "the observed payload is no safetensors file"),
    ],
)
def test_the_first_difference_is_named(other: bytes, said: str) -> None:
    assert said in told(GOOD, other)
    assert told(GOOD, other).startswith("payload: byte ")


def test_the_first_byte_is_named() -> None:
    assert told(b"abcd", b"abxd").startswith("payload: byte 2 is the first to differ, b'cd' expected, got b'xd'")
    assert "the expected and the observed payload is no safetensors" in told(b"abcd", b"abxd")
    assert told(b"ab", b"abc").startswith("payload: byte 2 is the first to differ, the end after 2 bytes expected")


def test_json_that_is_spelled_otherwise_is_shown() -> None:
    meta = b'{"a":1.0}'
    header = {"_samples_meta": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}
    found = told(joined(header, meta), joined(header, b'{"a":1e0}'))
    assert "_samples_meta has the same values, spelled otherwise" in found
    assert "1.0" in found
    assert "1e0" in found


def test_what_is_no_base64_is_shown() -> None:
    assert payload_difference("AAAA", "?") == 'payload: expected "AAAA", got "?"'
    assert payload_difference("?", "AAAA") == 'payload: expected "?", got "AAAA"'


def test_an_expectation_of_a_payload_says_where_it_differs() -> None:
    texts = [base64.b64encode(data).decode() for data in (GOOD, encoded(response="ac"))]
    assert expectation_difference({"payload": texts[0]}, {"payload": texts[0]}) is None
    assert "samples[0].response" in str(expectation_difference({"payload": texts[0]}, {"payload": texts[1]}))
