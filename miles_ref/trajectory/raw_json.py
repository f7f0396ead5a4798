"""JSON that is cut into the raw texts of its parts, so that what nobody looks at is never parsed, and stays as sent.

Parts are views on the text that was cut. Duplicate keys: the last one wins. A text is JSON in the strict sense: NaN and
Infinity, lone surrogates, control characters in strings and anything after the value are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from miles_ref.limits import MAX_DEPTH
from miles_ref.tokens.exact_json import is_deeper

Raw = msgspec.Raw
Buffer = bytes | bytearray | memoryview | msgspec.Raw

_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class RawJSONError(ValueError):
    """The text is not JSON, or not of the wanted type; the message says where."""


def cut_object(text: Buffer) -> dict[str, Raw]:
    """The members of a JSON object as key -> raw value. Raises RawJSONError.

    Strings in the values are not checked to be UTF-8; check the whole text once.
    """
    try:
        return _object_decoder.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RawJSONError(_reason(error)) from error


def cut_list(text: Buffer) -> list[Raw]:
    """The items of a JSON array as raw values. Raises RawJSONError."""
    try:
        return _list_decoder.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RawJSONError(_reason(error)) from error


def parse(text: Buffer) -> Any:
    """The value of a JSON text, integers exact at any size. Raises RawJSONError, also beyond MAX_DEPTH levels.

    Deeper values are refused because templates, matchers and encoders recurse, and would fail after the commit.
    """
    value = parse_any_depth(text)
    view = bytes(memoryview(text))
    if view.count(b"[") + view.count(b"{") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise RawJSONError(f"nested more than {MAX_DEPTH} levels deep")
    return value


def parse_any_depth(text: Buffer) -> Any:
    """As `parse`, for values that are read item by item and not kept."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RawJSONError(_reason(error)) from error


def dump(value: Any) -> bytes:
    """The compact JSON text of a value that `parse` made."""
    return msgspec.json.encode(value)


def join_object(members: Mapping[str, Buffer]) -> bytes:
    """The JSON object of raw members."""
    return b"".join(object_parts(members.items()))


def object_parts(members: Iterable[tuple[str, Buffer]]) -> list[Buffer]:
    """The JSON object of raw members as parts to be joined."""
    parts: list[Buffer] = []
    separator = b"{"
    for key, value in members:
        parts += (separator, msgspec.json.encode(key), b":", value)
        separator = b","
    parts.append(b"}" if parts else b"{}")
    return parts


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
