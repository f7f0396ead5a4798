"""JSON as the samples payload has it: compact, non-ASCII kept, floats as Python spells them, finite values only."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson

from miles_ref.errors import EncodeError

_INT64 = 2**63
_MAX_DEPTH = 220  # orjson writes no deeper than 254; what the server takes (200) fits with the samples around it
_SHAPES = bytes.maketrans(
    bytes(range(256)),
    bytes(ord("0") if byte in b"0123456789" else ord("e") if byte in b"eE" else byte for byte in range(256)),
)
_UNSAFE = (b"0" * 20, b"-" + b"0" * 19, b"0e000", b"0e+000")
"""Shapes of numbers that orjson may read otherwise: below -2**63 or from 2**64 on as a float, and beyond float64."""


def dump(value: Any, path: str) -> bytes:
    """The JSON text. `value` may hold one-dimensional integer arrays, which are written as lists.

    Raises EncodeError with the path to what is no JSON value: NaN or infinity, another type, a key that is not a text,
    a lone surrogate, or nesting beyond 220 levels.
    """
    if _check(value, path, 0):
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_as_list).encode()


def _as_list(value: Any) -> list[int]:
    ids: list[int] = np.asarray(value).tolist()
    return ids


def _check(value: Any, path: str, depth: int) -> bool:
    """Refuse what is no JSON value; whether orjson spells it as Python does."""
    kind = type(value)
    if kind is str:
        return _check_text(value, path)
    if kind is int:
        return bool(-_INT64 <= value < _INT64)
    if value is None or kind is bool:
        return True
    if kind is float:
        return _check_float(value, path)
    if depth >= _MAX_DEPTH:
        raise EncodeError(f"{path} is nested more than {_MAX_DEPTH} levels deep")
    if kind is dict:
        return _check_object(value, path, depth)
    if kind is list or kind is tuple:
        return _check_list(value, path, depth)
    if kind is np.ndarray:
        if value.ndim == 1 and value.dtype == np.int64:
            return bool(value.flags.c_contiguous) and bool(value.dtype.isnative)
        raise EncodeError(f"{path} is a numpy array of {value.dtype} and shape {value.shape}, not a JSON value")
    return _check_other(value, path, depth)


def _check_other(value: Any, path: str, depth: int) -> bool:
    # Subclasses such as enumerations of texts, ordered dicts and numpy's float64: the standard library's writer
    # takes them for what they are derived from, orjson does not.
    for base in (str, int, float):
        if isinstance(value, base):
            _check(base(value), path, depth)
            return False
    if isinstance(value, dict):
        _check_object(value, path, depth)
        return False
    if isinstance(value, list | tuple):
        _check_list(value, path, depth)
        return False
    raise EncodeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, not a JSON value: {value!r:.80}"
    )


def _check_text(text: str, path: str) -> bool:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(f"{path} has a lone surrogate at index {error.start}: {text!r:.80}") from error
    return True


def _check_float(value: float, path: str) -> bool:
    size = abs(value)
    if not size < np.inf:
        raise EncodeError(f"{path} is {value}; JSON has finite numbers only")
    return size == 0 or 1e-4 <= size < 1e16  # outside of these Python writes an exponent, in another way than orjson


def _check_object(value: dict[Any, Any], path: str, depth: int) -> bool:
    alike = True
    for key, member in value.items():
        if type(key) is not str:
            if not isinstance(key, str):
                raise EncodeError(f"{path} has the key {key!r:.80} of type {type(key).__name__}; keys are texts")
            alike = False
        _check_text(key, path)
        alike = _check(member, f"{path}.{key}", depth + 1) and alike
    return alike


def _check_list(value: list[Any] | tuple[Any, ...], path: str, depth: int) -> bool:
    if set(map(type, value)) == {int}:
        return bool(min(value) >= -_INT64 and max(value) < _INT64)
    alike = True
    for at, member in enumerate(value):
        alike = _check(member, f"{path}[{at}]", depth + 1) and alike
    return alike


def load(raw: bytes | memoryview) -> Any:
    """Parse UTF-8 JSON exactly. Raises ValueError for what is not JSON (NaN and Infinity are not) or not finite."""
    shapes = bytes(raw).translate(_SHAPES)
    if not any(unsafe in shapes for unsafe in _UNSAFE):
        return orjson.loads(raw)
    try:
        value = json.loads(str(raw, "utf-8"), parse_constant=_refuse, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate, as orjson refuses it
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not abs(number) < np.inf:
        raise ValueError(f"{text} is beyond float64")
    return number
