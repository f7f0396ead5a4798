"""samples -> payload, byte for byte (wire.md, Encode)."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

from .table import CODES, META, RANGES, STATUSES, TENSORS, ZERO_CACHE, json_fields
from .values import Fault, is_integer, is_number, log_prob_value

ORDER = ["I64", "F64", "I32", "U8"]
Tensor = tuple[str, str, list[int], bytes]  # name, dtype, shape, data


def encode(case: dict[str, Any]) -> bytes:
    """The payload of an encode case, or a Fault."""
    given = case["input"]
    tensors: list[Tensor] = []
    entries = []
    for i, sample in enumerate(given["samples"]):
        _check_types(sample, i)
        _check_lengths(sample, i)
        entry = {field: sample[field] for field in json_fields(case["version"])}
        entry["nulls"] = [field for field in TENSORS if sample[field] is None]
        entries.append(entry)
        tensors += [_tensor(field, sample[field], i) for field in TENSORS if sample[field] is not None]
    meta = {
        "samples": entries,
        "session_metadata": given["session_metadata"],
        "empty_reason": given["empty_reason"],
    }
    text = _json_bytes(meta)
    tensors.append((META, "U8", [len(text)], text))
    return safetensors_bytes(tensors)


def _check_types(sample: dict[str, Any], i: int) -> None:
    cache, versions = sample["prefix_cache_info"], sample["weight_versions"]
    right = {
        "response": isinstance(sample["response"], str),
        "response_length": is_integer(sample["response_length"]) and sample["response_length"] >= 0,
        "status": isinstance(sample["status"], str) and sample["status"] in STATUSES,
        "weight_versions": isinstance(versions, list) and all(isinstance(version, str) for version in versions),
        "prefix_cache_info": isinstance(cache, dict) and all(is_integer(cache.get(key)) for key in ZERO_CACHE),
        "metadata": isinstance(sample["metadata"], dict),
    }
    for field, is_right in right.items():
        if not is_right:
            raise Fault(i, field, sample[field])


def _length(value: Any) -> int:
    return len(value["data"] if isinstance(value, dict) else value)


def _check_lengths(sample: dict[str, Any], i: int) -> None:
    length = sample["response_length"]
    for field in ("loss_mask", "rollout_log_probs"):
        if sample[field] is not None and _length(sample[field]) != length:
            raise Fault(i, field, _length(sample[field]), "response_length", length)
    tokens = 0 if sample["tokens"] is None else _length(sample["tokens"])
    if length > tokens:
        raise Fault(i, "response_length", length, "tokens", tokens)


def _tensor(field: str, value: Any, i: int) -> Tensor:
    dtype, rank, strict = TENSORS[field]
    if strict and not isinstance(value, dict):
        raise Fault(i, field, "not an array")
    if isinstance(value, dict):
        if strict and value["dtype"] != "int32":
            raise Fault(i, field, value["dtype"])
        shape, flat = value["shape"], value["data"]
    else:
        shape, flat = [len(value)], value
    if len(shape) != rank or any(isinstance(item, list) for item in flat):
        raise Fault(i, field, "rank")
    items = [_item(log_prob_value(item), dtype, field, i) for item in flat]
    return f"{field}.{i}", dtype, list(shape), struct.pack(f"<{len(items)}{CODES[dtype]}", *items)


def _item(value: Any, dtype: str, field: str, i: int) -> Any:
    if not is_number(value) or math.isnan(value) or value == math.inf:
        raise Fault(i, field, value)
    if dtype == "F64":
        if float(value) != value:
            raise Fault(i, field, value)
        return float(value)
    low, high = RANGES.get(dtype, (-(2**31), 2**31 - 1))
    if value == -math.inf or value != int(value) or not low <= value <= high:
        raise Fault(i, field, value)
    return int(value)


def _json_bytes(meta: dict[str, Any]) -> bytes:
    _check_finite(meta, "")
    text = json.dumps(meta, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Fault("surrogate") from error


def _check_finite(value: Any, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise Fault(*path.replace("]", "").replace("[", ".").strip(".").split("."), path, value)
    if isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, f"{path}.{key}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_finite(item, f"{path}[{index}]")


def safetensors_bytes(tensors: list[Tensor]) -> bytes:
    """A safetensors file in the contract's layout."""
    ordered = sorted(tensors, key=lambda tensor: (ORDER.index(tensor[1]), tensor[0]))
    header: dict[str, Any] = {}
    data = b""
    for name, dtype, shape, raw in ordered:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data
