"""Bytes to samples, overlaid on the driver's input sample (wire.md, Decode). Nothing is half-applied."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_ref.errors import DecodeError
from miles_ref.sample import STUDENT_LOG_PROBS, PrefixCacheInfo
from miles_ref.wire import container
from miles_ref.wire.json_text import load
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


@dataclass(frozen=True, slots=True)
class SamplesReply:
    """A decoded reply. `empty_reason` is None, "no_records" or "all_truncated"."""

    samples: list[Any]
    session_metadata: dict[str, Any]
    empty_reason: str | None


@dataclass(frozen=True, slots=True)
class _WireSample:
    entry: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[Any] | None]


def decode_samples_and_merge_input_sample(
    payload: bytes | bytearray | memoryview, input_sample: Any, *, fields: Fields
) -> SamplesReply:
    """The reply's samples: each a deepcopy of `input_sample`, any object with these attributes, and the wire's fields.

    tokens, loss_mask and rollout_log_probs become lists of int or float, replay rows int32 arrays (rows, layers, topk).
    Raises DecodeError for a payload that is malformed or contradicts itself, and for an input sample that is not at its
    defaults where merging would corrupt it; nothing is changed then.
    """
    specs = table(fields)
    tensors = container.read(payload)
    meta = _read_meta(tensors)
    entries = meta["samples"]
    for at, entry in enumerate(entries):
        _check_entry(entry, specs, f"sample {at}")
    _check_names(tensors, entries, specs)
    wires = [_wire_sample(entry, tensors, specs, at) for at, entry in enumerate(entries)]
    if wires:
        _check_input(input_sample)
    return SamplesReply(
        [_overlay(input_sample, wire, specs) for wire in wires], meta["session_metadata"], meta["empty_reason"]
    )


def _read_meta(tensors: Mapping[str, container.StoredTensor]) -> dict[str, Any]:
    stored = tensors.get(META)
    if stored is None:
        raise _refused(f"there is no tensor {META}")
    if stored.code != "U8" or len(stored.shape) != 1:
        raise _refused(f"{META} is {stored.code} of shape {list(stored.shape)}, not U8 of rank 1")
    try:
        meta = load(bytes(stored.raw))
    except ValueError as error:
        raise _refused(f"{META} is not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise _refused(f"{META} is {meta!r:.80}, not an object")
    for key, kind in (("samples", list), ("session_metadata", dict)):
        if not isinstance(meta.get(key), kind):
            raise _refused(f"{META}.{key} is {_shown(meta, key)}, not {'a list' if kind is list else 'an object'}")
    if "empty_reason" not in meta or meta["empty_reason"] not in (None, *EMPTY_REASONS):
        raise _refused(f"{META}.empty_reason is {_shown(meta, 'empty_reason')}, known are null, {EMPTY_REASONS}")
    return meta


def _check_entry(entry: Any, specs: Mapping[str, ValueSpec], where: str) -> None:
    if not isinstance(entry, dict):
        raise _refused(f"{where} is {entry!r:.80}, not an object")
    for name, spec in specs.items():
        if not spec.is_tensor and not (name in entry and _fits(name, entry[name])):
            raise _refused(f"{where}: {name} is {_shown(entry, name)}, which is not of the table's type")
    nulls = entry.get(NULLS)
    if not isinstance(nulls, list):
        raise _refused(f"{where}: {NULLS} is {_shown(entry, NULLS)}, not a list")
    for name in nulls:
        if not isinstance(name, str) or name not in specs or not specs[name].is_tensor:
            raise _refused(f"{where}: {NULLS} lists {name!r:.80}, which is no tensor field")


def _fits(name: str, value: Any) -> bool:
    match name:
        case "response":
            return isinstance(value, str)
        case "response_length":
            return type(value) is int and value >= 0
        case "status":
            return isinstance(value, str) and value in STATUSES
        case "weight_versions":
            return isinstance(value, list) and all(isinstance(version, str) for version in value)
        case "prefix_cache_info":
            return isinstance(value, dict) and all(type(value.get(key)) is int for key in CACHE_KEYS)
        case "metadata":
            return isinstance(value, dict)
    return True


def _check_names(
    tensors: Mapping[str, container.StoredTensor], entries: list[Any], specs: Mapping[str, ValueSpec]
) -> None:
    """Each tensor is one that a sample promises, and each promised one is there."""
    expected = {META}
    for at, entry in enumerate(entries):
        for name, spec in specs.items():
            if not spec.is_tensor:
                continue
            tensor = f"{name}.{at}"
            if name in entry[NULLS]:
                if tensor in tensors:
                    raise _refused(f"sample {at}: {name} is listed in {NULLS}, but tensor {tensor} is there")
                continue
            if tensor not in tensors:
                raise _refused(f"sample {at}: tensor {tensor} is missing")
            expected.add(tensor)
    unknown = sorted(tensors.keys() - expected)
    if unknown:
        raise _refused(f"no sample refers to tensor {unknown[0]!r:.80}")


def _wire_sample(
    entry: dict[str, Any], tensors: Mapping[str, container.StoredTensor], specs: Mapping[str, ValueSpec], at: int
) -> _WireSample:
    arrays: dict[str, npt.NDArray[Any] | None] = {}
    for name, spec in specs.items():
        if spec.is_tensor:
            stored = None if name in entry[NULLS] else tensors[f"{name}.{at}"]
            arrays[name] = None if stored is None else _array(stored, spec, f"sample {at}: {name}")
    _check_lengths(entry["response_length"], arrays, f"sample {at}")
    return _WireSample(entry, arrays)


def _array(stored: container.StoredTensor, spec: ValueSpec, where: str) -> npt.NDArray[Any]:
    assert spec.dtype is not None
    if stored.code != container.CODES[spec.dtype] or len(stored.shape) != spec.rank:
        raise _refused(
            f"{where} is {stored.code} of shape {list(stored.shape)}, "
            f"not {container.CODES[spec.dtype]} of rank {spec.rank}"
        )
    return stored.array(spec.dtype)


def _check_lengths(response_length: int, arrays: Mapping[str, npt.NDArray[Any] | None], where: str) -> None:
    for name in PER_RESPONSE_TOKEN:
        array = arrays.get(name)
        if array is not None and len(array) != response_length:
            raise _refused(f"{where}: {name} has {len(array)} entries, response_length is {response_length}")
    tokens = arrays.get("tokens")
    count = 0 if tokens is None else len(tokens)
    if response_length > count:
        raise _refused(f"{where}: response_length is {response_length}, but there are {count} tokens")


def _check_input(sample: Any) -> None:
    """Whether merging would corrupt the input: these fields would be added to, or lie beside others' tokens."""
    if sample.weight_versions:
        raise _not_default("weight_versions", sample.weight_versions)
    for name in ("prefix_cache_info", "spec_info"):
        if not _is_zero(getattr(sample, name, None)):
            raise _not_default(name, getattr(sample, name))
    for name in ("teacher_log_probs", "opd_reverse_kl"):
        if getattr(sample, name, None) is not None:
            raise _not_default(name, getattr(sample, name))
    metadata: Any = sample.metadata
    if metadata is not None and not isinstance(metadata, Mapping):
        raise DecodeError(f"the input sample's metadata is {metadata!r:.80}, not an object")
    if metadata and STUDENT_LOG_PROBS in metadata:
        raise _not_default(f"metadata.{STUDENT_LOG_PROBS}", metadata[STUDENT_LOG_PROBS])


