"""payload + input sample -> whole samples (wire.md, Decode)."""

from __future__ import annotations

import copy
import json
import struct
from typing import Any

from .table import CODES, DEFAULTS, EMPTY_REASONS, META, STATUSES, TENSORS, ZERO_CACHE, ZERO_SPEC, json_fields
from .values import Fault, is_integer, log_prob_word, same

WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
Tensors = dict[str, dict[str, Any]]  # name -> {"dtype", "shape", "raw"}


def decode(payload: bytes, input_sample: dict[str, Any], version: str) -> dict[str, Any]:
    """The reply of a decode case, or a Fault."""
    tensors = _read_safetensors(payload)
    meta = _read_meta(tensors)
    fields = json_fields(version)
    for i, entry in enumerate(meta["samples"]):
        _check_entry(entry, fields, i)
    _check_names(tensors, meta["samples"])
    wires = [_wire_sample(entry, tensors, fields, i) for i, entry in enumerate(meta["samples"])]
    whole = {**DEFAULTS, **input_sample}
    if whole["metadata"] is None:
        whole["metadata"] = {}
    if wires:
        _check_defaults(whole)
    return {
        "samples": [_overlay(whole, wire) for wire in wires],
        "session_metadata": meta["session_metadata"],
        "empty_reason": meta["empty_reason"],
    }


def _read_safetensors(payload: bytes) -> Tensors:
    if len(payload) < 8:
        raise Fault("safetensors")
    (size,) = struct.unpack("<Q", payload[:8])
    if size > len(payload) - 8:
        raise Fault("safetensors")
    try:
        header = json.loads(payload[8 : 8 + size].decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Fault("safetensors") from error
    if not isinstance(header, dict):
        raise Fault("safetensors")
    data = payload[8 + size :]
    tensors: Tensors = {}
    for name, info in header.items():
        if name != "__metadata__":
            tensors[name] = _read_tensor(info, data)
        elif not isinstance(info, dict) or not all(isinstance(text, str) for text in info.values()):
            raise Fault("safetensors", name)
    end = 0
    for start, stop in sorted(tensor["offsets"] for tensor in tensors.values()):
        if start != end:
            raise Fault("safetensors")
        end = stop
    if end != len(data):
        raise Fault("safetensors")
    return tensors


def _read_tensor(info: Any, data: bytes) -> dict[str, Any]:
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise Fault("safetensors")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if dtype not in WIDTHS or not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise Fault("safetensors")
    size = WIDTHS[dtype]
    largest = WIDTHS[dtype]
    for dimension in shape:
        size *= dimension
        largest *= max(1, dimension)
    if largest >= 2**63:  # No reader can make an array of this shape, not even an empty one.
        raise Fault("safetensors")
    if offsets[1] - offsets[0] != size or offsets[1] > len(data):
        raise Fault("safetensors")
    return {"dtype": dtype, "shape": shape, "raw": data[offsets[0] : offsets[1]], "offsets": offsets}


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(is_integer(item) and item >= 0 for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def _no_constant(word: str) -> Any:
    raise ValueError(word)


def _read_meta(tensors: Tensors) -> dict[str, Any]:
    if META not in tensors:
        raise Fault(META)
    if tensors[META]["dtype"] != "U8" or len(tensors[META]["shape"]) != 1:
        raise Fault(META)
    try:
        meta = json.loads(tensors[META]["raw"].decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Fault(META) from error
    if not isinstance(meta, dict):
        raise Fault(META)
    for key in ("samples", "session_metadata", "empty_reason"):
        if key not in meta:
            raise Fault(META, key)
    if not isinstance(meta["samples"], list):
        raise Fault(META, "samples")
    if not isinstance(meta["session_metadata"], dict):
        raise Fault(META, "session_metadata")
    if meta["empty_reason"] not in EMPTY_REASONS:
        raise Fault(META, "empty_reason", meta["empty_reason"])
    return meta


def _check_entry(entry: Any, fields: list[str], i: int) -> None:
    if not isinstance(entry, dict):
        raise Fault(i)
    for field in [*fields, "nulls"]:
        if field not in entry:
            raise Fault(i, field)
    cache = entry["prefix_cache_info"]
    right = {
        "response": isinstance(entry["response"], str),
        "response_length": is_integer(entry["response_length"]) and entry["response_length"] >= 0,
        "status": isinstance(entry["status"], str) and entry["status"] in STATUSES,
        "weight_versions": isinstance(entry["weight_versions"], list)
        and all(isinstance(version, str) for version in entry["weight_versions"]),
        "prefix_cache_info": isinstance(cache, dict) and all(is_integer(cache.get(key)) for key in ZERO_CACHE),
        "metadata": isinstance(entry["metadata"], dict),
        "nulls": isinstance(entry["nulls"], list),
    }
    for field, is_right in right.items():
        if not is_right:
            raise Fault(i, field, entry[field])
    for field in entry["nulls"]:
        if field not in list(TENSORS):
            raise Fault(i, "nulls", field)


def _check_names(tensors: Tensors, entries: list[dict[str, Any]]) -> None:
    promised = {f"{field}.{i}" for i, entry in enumerate(entries) for field in TENSORS if field not in entry["nulls"]}
    for name in promised:
        if name not in tensors:
            raise Fault(name)
    for name in tensors:
        if name != META and name not in promised:
            raise Fault(name)


def _wire_sample(entry: dict[str, Any], tensors: Tensors, fields: list[str], i: int) -> dict[str, Any]:
    wire = {field: entry[field] for field in fields}
    wire["prefix_cache_info"] = {key: entry["prefix_cache_info"][key] for key in ZERO_CACHE}
    for field in TENSORS:
        if field in entry["nulls"]:
            wire[field] = [] if field == "tokens" else None
        else:
            wire[field] = _value(tensors[f"{field}.{i}"], field, i)
    length = wire["response_length"]
    for field in ("loss_mask", "rollout_log_probs"):
        if wire[field] is not None and len(wire[field]) != length:
            raise Fault(i, field, len(wire[field]), "response_length", length)
    if length > len(wire["tokens"]):
        raise Fault(i, "response_length", length, len(wire["tokens"]))
    return wire


def _value(tensor: dict[str, Any], field: str, i: int) -> Any:
    dtype, rank, strict = TENSORS[field]
    if tensor["dtype"] != dtype or len(tensor["shape"]) != rank:
        raise Fault(i, field)
    code = CODES[dtype]
    flat = list(struct.unpack(f"<{len(tensor['raw']) // struct.calcsize(code)}{code}", tensor["raw"]))
    if strict:
        return {"dtype": "int32", "shape": tensor["shape"], "data": flat}
    return [log_prob_word(value) for value in flat] if dtype == "F64" else flat


def _check_defaults(whole: dict[str, Any]) -> None:
    needed: dict[str, Any] = {
        "weight_versions": [],
        "prefix_cache_info": ZERO_CACHE,
        "spec_info": ZERO_SPEC,
        "teacher_log_probs": None,
        "opd_reverse_kl": None,
    }
    for field, default in needed.items():
        if not same(whole[field], default):
            raise Fault(field, whole[field])
    if not isinstance(whole["metadata"], dict):
        raise Fault("metadata", whole["metadata"])
    if "opd_student_top_logprobs" in whole["metadata"]:
        raise Fault("opd_student_top_logprobs")


def _overlay(whole: dict[str, Any], wire: dict[str, Any]) -> dict[str, Any]:
    sample = copy.deepcopy(whole)
    for field, value in wire.items():
        if field == "metadata":
            sample["metadata"].update(value)
        elif field != "reward" or value is not None:
            sample[field] = value
    return sample
