"""JSON read exactly: numbers as mathematical values, duplicate keys and NaN refused, any depth, linear time.

The standard reader rounds numbers to doubles, refuses integers past 4300 digits and recurses; the rule for tool-call
arguments needs none of that to happen (session-http.md, Matching messages, `loose_tool_call`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Context, Decimal
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, cast

_BLANK = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?)(0|[1-9][0-9]*)(?:\.([0-9]+))?(?:[eE]([-+]?[0-9]+))?")
_LITERALS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class Number:
    """A decimal number `sign digits * 10**exponent`; digits end in no zero, zero is ("", "", 0). Equal = same value."""

    sign: str
    digits: str
    exponent: Decimal


_ZERO = Number("", "", Decimal(0))


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` spells, its numbers as `Number`; None if it spells anything else or is not JSON."""
    try:
        value = _parse(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def is_deeper(value: Any, levels: int) -> bool:
    """Whether containers are nested more than `levels` levels in a JSON value; looked for without recursion."""
    level = [value]
    for _ in range(levels):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def exact(value: Any) -> Any:
    """A value that some JSON reader made, with its numbers as `Number` (a float is the number that its repr spells).

    Raises ValueError for NaN and infinities and for what is not JSON.
    """
    # Containers are filled after they are made, from a stack, so that no depth is too deep.
    out: list[Any] = [None]
    todo: list[tuple[Any, Any, Any]] = [(value, out, 0)]
    while todo:
        item, into, key = todo.pop()
        if isinstance(item, dict):
            into[key] = made = dict.fromkeys(item)
            todo.extend((child, made, name) for name, child in item.items())
        elif isinstance(item, list):
            into[key] = places = [None] * len(item)
            todo.extend((child, places, place) for place, child in enumerate(item))
        else:
            into[key] = _exact_scalar(item)
    return out[0]


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal: objects by key, lists in order, numbers by value, true is not 1."""
    todo = [(left, right)]
    while todo:
        one, other = todo.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            todo.extend((child, other[key]) for key, child in one.items())
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            todo.extend(zip(one, other, strict=True))
        elif isinstance(one, bool) != isinstance(other, bool) or one != other:
            return False
    return True


def _exact_scalar(item: Any) -> Any:
    if item is None or isinstance(item, bool | str):
        return item
    if isinstance(item, int):
        # Decimal takes integers of any size; str() of one stops at 4300 digits.
        sign, digits, _ = Decimal(item).as_tuple()
        return _number("-" if sign else "", "".join(map(str, digits)), 0)
    match = _NUMBER.fullmatch(repr(item)) if isinstance(item, float) else None
    if match is None:
        raise ValueError(f"{item!r} is not JSON")
    return _spelled(match)


def _spelled(match: re.Match[str]) -> Number:
    sign, whole, fraction, exponent = match.groups()
    fraction = fraction or ""
    return _number(sign, whole + fraction, -len(fraction), exponent or "0")


def _number(sign: str, digits: str, shift: int, exponent: str = "0") -> Number:
    digits = digits.lstrip("0")
    if not digits:
        return _ZERO
    significant = digits.rstrip("0")
    shift += len(digits) - len(significant)
    # An exponent may itself have more digits than int() reads; Decimal reads and adds it exactly in linear time.
    context = Context(prec=len(exponent) + 20)
    return Number(sign, significant, context.add(Decimal(exponent), Decimal(shift)))


def _parse(text: str) -> Any:
    """Read one JSON value without recursion. Raises ValueError."""
    out: list[Any] = []
    # Each frame is an open container and, in an object, the key that waits for its value.
    frames: list[tuple[dict[str, Any] | list[Any], str | None]] = [(out, None)]
    at = _skip(text, 0)
    while True:
        value, at, opened = _value(text, at)
        container, key = frames[-1]
        if isinstance(container, dict):
            container[cast("str", key)] = value
        else:
            container.append(value)
        if opened:
            frames.append((value, None))
        at = _next_value(text, at, frames, fresh=opened)
        if len(frames) == 1:
            if at != len(text):
                raise ValueError(f"text goes on after the value, at {at}")
            return out[0]


def _value(text: str, at: int) -> tuple[Any, int, bool]:
    """The value that begins at `at`, where it ends, and whether it is a container that is only now open."""
    start = text[at : at + 1]
    if start == "{":
        return {}, at + 1, True
    if start == "[":
        return [], at + 1, True
    if start == '"':
        value, end = scanstring(text, at + 1, True)
        return value, end, False
    for word, literal in _LITERALS.items():
        if text.startswith(word, at):
            return literal, at + len(word), False
    match = _NUMBER.match(text, at)
    if match is None:
        raise ValueError(f"no JSON value at {at}")
    return _spelled(match), match.end(), False


def _next_value(text: str, at: int, frames: list[tuple[dict[str, Any] | list[Any], str | None]], *, fresh: bool) -> int:
    """Close what ends at `at`, and go to where the next value begins (the end of the text when all is closed)."""
    at = _skip(text, at)
    while len(frames) > 1:
        container, _ = frames[-1]
        closer = "}" if isinstance(container, dict) else "]"
        sign = text[at : at + 1]
        if sign == closer:
            frames.pop()
            fresh = False
            at = _skip(text, at + 1)
            continue
        if not fresh:
            if sign != ",":
                raise ValueError(f"expected ',' or '{closer}' at {at}")
            at = _skip(text, at + 1)
        if isinstance(container, dict):
            key, at = _key(text, at, container)
            frames[-1] = (container, key)
        return at
    return at


def _key(text: str, at: int, container: dict[str, Any]) -> tuple[str, int]:
    if text[at : at + 1] != '"':
        raise ValueError(f"expected a key at {at}")
    key, at = scanstring(text, at + 1, True)
    if key in container:
        raise ValueError(f"duplicate key {key!r}")
    at = _skip(text, at)
    if text[at : at + 1] != ":":
        raise ValueError(f"expected ':' at {at}")
    return key, _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    return cast("re.Match[str]", _BLANK.match(text, at)).end()
