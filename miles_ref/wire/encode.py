"""Samples to bytes (wire.md, Encode). What cannot be written losslessly is refused, with sample, field and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_ref.errors import EncodeError, described
from miles_ref.records import RowView, TokenView
from miles_ref.wire import container
from miles_ref.wire.json_text import dump
from miles_ref.wire.spec import (
    CACHE_KEYS,
    EMPTY_REASONS,
    META,
    NULLS,
    PER_RESPONSE_TOKEN,
    STATUSES,
    Fields,
    ValueSpec,
    table,
)


def encode_samples(
    samples: Sequence[Any],
    session_metadata: Mapping[str, Any],
    empty_reason: str | None = None,
    *,
    fields: Fields,
) -> bytes:
    """The samples payload, with the fields of the table and no others (SAMPLES_VALUE_SPEC for v1, ..._V2 for v2).

    A sample is any object with these attributes. Per-token fields may be lists, arrays or views; replay rows arrays of
    int32 and shape (rows, layers, topk). Raises EncodeError naming sample, field and value.
    """
    specs = table(fields)
    if empty_reason is not None and empty_reason not in EMPTY_REASONS:
        raise EncodeError(f"empty_reason is {empty_reason!r}, known are {', '.join(EMPTY_REASONS)} and null")
    if not isinstance(session_metadata, dict):
        raise EncodeError(f"session_metadata is {session_metadata!r:.80}, not an object")
    tensors: list[container.Tensor] = []
    entries = []
    for at, sample in enumerate(samples):
        entry, own = _encode_sample(sample, at, specs)
        entries.append(entry)
        tensors += own
    meta = b"".join(
        (
            b'{"samples":[',
            b",".join(entries),
            b'],"session_metadata":',
            dump(session_metadata, "session_metadata"),
            b',"empty_reason":',
            dump(empty_reason, "empty_reason"),
            b"}",
        )
    )
    return container.write([*tensors, container.Tensor(META, "U8", (len(meta),), [meta])])


def _encode_sample(sample: Any, at: int, specs: Mapping[str, ValueSpec]) -> tuple[bytes, list[container.Tensor]]:
    where = f"sample {at}"
    values = {name: _value(sample, name, where) for name in specs}
    arrays = {
        name: _tensor(values[name], spec, f"{where}: {name}")
        for name, spec in specs.items()
        if spec.is_tensor and values[name] is not None
    }
    members = {name: _json_value(name, values[name], f"{where}: {name}") for name in specs if not specs[name].is_tensor}
    _check_log_probs(arrays.get("rollout_log_probs"), where)
    _check_lengths(members["response_length"], {name: array.shape[0] for name, array in arrays.items()}, where)
    nulls = [name for name, spec in specs.items() if spec.is_tensor and name not in arrays]
    entry = dump({**members, NULLS: nulls}, where)
    return entry, [_laid_out(f"{name}.{at}", array) for name, array in arrays.items()]


def _value(sample: Any, name: str, where: str) -> Any:
    try:
        return getattr(sample, name)
    except AttributeError as error:
        raise EncodeError(f"{where} has no field {name}: it is a {type(sample).__name__}") from error


def _laid_out(name: str, array: npt.NDArray[Any] | RowView) -> container.Tensor:
    if isinstance(array, RowView):
        return container.Tensor(name, "I32", array.shape, array.chunks())
    return container.Tensor.of(name, array)


def _tensor(value: Any, spec: ValueSpec, where: str) -> npt.NDArray[Any] | RowView:
    if spec.strict:
        return _strict(value, spec, where)
    array = _as_array(value, where)
    if array.ndim != spec.rank:
        raise EncodeError(f"{where} has shape {array.shape}, not rank {spec.rank}")
    return _converted(array, np.dtype(spec.dtype), where)


def _strict(value: Any, spec: ValueSpec, where: str) -> npt.NDArray[Any] | RowView:
    if isinstance(value, RowView):
        return value
    if isinstance(value, list | tuple) or not hasattr(value, "__array__"):
        raise EncodeError(f"{where} is a {type(value).__name__}, not an array of {spec.dtype}")
    array = _from_array(value, where)
    if array.dtype != np.dtype(spec.dtype):  # also where only the order of the bytes differs
        raise EncodeError(f"{where} has dtype {array.dtype}; {spec.dtype} is written, and nothing is converted to it")
    if array.ndim != spec.rank:
        raise EncodeError(f"{where} has shape {array.shape}; it must be (rows, layers, topk)")
    return array


def _as_array(value: Any, where: str) -> npt.NDArray[Any]:
    """The values in numpy's own type for them, so that nothing is rounded: objects where the types differ."""
    if isinstance(value, TokenView):
        return value.array()
    if isinstance(value, str | bytes) or not (hasattr(value, "__array__") or isinstance(value, Sequence)):
        raise EncodeError(f"{where} is {value!r:.80}, not a list of numbers")
    if hasattr(value, "__array__"):
        return _from_array(value, where)
    kinds = set(map(type, value))
    if kinds == {int} or kinds == {float}:
        try:
            return np.array(value, dtype=np.int64 if kinds == {int} else np.float64)
        except OverflowError:
            pass
    return np.fromiter(value, dtype=object, count=len(value))


