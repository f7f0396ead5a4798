"""Samples -> one safetensors payload (wire.md, Encode). What cannot be written losslessly is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index as as_int
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import orjson

from miles_ref.errors import EncodeError
from miles_ref.sample import Status
from miles_ref.wire import container
from miles_ref.wire.spec import DTYPES, EMPTY_REASONS, META_TENSOR, ValueSpec, select

Array = npt.NDArray[Any]

_EXACT_FLOAT = 2**53  # beyond it a float64 no longer holds every int


def encode_samples(
    samples: Sequence[Any],
    session_metadata: Mapping[str, Any],
    empty_reason: str | None = None,
    *,
    fields: Iterable[str],
) -> bytes:
    """One payload of `samples` (any objects with the table's attributes) and the session's metadata.

    `fields` names the rows of the value table: SAMPLES_VALUE_SPEC or SAMPLES_VALUE_SPEC_V2, or just their names.
    Per-token fields may be lists or arrays of any dtype that holds the values; replay rows must be int32 of rank 3.
    Raises EncodeError naming the sample, the field and the value.
    """
    specs = select(fields)
    tensors: list[tuple[str, str, Array]] = []
    texts = []
    for i, sample in enumerate(samples):
        arrays = {
            name: _tensor(f"sample {i}, {name}", getattr(sample, name), spec)
            for name, spec in specs.items()
            if spec.codec == "tensor"
        }
        tensors += [(f"{name}.{i}", specs[name].dtype or "", a) for name, a in arrays.items() if a is not None]
        texts.append(_sample_text(i, sample, specs, [name for name, a in arrays.items() if a is None]))
        _check_lengths(i, sample, arrays)
    if empty_reason not in (None, *EMPTY_REASONS):
        raise EncodeError(f"empty_reason {empty_reason!r} is not null, {' or '.join(EMPTY_REASONS)}")
    session = _object_text("session_metadata", session_metadata)
    text = f'{{"samples":[{",".join(texts)}],"session_metadata":{session},"empty_reason":{json.dumps(empty_reason)}}}'
    meta = np.frombuffer(_utf8(text, samples, session_metadata), dtype=np.uint8)
    return container.write([*tensors, (META_TENSOR, "U8", meta)])


def _tensor(where: str, value: Any, spec: ValueSpec) -> Array | None:
    """The field as an array of the table's dtype and rank, or None for null."""
    if value is None:
        return None
    dtype = DTYPES[spec.dtype or ""]
    array = _strict(where, value, dtype) if spec.strict else _converted(where, value, dtype)
    if array.ndim != spec.rank:
        raise EncodeError(f"{where}: shape {list(array.shape)} has rank {array.ndim}, the table wants rank {spec.rank}")
    if dtype.kind == "f":
        bad = np.isnan(array) | (array == np.inf)
        if bad.any():
            at = int(np.argmax(bad))
            raise EncodeError(f"{where}[{at}]: {array[at]} is not a log prob (only -inf is allowed beside numbers)")
    return array


def _strict(where: str, value: Any, dtype: np.dtype[Any]) -> Array:
    if isinstance(value, list | tuple) or not hasattr(value, "__array__"):
        raise EncodeError(f"{where}: a {type(value).__name__} is not converted; give a {dtype.name} array of rank 3")
    array: Array = np.asarray(value)
    if array.dtype != dtype:
        raise EncodeError(
            f"{where}: dtype {array.dtype.name} is not converted to {dtype.name}; cast it where it is made"
        )
    return array


def _converted(where: str, value: Any, dtype: np.dtype[Any]) -> Array:
    """`value` in the table's dtype. Refused where a value would change."""
    if isinstance(value, np.ndarray) and value.dtype == dtype:
        return value
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise EncodeError(f"{where}: {error}") from error
    if array.size == 0:
        return array.astype(dtype)
    if array.dtype.kind not in "iufb":
        at, item = _first(value, lambda item: not isinstance(item, int | float) or abs(item) >= 2**63)
        raise EncodeError(f"{where}[{at}]: {item!r:.60} is not a number that {dtype.name} holds")
    if array.dtype.kind == "f" and not isinstance(value, np.ndarray):
        # A list of ints and floats has become floats already: an int that this changed is found in the list only.
        at, item = _first(
            value, lambda item: type(item) is int and abs(item) > _EXACT_FLOAT and int(float(item)) != item
        )
        if at is not None:
            raise EncodeError(f"{where}[{at}]: {item} cannot be held exactly beside floats")
    with np.errstate(invalid="ignore"):
        converted = array.astype(dtype)
    same = _same(array, converted)
    if not same.all():
        place = tuple(int(axis[0]) for axis in np.nonzero(~same))
        raise EncodeError(
            f"{where}[{','.join(map(str, place))}]: {array[place].item()!r} changes when converted to {dtype.name}"
        )
    return converted


def _same(array: Array, converted: Array) -> npt.NDArray[np.bool_]:
    """Where the values agree; compared so that no implicit promotion to float hides a difference."""
    if array.dtype.kind == "f" and converted.dtype.kind != "f":
        low, high = np.iinfo(converted.dtype).min, np.iinfo(converted.dtype).max
        inside = (array >= float(low)) & (array < float(high) + 1.0) & (array == np.floor(array))
        return np.asarray(inside, dtype=bool)
    if converted.dtype.kind == "f" and array.dtype.kind in "iu":
        back = np.abs(converted) < 2.0**63
        return np.asarray(back & (np.where(back, converted, 0).astype(array.dtype) == array), dtype=bool)
    if array.dtype.kind == "u" and converted.dtype.kind == "i":
        return np.asarray(array <= np.uint64(np.iinfo(converted.dtype).max), dtype=bool)
    if converted.dtype.kind == "f":
        return np.asarray((converted == array) | (np.isnan(converted) & np.isnan(array)), dtype=bool)
    return np.asarray(converted == array, dtype=bool)


def _first(value: Any, wrong: Any) -> tuple[int | None, Any]:
    """Index and value of the first item that is wrong; (None, None) where there is none."""
    items: Iterator[Any] = iter(value)
    return next(((at, item) for at, item in enumerate(items) if wrong(item)), (None, None))


def _check_lengths(i: int, sample: Any, arrays: Mapping[str, Array | None]) -> None:
    length = as_int(sample.response_length)
    for name in ("loss_mask", "rollout_log_probs"):
        array = arrays.get(name)
        if array is not None and len(array) != length:
            raise EncodeError(f"sample {i}, {name}: {len(array)} entries, response_length is {length}")
    tokens = arrays.get("tokens")
    held = 0 if tokens is None else len(tokens)
    if not 0 <= length <= held:
        raise EncodeError(f"sample {i}, response_length: {length} of {held} tokens")


def _sample_text(i: int, sample: Any, specs: Mapping[str, ValueSpec], nulls: list[str]) -> str:
    members = []
    for name, spec in specs.items():
        if spec.codec == "json":
            where = f"sample {i}, {name}"
            members.append(f"{json.dumps(name)}:{_field_text(where, name, getattr(sample, name))}")
    members.append(f'"nulls":{_dump(nulls)}')
    return f"{{{','.join(members)}}}"


def _field_text(where: str, name: str, value: Any) -> str:
    """One JSON field, in the form that the table gives it."""
    match name:
        case "response":
            if not isinstance(value, str):
                _refuse(where, value, "a text")
        case "response_length":
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                _refuse(where, value, "a count of tokens")
            value = as_int(value)
        case "status":
            value = getattr(value, "value", value)
            if value not in tuple(Status):
                _refuse(where, value, f"one of {', '.join(Status)}")
            value = str(value)
        case "weight_versions":
            if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                _refuse(where, value, "a list of texts")
        case "prefix_cache_info":
            value = _counts(where, value, ("cached_tokens", "total_prompt_tokens"))
        case "metadata":
            return _object_text(where, value)
    _check_json(where, value)
    return _dump(value)


def _counts(where: str, value: Any, names: tuple[str, ...]) -> dict[str, int]:
    """The counters of an object or a mapping, in the order of `names`."""
    held: Mapping[str, Any] = (
        value if isinstance(value, Mapping) else {name: getattr(value, name, None) for name in names}
    )
    for name in names:
        if isinstance(held.get(name), bool) or not hasattr(held.get(name), "__index__"):
            _refuse(f"{where}.{name}", held.get(name), "an int")
    return {name: as_int(held[name]) for name in names}


def _object_text(where: str, value: Any) -> str:
    """A JSON object. Members that are integer arrays (accumulated token ids) are written without becoming lists."""
    if not isinstance(value, Mapping):
        _refuse(where, value, "an object")
    members = []
    for key, item in value.items():
        if not isinstance(key, str):
            _refuse(where, key, "a text as key")
        if isinstance(item, np.ndarray) and item.dtype == np.int64 and item.ndim == 1:
            text = orjson.dumps(np.ascontiguousarray(item), option=orjson.OPT_SERIALIZE_NUMPY).decode()
        else:
            _check_json(f"{where}.{key}", item)
            text = _dump(item)
        members.append(f"{_dump(key)}:{text}")
    return f"{{{','.join(members)}}}"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _check_json(where: str, value: Any) -> None:
    """Refuse what JSON cannot hold, with the path to it. Not recursive: depth is bounded by the writer below it."""
    stack = [(where, value, 0)]
    while stack:
        path, item, depth = stack.pop()
        if depth > 500:
            raise EncodeError(f"{path:.200}: nested deeper than 500 levels")
        if isinstance(item, dict):
            for key, member in item.items():
                if not isinstance(key, str):
                    _refuse(path, key, "a text as key")
                stack.append((f"{path}.{key}", member, depth + 1))
        elif isinstance(item, list | tuple):
            if not set(map(type, item)) <= {int, str, bool, type(None)}:
                stack += [(f"{path}[{at}]", member, depth + 1) for at, member in enumerate(item)]
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise EncodeError(f"{path}: {item} is not finite, so it is not JSON")
        elif item is not None and not isinstance(item, str | int):
            _refuse(path, item, "a JSON value")


def _utf8(text: str, samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        near = text[max(error.start - 40, 0) : error.start]
        raise EncodeError(
            f"a lone surrogate {text[error.start]!r} after {near!r} cannot be written as UTF-8: "
            f"look in the texts of {len(samples)} samples and of session_metadata"
        ) from error


def _refuse(where: str, value: Any, wanted: str) -> NoReturn:
    raise EncodeError(f"{where}: {value!r:.80} ({type(value).__name__}) is not {wanted}")
