"""Does a replayed message equal a stored one? (session-http.md, Matching messages)."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from .values import is_number, same

EMPTY: tuple[Any, ...] = (None, "", [])


def messages_match(stored: dict[str, Any], replayed: dict[str, Any], matcher: str) -> bool:
    """One of the three matchers, by name."""
    fields = ["role", "content"]
    if matcher != "role_content_only":
        fields += ["reasoning_content", "tool_calls"]
    for field in fields:
        left, right = _plain(stored.get(field)), _plain(replayed.get(field))
        if field == "tool_calls" and isinstance(left, list) and isinstance(right, list):
            if len(left) != len(right):
                return False
            if not all(_calls_match(a, b, matcher) for a, b in zip(left, right, strict=True)):
                return False
        elif not same(left, right):
            return False
    return True


def _plain(value: Any) -> Any:
    return None if any(same(value, empty) for empty in EMPTY) else value


def _calls_match(left: Any, right: Any, matcher: str) -> bool:
    if not isinstance(left, dict) or not isinstance(right, dict):
        return same(left, right)
    left = {key: value for key, value in left.items() if key != "index"}
    right = {key: value for key, value in right.items() if key != "index"}
    if same(left, right):
        return True
    if matcher != "loose_tool_call":
        return False
    one, other = left.pop("function", None), right.pop("function", None)
    if not isinstance(one, dict) or not isinstance(other, dict) or not same(left, right):
        return False
    if "arguments" not in one or "arguments" not in other:
        return False
    one, other = dict(one), dict(other)
    arguments = one.pop("arguments"), other.pop("arguments")
    return same(one, other) and _same_arguments(*arguments)


def _same_arguments(left: Any, right: Any) -> bool:
    if isinstance(left, str) and left == right:
        return True
    left, right = _arguments_object(left), _arguments_object(right)
    return left is not None and right is not None and _same_exactly(left, right)


def _arguments_object(value: Any) -> dict[str, Any] | None:
    """The arguments as an object whose numbers are Decimals; None when they are no object."""
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        value = json.dumps(value)
    if not isinstance(value, str):
        return None
    try:
        parsed = json.loads(
            value, parse_float=Decimal, parse_int=Decimal, parse_constant=_refuse, object_pairs_hook=_unique
        )
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)


def _same_exactly(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return set(left) == set(right) and all(_same_exactly(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(_same_exactly(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, Decimal) or isinstance(right, Decimal):
        return isinstance(left, Decimal) and isinstance(right, Decimal) and left == right
    return same(left, right) and not is_number(left)