def _from_array(value: Any, where: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except BaseException as error:  # another library's own conversion, such as of a tensor on a device; or a plugin's
        raise EncodeError(f"{where} is a {type(value).__name__} that is no numpy array: {described(error)}") from error


def _converted(array: npt.NDArray[Any], dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    if array.dtype == dtype:
        return array
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        outside = (array < limits.min) | (array > limits.max)
        if outside.any():
            at = int(outside.argmax())
            raise _refused(array[at].item(), at, dtype, where)
        return array.astype(dtype)
    if array.dtype.kind == dtype.kind == "f" and array.dtype.itemsize <= dtype.itemsize:
        return array.astype(dtype)
    return _converted_one_by_one(array, dtype, where)


def _converted_one_by_one(array: npt.NDArray[Any], dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    """Exactly, by Python's own comparison of numbers of any size."""
    converted = np.empty(len(array), dtype=dtype)
    for at, item in enumerate(array.tolist()):
        value = item.item() if isinstance(item, np.generic) else item
        if isinstance(value, np.longdouble) and value == float(value):  # item() left it as it is
            value = float(value)
        if type(value) not in (int, float):
            raise _refused(value, at, dtype, where)
        try:
            converted[at] = value
        except (OverflowError, ValueError) as error:
            raise _refused(value, at, dtype, where) from error
        # NaN changes nothing in a float; that no log prob is NaN is a rule of its own.
        if converted[at].item() != value and not (value != value and dtype.kind == "f"):
            raise _refused(value, at, dtype, where)
    return converted


def _refused(value: Any, at: int, dtype: np.dtype[Any], where: str) -> EncodeError:
    return EncodeError(f"{where}[{at}] is {value!r:.80}, which {dtype} cannot hold unchanged")


def _check_log_probs(array: npt.NDArray[Any] | RowView | None, where: str) -> None:
    if array is None or isinstance(array, RowView):
        return
    refused = np.isnan(array) | (array == np.inf)
    if refused.any():
        at = int(refused.argmax())
        raise EncodeError(f"{where}: rollout_log_probs[{at}] is {array[at]}; a log prob is a number or minus infinity")


def _check_lengths(response_length: int, lengths: Mapping[str, int], where: str) -> None:
    for name in PER_RESPONSE_TOKEN:
        if lengths.get(name, response_length) != response_length:
            raise EncodeError(f"{where}: {name} has {lengths[name]} entries, response_length is {response_length}")
    if response_length > lengths.get("tokens", 0):
        raise EncodeError(f"{where}: response_length is {response_length}, but tokens has {lengths.get('tokens', 0)}")


def _json_value(name: str, value: Any, where: str) -> Any:
    """The value as JSON. Refuses what the table's type is not, so that whatever is written can be read."""
    given = value
    if name == "response":
        fits = isinstance(value, str)
    elif name == "response_length":
        fits = type(value) is int and value >= 0
    elif name == "status":
        value = value.value if isinstance(value, Enum) else value
        fits = isinstance(value, str) and value in STATUSES
    elif name == "weight_versions":
        fits = isinstance(value, list)
        for at, version in enumerate(value if fits else ()):
            if not isinstance(version, str):
                raise EncodeError(f"{where}[{at}] is {version!r:.80}, not a text (wire.md)")
    elif name == "prefix_cache_info":
        value = _cache_info(value)
        fits = value is not None
    else:
        fits = name != "metadata" or isinstance(value, dict)
    if not fits:
        raise EncodeError(f"{where} is {given!r:.80}, which is not of the field's type (wire.md)")
    return value


def _cache_info(info: Any) -> dict[str, int] | None:
    values: Mapping[str, Any] = (
        info if isinstance(info, Mapping) else {key: getattr(info, key, None) for key in CACHE_KEYS}
    )
    counts: dict[str, int] = {key: values[key] for key in CACHE_KEYS if type(values.get(key)) is int}
    return counts if len(counts) == len(CACHE_KEYS) else None
