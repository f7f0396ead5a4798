"""One safetensors payload -> samples on the driver's input sample (wire.md, Decode). Nothing is half-applied."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy.typing as npt

from miles_ref.errors import DecodeError
from miles_ref.sample import Status
from miles_ref.wire import container
from miles_ref.wire.spec import EMPTY_REASONS, META_TENSOR, ValueSpec, select

Array = npt.NDArray[Any]


@dataclass(slots=True)
class SamplesReply:
    """What a samples payload holds: the samples on the driver's input, and the session's metadata.

    `empty_reason` is None, "no_records" or "all_truncated".
    """

    samples: list[Any]
    session_metadata: dict[str, Any]
    empty_reason: str | None


def decode_samples_and_merge_input_sample(
    payload: bytes | bytearray | memoryview, input_sample: Any, *, fields: Iterable[str]
) -> SamplesReply:
    """Each sample of the payload, overlaid on a deep copy of `input_sample` (any object with the table's attributes).

    Tensor fields become lists of int or float; replay rows stay int32 arrays of shape (rows, layers, topk), which own
    their memory. Raises DecodeError for a malformed payload, or an input sample that is not at its defaults where
    the overlay would corrupt it; `input_sample` itself is never changed.
    """
    specs = select(fields)
    tensors = container.read(payload)
    meta = _read_meta(tensors.pop(META_TENSOR, None))
    wire_samples = [_WireSample.read(i, entry, specs, tensors) for i, entry in enumerate(meta["samples"])]
    if tensors:
        raise DecodeError(
            f"tensors {sorted(tensors)[:5]} belong to no sample of the {len(wire_samples)} in the payload"
        )
    if wire_samples:
        _check_defaults(input_sample)
    return SamplesReply(
        [sample.overlay(input_sample, specs) for sample in wire_samples], meta["session_metadata"], meta["empty_reason"]
    )


def _read_meta(tensor: tuple[str, Array] | None) -> dict[str, Any]:
    """The JSON part, with its form checked."""
    if tensor is None:
        raise DecodeError(f"the payload has no {META_TENSOR}: it is not a samples payload")
    dtype, array = tensor
    if dtype != "U8" or array.ndim != 1:
        raise DecodeError(f"{META_TENSOR} is {dtype} of shape {list(array.shape)}; it must be U8 of rank 1")
    try:
        meta = json.loads(array.tobytes().decode("utf-8"), parse_constant=_not_json, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{META_TENSOR} is not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise DecodeError(f"{META_TENSOR} is not a JSON object")
    forms = {"samples": list, "session_metadata": dict}
    for name, form in forms.items():
        if not isinstance(meta.get(name), form):
            raise DecodeError(f"{META_TENSOR}.{name} is missing or not a {form.__name__}: {meta.get(name)!r:.60}")
    if "empty_reason" not in meta or meta["empty_reason"] not in (None, *EMPTY_REASONS):
        raise DecodeError(
            f"{META_TENSOR}.empty_reason {meta.get('empty_reason', 'is missing')!r:.60}: "
            f"it must be null, {' or '.join(EMPTY_REASONS)}"
        )
    return meta


@dataclass(frozen=True, slots=True)
class _WireSample:
    """One sample's fields as they came, checked. A null tensor field is not in `arrays`."""

    values: dict[str, Any]
    arrays: dict[str, Array]

    @classmethod
    def read(
        cls, i: int, entry: Any, specs: Mapping[str, ValueSpec], tensors: dict[str, tuple[str, Array]]
    ) -> _WireSample:
        """Take sample i's tensors out of `tensors` and check all of its fields."""
        if not isinstance(entry, dict):
            raise DecodeError(f"sample {i} is not a JSON object: {entry!r:.60}")
        values = {}
        for name, spec in specs.items():
            if spec.codec == "json":
                if name not in entry:
                    raise DecodeError(f"sample {i}: the field {name} is missing")
                values[name] = _checked(f"sample {i}, {name}", name, entry[name])
        nulls = _nulls(i, entry, specs)
        arrays = {}
        for name, spec in specs.items():
            if spec.codec == "tensor":
                array = _take(i, name, spec, name in nulls, tensors)
                if array is not None:
                    arrays[name] = array
        _check_lengths(i, values["response_length"], arrays)
        return cls(values, arrays)

    def overlay(self, input_sample: Any, specs: Mapping[str, ValueSpec]) -> Any:
        """A deep copy of the input with this sample's fields on it."""
        sample = copy.deepcopy(input_sample)
        for name, spec in specs.items():
            if spec.codec == "tensor":
                array = self.arrays.get(name)
                value = spec.null if array is None else array.copy() if spec.strict else array.tolist()
                setattr(sample, name, value)
        for name, value in self.values.items():
            _overlay_value(sample, name, value)
        return sample


def _overlay_value(sample: Any, name: str, value: Any) -> None:
    """One JSON field. Metadata is merged key by key, a null reward leaves the input's."""
    match name:
        case "metadata":
            sample.metadata = {**(sample.metadata or {}), **value}
        case "reward":
            if value is not None:
                sample.reward = value
        case "status":
            # Other packages bring a Status enumeration of their own with the same values.
            kind = type(sample.status) if isinstance(sample.status, Enum) else Status
            sample.status = kind(value)
        case "prefix_cache_info":
            if isinstance(sample.prefix_cache_info, dict):
                sample.prefix_cache_info.update(value)
            else:
                for counter, count in value.items():
                    setattr(sample.prefix_cache_info, counter, count)
        case _:
            setattr(sample, name, value)


def _nulls(i: int, entry: Mapping[str, Any], specs: Mapping[str, ValueSpec]) -> set[str]:
    nulls = entry.get("nulls")
    if not isinstance(nulls, list) or not all(isinstance(name, str) for name in nulls):
        raise DecodeError(f"sample {i}: nulls must be a list of field names, not {nulls!r:.60}")
    for name in nulls:
        if name not in specs or specs[name].codec != "tensor":
            raise DecodeError(f"sample {i}: nulls names {name!r:.60}, which is no tensor field")
    return set(nulls)


def _take(i: int, name: str, spec: ValueSpec, is_null: bool, tensors: dict[str, tuple[str, Array]]) -> Array | None:
    key = f"{name}.{i}"
    if is_null:
        if key in tensors:
            raise DecodeError(f"sample {i}: {name} is listed in nulls, but the tensor {key} is there")
        return None
    if key not in tensors:
        raise DecodeError(f"sample {i}: the tensor {key} is missing and {name} is not listed in nulls")
    dtype, array = tensors.pop(key)
    if dtype != spec.dtype or array.ndim != spec.rank:
        raise DecodeError(
            f"tensor {key} is {dtype} of shape {list(array.shape)}; the table wants {spec.dtype} of rank {spec.rank}"
        )
    return array


def _checked(where: str, name: str, value: Any) -> Any:
    """One JSON field, with the table's type."""
    match name:
        case "response":
            good = isinstance(value, str)
        case "response_length":
            good = type(value) is int and value >= 0
        case "status":
            good = isinstance(value, str) and value in tuple(Status)
        case "weight_versions":
            good = isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "prefix_cache_info":
            counters = ("cached_tokens", "total_prompt_tokens")
            good = isinstance(value, dict) and all(type(value.get(counter)) is int for counter in counters)
            value = {counter: value[counter] for counter in counters} if good else value
        case "metadata":
            good = isinstance(value, dict)
        case _:
            good = True
    if not good:
        raise DecodeError(f"{where}: {value!r:.80} is not of the table's type")
    return value


def _check_lengths(i: int, response_length: int, arrays: Mapping[str, Array]) -> None:
    for name in ("loss_mask", "rollout_log_probs"):
        if name in arrays and len(arrays[name]) != response_length:
            raise DecodeError(
                f"sample {i}: {name} has {len(arrays[name])} entries, response_length is {response_length}"
            )
    held = len(arrays["tokens"]) if "tokens" in arrays else 0
    if response_length > held:
        raise DecodeError(f"sample {i}: response_length {response_length} is more than the {held} tokens")


def _check_defaults(sample: Any) -> None:
    """The input must be fresh where the overlay would mix two generations (wire.md, Before an overlay)."""
    faults = [name for name in ("weight_versions",) if getattr(sample, name, None)]
    faults += [name for name in ("prefix_cache_info", "spec_info") if not _is_zero(getattr(sample, name, None))]
    faults += [name for name in ("teacher_log_probs", "opd_reverse_kl") if getattr(sample, name, None) is not None]
    if "opd_student_top_logprobs" in (getattr(sample, "metadata", None) or {}):
        faults.append("metadata.opd_student_top_logprobs")
    if faults:
        raise DecodeError(
            f"the input sample holds values of an earlier generation in {', '.join(faults)}; give a fresh sample "
            "(these fields at their defaults)"
        )


def _is_zero(counters: Any) -> bool:
    """Whether an object of counters, a mapping of them, or None is at its default."""
    if counters is None:
        return True
    if isinstance(counters, Mapping):
        return not any(counters.values())
    try:
        return bool(counters == type(counters)())
    except TypeError:
        return not any(vars(counters).values())


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of the range of a float")
    return value


def _not_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
