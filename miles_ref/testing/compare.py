"""Exact comparison of what was observed with what a case expects (cases.md): the first difference, with its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def first_difference(expected: Any, observed: Any, path: str = "") -> str | None:
    """None where they are the same; numbers by value (0 equals 0.0), true is not 1, a missing key is not null."""
    if isinstance(expected, Mapping) and isinstance(observed, Mapping):
        return _objects(expected, observed, path)
    if isinstance(expected, list) and isinstance(observed, list):
        return _lists(expected, observed, path)
    if same_scalar(expected, observed):
        return None
    return f"{path or 'the whole'}: expected {show(expected)}, got {show(observed)}"


def expectation_difference(expected: Mapping[str, Any], observed: Mapping[str, Any]) -> str | None:
    """As `first_difference`, for a case's `expect`; of an error the code and the mentions are compared."""
    if "error" not in expected or "error" not in observed:
        if "error" in observed:
            return f"refused ({observed['error']}): {observed['message']}"
        if "error" in expected:
            return f"expected a refusal ({expected['error']}), got {show(observed)}"
        wanted, got = expected.get("payload"), observed.get("payload")
        if isinstance(wanted, str) and isinstance(got, str) and wanted != got:
            from miles_ref.testing.payloads import payload_difference

            return payload_difference(wanted, got)
        return first_difference(expected, observed)
    if expected["error"] != observed["error"]:
        return f"error: expected {expected['error']}, got {observed['error']}: {observed['message']}"
    missing = [text for text in expected["mentions"] if text not in observed["message"]]
    return f"the message does not mention {missing}: {observed['message']}" if missing else None


def show(value: Any, most: int = 160) -> str:
    """A value as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _objects(expected: Mapping[str, Any], observed: Mapping[str, Any], path: str) -> str | None:
    for key, value in expected.items():
        at = f"{path}.{key}" if path else str(key)
        if key not in observed:
            return f"{at}: missing, expected {show(value)}"
        if key == "dtype" and is_array(expected) and same_dtype(value, observed[key]):
            continue
        found = first_difference(value, observed[key], at)
        if found is not None:
            return found
    extra = [key for key in observed if key not in expected]
    if extra:
        return f"{f'{path}.' if path else ''}{extra[0]}: unexpected, got {show(observed[extra[0]])}"
    return None


def _lists(expected: list[Any], observed: list[Any], path: str) -> str | None:
    for at, (left, right) in enumerate(zip(expected, observed, strict=False)):
        found = first_difference(left, right, f"{path}[{at}]")
        if found is not None:
            return found
    if len(expected) != len(observed):
        return f"{path or 'the whole'}: expected {len(expected)} entries, got {len(observed)}"
    return None


def is_array(value: Mapping[str, Any]) -> bool:
    """Whether it is an array as cases spell them."""
    return value.keys() == {"dtype", "shape", "data"}


def same_dtype(left: Any, right: Any) -> bool:
    """Whether both are names of one dtype, as numpy takes them: "<i4" is "int32" on a little-endian machine."""
    if not isinstance(left, str) or not isinstance(right, str):
        return False
    import numpy as np

    try:
        return np.dtype(left) == np.dtype(right)
    except (TypeError, ValueError, SyntaxError):
        return False


def same_scalar(left: Any, right: Any) -> bool:
    """Equality of JSON scalars: by mathematical value, true is not 1, null equals only null."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left == right
    return type(left) is type(right) and bool(left == right)
