"""Cases of kind encode and decode: the samples payload (cases.md, encode, decode)."""

from __future__ import annotations

import binascii
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64

from miles_ref.errors import AssemblyError, CaseError, DecodeError
from miles_ref.plugins import Assembly, Pipeline
from miles_ref.sample import PrefixCacheInfo, Sample, SpecInfo, Status
from miles_ref.testing.cases import Case
from miles_ref.testing.compare import is_array, same_scalar
from miles_ref.wire import (
    SAMPLES_VALUE_SPEC,
    SAMPLES_VALUE_SPEC_V2,
    ValueSpec,
    decode_samples_and_merge_input_sample,
)

LOG_PROB_LISTS = ("rollout_log_probs", "teacher_log_probs")
REFUSED = "refused"

_WORDS = {"-inf": -math.inf, "inf": math.inf, "nan": math.nan}
_BUILD: Mapping[str, Any] = {"prefix_cache_info": PrefixCacheInfo, "spec_info": SpecInfo}


def fields_of(case: Case) -> Mapping[str, ValueSpec]:
    """The wire table of the case's version."""
    return SAMPLES_VALUE_SPEC_V2 if case.version == "v2" else SAMPLES_VALUE_SPEC


def encode(case: Case, plugin_set: str | None = None) -> dict[str, Any]:
    """What became of an encode case, in the form of its expect; a refusal has its `message`."""
    samples = [sample_of(values) for values in case.input["samples"]]
    assembly = Assembly(samples, case.input["session_metadata"], case.input.get("empty_reason"))
    try:
        payload = Pipeline(case.version, plugin_set=plugin_set).encode(assembly)
    except AssemblyError as error:
        return {"error": REFUSED, "message": str(error)}
    return {"payload": pybase64.b64encode(payload).decode()}


def decode(case: Case) -> dict[str, Any]:
    """What became of a decode case, in the form of its expect; a refusal has its `message`."""
    try:
        payload = pybase64.b64decode(case.input["payload"], validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise CaseError(f"{case.id}: input.payload is not base64: {error}") from error
    try:
        reply = decode_samples_and_merge_input_sample(
            payload, sample_of(case.input.get("input_sample") or {}), fields=fields_of(case)
        )
    except DecodeError as error:
        return {"error": REFUSED, "message": str(error)}
    return {
        "samples": [whole_sample(sample) for sample in reply.samples],
        "session_metadata": reply.session_metadata,
        "empty_reason": reply.empty_reason,
    }


def sample_of(values: Mapping[str, Any]) -> Sample:
    """A sample of a case's values: arrays as `{dtype, shape, data}`, "-inf" in log prob lists."""
    known = {field.name for field in dataclasses.fields(Sample)}
    if not values.keys() <= known:
        raise CaseError(f"a sample has no field {sorted(values.keys() - known)[0]!r}")
    return Sample(**{name: _value_of(name, value) for name, value in values.items()})


def _value_of(name: str, value: Any) -> Any:
    if name in _BUILD and isinstance(value, dict):
        known = {field.name for field in dataclasses.fields(_BUILD[name])}
        if not value.keys() <= known:
            raise CaseError(f"{name} has no field {sorted(value.keys() - known)[0]!r}; known are {sorted(known)}")
        return _BUILD[name](**value)
    if name == "status" and value in tuple(Status):
        return Status(value)
    if name in LOG_PROB_LISTS and isinstance(value, list):
        return [_WORDS.get(item, item) if isinstance(item, str) else item for item in value]
    if isinstance(value, dict) and is_array(value):
        try:
            return _array(value["data"], value["dtype"]).reshape(value["shape"])
        except (TypeError, ValueError, OverflowError) as error:
            raise CaseError(f"{name} is no array: {error}") from error
    return value


def _array(data: list[Any], dtype: str) -> np.ndarray[Any, Any]:
    """The values in a dtype that holds them as they are. Raises ValueError for one that numpy would change."""
    items = [_WORDS.get(item, item) if isinstance(item, str) else item for item in data]
    array = np.array(items, dtype=dtype)
    for at, (item, held) in enumerate(zip(items, array.tolist(), strict=True)):
        if not same_scalar(item, held) and not (item != item and held != held):  # NaN is no other NaN's equal
            raise ValueError(f"data[{at}] is {item!r:.80}, which {array.dtype} does not hold unchanged")
    return array


def wire_sample(sample: Sample, fields: Mapping[str, ValueSpec]) -> dict[str, Any]:
    """The wire fields of a sample as plain values."""
    return {name: plain(name, getattr(sample, name)) for name in fields}


def whole_sample(sample: Sample) -> dict[str, Any]:
    """All fields of a sample as plain values."""
    return {field.name: plain(field.name, getattr(sample, field.name)) for field in dataclasses.fields(sample)}


def plain(name: str, value: Any) -> Any:
    """A field's value as cases spell it."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "shape": list(value.shape), "data": value.reshape(-1).tolist()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if name in LOG_PROB_LISTS and isinstance(value, list):
        return ["-inf" if item == -math.inf else item for item in value]
    return str(value) if isinstance(value, Status) else value
