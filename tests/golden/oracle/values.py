"""The plain values that every stage shares: faults, the bytes tokenizer, exact comparison, arrays (cases.md)."""

from __future__ import annotations

from typing import Any

BYTES = "bytes"
"""The tokenizer that needs no file (cases.md)."""


class Fault(Exception):
    """A deterministic failure. ``mentions`` are pieces that any useful message about it holds."""

    def __init__(self, *mentions: Any) -> None:
        super().__init__("; ".join(str(mention) for mention in mentions))
        self.mentions = [str(mention) for mention in mentions]


def is_integer(value: Any) -> bool:
    """True for JSON integers; true and false are not numbers."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """True for JSON numbers, whole or not; true and false are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def log_prob_value(item: Any) -> Any:
    """A log prob as a case spells it: "-inf", "inf" and "nan" are words, everything else stands for itself."""
    words = {"-inf": float("-inf"), "inf": float("inf"), "nan": float("nan")}
    return words[item] if isinstance(item, str) and item in words else item


def log_prob_word(value: float) -> Any:
    """The reverse: minus infinity is a word in a case, the rest are numbers."""
    return "-inf" if value == float("-inf") else value


def decode_tokens(ids: list[int]) -> str:
    """The tokenizer "bytes": each run of ids below 256 is UTF-8, an id from 256 on is ``<|id|>``."""
    text = ""
    run: list[int] = []
    for token in ids:
        if token < 256:
            run.append(token)
            continue
        text += bytes(run).decode("utf-8", errors="replace") + f"<|{token}|>"
        run = []
    return text + bytes(run).decode("utf-8", errors="replace")


def same(left: Any, right: Any) -> bool:
    """Exact equality of JSON values: numbers by value, true is not 1, a missing key is not null."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if is_number(left) and is_number(right):
        return bool(left == right)
    if isinstance(left, dict) and isinstance(right, dict):
        return set(left) == set(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and bool(left == right)


def first_difference(left: Any, right: Any, path: str = "$") -> str | None:
    """Where two JSON values differ first, as a path with both values; None when they are the same."""
    if same(left, right):
        return None
    if isinstance(left, dict) and isinstance(right, dict) and set(left) == set(right):
        return next(
            found for key in left if (found := first_difference(left[key], right[key], f"{path}.{key}")) is not None
        )
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return next(
            found
            for i in range(len(left))
            if (found := first_difference(left[i], right[i], f"{path}[{i}]")) is not None
        )
    return f"{path}: expected {right!r}, got {left!r}"
