"""Expectations on JSON values: what a step's reply must hold (cases.md, http and worker).

A plain object in an expectation is a subset (the value may hold more keys), a list is whole, numbers compare exactly
(0 equals 0.0, true is not 1). Markers, each an object with one key that begins with `$`:

    {"$any": true}          the value must be there, whatever it is
    {"$absent": true}       the key must not be there
    {"$not": value}         the value must be there, and be another
    {"$exact": value}       as value, and objects in it hold no further keys
    {"$unordered": [...]}   these items in any order
    {"$ref": "name.path"}   the value at `path` of a reply that an earlier step saved
    {"$ids": ["text", ...]} the token ids of each text, encoded on its own, joined

`$ref` and `$ids` are resolved by the caller, before the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_ref.testing.compare import is_array, same_dtype, same_scalar, show

MARKERS = ("$any", "$absent", "$not", "$exact", "$unordered")
"""The markers that a comparison knows."""

LIMIT = 8
"""Differences that are worth reading; the rest follows from them."""


def subset_differences(expected: Any, actual: Any, at: str = "") -> list[str]:
    """What of `expected` does not hold for `actual`, each as `path: got X, expected Y`; [] when all holds."""
    return _compare(expected, actual, at or "$", exact=False)[:LIMIT]


def exact_differences(expected: Any, actual: Any, at: str = "") -> list[str]:
    """As `subset_differences`, but objects must hold the same keys."""
    return _compare(expected, actual, at or "$", exact=True)[:LIMIT]


def marker(value: Any) -> tuple[str, Any] | None:
    """The marker's name and argument, if `value` is one."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, argument),) = value.items()
        if isinstance(name, str) and name.startswith("$"):
            return name, argument
    return None


def _compare(expected: Any, actual: Any, at: str, *, exact: bool) -> list[str]:
    mark = marker(expected)
    if mark is not None:
        name, argument = mark
        if name == "$any":
            return []
        if name == "$absent":
            return [f"{at}: got {show(actual)}, expected no such key"]
        if name == "$not":
            same = not _compare(argument, actual, at, exact=True)
            return [f"{at}: got {show(actual)}, expected anything else"] if same else []
        if name == "$exact":
            return _compare(argument, actual, at, exact=True)
        if name == "$unordered":
            return _unordered(argument, actual, at, exact=exact)
        return [f"{at}: unknown marker {name}"]
    if isinstance(expected, Mapping):
        return _objects(expected, actual, at, exact=exact)
    if isinstance(expected, list):
        return _lists(expected, actual, at, exact=exact)
    return [] if same_scalar(expected, actual) else [f"{at}: got {show(actual)}, expected {show(expected)}"]


def _objects(expected: Mapping[str, Any], actual: Any, at: str, *, exact: bool) -> list[str]:
    if not isinstance(actual, Mapping):
        return [f"{at}: got {show(actual)}, expected an object"]
    found: list[str] = []
    for key, value in expected.items():
        if key == "dtype" and is_array(expected) and same_dtype(value, actual.get(key)):
            continue
        if key in actual:
            found += _compare(value, actual[key], f"{at}.{key}", exact=exact)
        elif marker(value) != ("$absent", True):
            found.append(f"{at}.{key}: missing, expected {show(value)}")
    if exact:
        found += [f"{at}.{key}: got {show(actual[key])}, expected no such key" for key in actual if key not in expected]
    return found


def _lists(expected: Sequence[Any], actual: Any, at: str, *, exact: bool) -> list[str]:
    if not isinstance(actual, list):
        return [f"{at}: got {show(actual)}, expected a list of {len(expected)}"]
    found = []
    if len(actual) != len(expected):
        found.append(f"{at}: got {len(actual)} items {show(actual)}, expected {len(expected)} {show(expected)}")
    for index, (want, have) in enumerate(zip(expected, actual, strict=False)):
        found += _compare(want, have, f"{at}[{index}]", exact=exact)
        if len(found) >= LIMIT:
            break
    return found


def _unordered(expected: Any, actual: Any, at: str, *, exact: bool) -> list[str]:
    if not isinstance(expected, list):
        return [f"{at}: $unordered takes a list, not {show(expected)}"]
    if not isinstance(actual, list) or len(actual) != len(expected):
        return [f"{at}: got {show(actual)}, expected {len(expected)} items in any order"]
    left = list(actual)
    for want in expected:
        match = next((i for i, have in enumerate(left) if not _compare(want, have, at, exact=exact)), None)
        if match is None:
            return [f"{at}: none of {show(left)} is {show(want)}"]
        left.pop(match)
    return []
