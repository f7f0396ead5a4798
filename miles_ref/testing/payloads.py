"""Where two samples payloads differ: for people, who cannot read base64 (wire.md: one safetensors file)."""

from __future__ import annotations

import binascii
import json
from collections.abc import Mapping
from typing import Any

import pybase64

from miles_ref.testing.compare import first_difference, show

_META = "_samples_meta"
_LENGTH = 8  # bytes of the header's length, little-endian


def payload_difference(expected: str, observed: str) -> str:
    """The first byte that differs of two base64 texts that do, and what stands there where both are safetensors."""
    try:
        left, right = (pybase64.b64decode(text, validate=True) for text in (expected, observed))
    except (binascii.Error, ValueError):
        return f"payload: expected {show(expected)}, got {show(observed)}"
    if left == right:
        return "payload: the same bytes, in another spelling of base64"
    shorter = min(len(left), len(right))
    at = next((index for index in range(shorter) if left[index] != right[index]), shorter)
    found = f"payload: byte {at} is the first to differ, {_bytes(left, at)} expected, got {_bytes(right, at)}"
    ours, theirs = _read(left), _read(right)
    if ours is None or theirs is None:
        unread = " and ".join(name for name, read in (("the expected", ours), ("the observed", theirs)) if read is None)
        return f"{found}; {unread} payload is no safetensors file"
    return f"{found}; {_named(ours, theirs)}"


def _bytes(data: bytes, at: int) -> str:
    part = data[at : at + 8]
    return f"{part!r}" if part else f"the end after {len(data)} bytes"


def _read(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """The header and the bytes of each tensor; None for what is no safetensors file."""
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    try:
        header = json.loads(data[_LENGTH:start])
        spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        return header, {name: data[start + first : start + last] for name, (first, last) in spans.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _named(expected: tuple[dict[str, Any], dict[str, bytes]], observed: tuple[dict[str, Any], dict[str, bytes]]) -> str:
    """What differs first, the values before the header, whose offsets follow from them."""
    metas = [_json(tensors.get(_META)) for _, tensors in (expected, observed)]
    if all(meta is not None for meta in metas):
        found = first_difference(*metas)
        if found is not None:
            return f"in {_META}: {found}"
    for name, data in expected[1].items():
        entries = [{**header.get(name, {}), "data_offsets": None} for header, _ in (expected, observed)]
        if name not in observed[1]:
            return f"the tensor {name} is missing"
        if entries[0] != entries[1]:
            return f"in the header: {first_difference(entries[0], entries[1], name)}"
        if data != observed[1][name] and name != _META:
            return f"the tensor {name} has other values{_element(expected[0][name], data, observed[1][name])}"
    extra = [name for name in observed[1] if name not in expected[1]]
    if extra:
        return f"the tensor {extra[0]} is unexpected"
    if expected[1].get(_META) != observed[1].get(_META):
        return f"{_META} has the same values, spelled otherwise: {_spelling(expected[1][_META], observed[1][_META])}"
    if expected[0] != observed[0]:
        return f"in the header: {first_difference(expected[0], observed[0])}"
    if list(expected[0]) != list(observed[0]):
        return f"the header has the same entries in another order: {list(observed[0])}"
    return "the header has the same entries, spelled otherwise, or other bytes stand after the tensors"


def _json(data: bytes | None) -> Any:
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None


def _element(entry: Mapping[str, Any], left: bytes, right: bytes) -> str:
    size = {"I64": 8, "F64": 8, "I32": 4, "U8": 1}.get(entry.get("dtype", ""))
    at = next((index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
    return "" if size is None or at is None else f", first at element {at // size}"


def _spelling(left: bytes, right: bytes) -> str:
    shorter = min(len(left), len(right))
    at = next((index for index in range(shorter) if left[index] != right[index]), shorter)
    start = max(0, at - 20)
    return f"{left[start : at + 20]!r} expected, got {right[start : at + 20]!r}"