def _is_zero(info: Any) -> bool:
    if info is None:
        return True
    if isinstance(info, Mapping):
        return not any(info.values())
    try:
        return bool(info == type(info)())
    except TypeError:
        return not any(vars(info).values())


def _overlay(input_sample: Any, wire: _WireSample, specs: Mapping[str, ValueSpec]) -> Any:
    sample = copy.deepcopy(input_sample)
    for name, spec in specs.items():
        if spec.is_tensor:
            setattr(sample, name, _tensor_value(wire.tensors[name], spec))
    for name, spec in specs.items():
        if not spec.is_tensor:
            _overlay_json(sample, name, wire.entry[name])
    return sample


def _tensor_value(array: npt.NDArray[Any] | None, spec: ValueSpec) -> Any:
    if array is None:
        return copy.copy(spec.null)
    return np.array(array, dtype=spec.dtype) if spec.strict else array.tolist()


def _overlay_json(sample: Any, name: str, value: Any) -> None:
    if name == "metadata":
        sample.metadata = {**(sample.metadata or {}), **value}
    elif name == "prefix_cache_info":
        sample.prefix_cache_info = _cache_info(sample.prefix_cache_info, value)
    elif name == "status":
        sample.status = _status(sample.status, value)
    elif name != "reward" or value is not None:
        setattr(sample, name, value)


def _status(current: Any, value: str) -> Any:
    """The status in the type that the input sample has for it; a text where that is none."""
    if not isinstance(current, Enum):
        return value
    try:
        return type(current)(value)
    except ValueError as error:
        raise DecodeError(f"the input sample's status is a {type(current).__name__}, which has no {value!r}") from error


def _cache_info(current: Any, value: Mapping[str, int]) -> Any:
    counts = {key: value[key] for key in CACHE_KEYS}
    if current is None:
        return PrefixCacheInfo(**counts)
    if isinstance(current, MutableMapping):
        current.update(counts)
        return current
    if dataclasses.is_dataclass(current) and not isinstance(current, type):
        return dataclasses.replace(current, **counts)
    for key, count in counts.items():
        setattr(current, key, count)
    return current


def _shown(holder: Mapping[str, Any], key: str) -> str:
    return f"{holder[key]!r:.80}" if key in holder else "absent"


def _refused(what: str) -> DecodeError:
    return DecodeError(f"samples payload: {what}")


def _not_default(field: str, value: Any) -> DecodeError:
    return DecodeError(
        f"the input sample's {field} is {value!r:.80}; it must be at its default, or the merged sample would mix it "
        "with the reply's"
    )
