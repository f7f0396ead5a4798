"""Replay payloads: base64 of little-endian int32 rows (pipeline.md, compute and "Additional replay rows")."""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Any

from .values import Fault, is_integer

Rows = dict[str, Any]  # {"layers": int, "topk": int, "rows": [[int] * layers * topk, ...]}


def decode_rows(payload: Any, field: str, count: int, layers: int, topk: int) -> Rows:
    """``count`` rows out of a payload; ``topk`` 0 means that it is recovered from the size."""
    raw = _raw_bytes(payload, field)
    _check_row(field, layers, topk)
    if count <= 0:
        if raw:
            raise Fault(field, "0 rows are due", len(raw))
        return {"layers": layers, "topk": topk, "rows": []}
    width = topk if topk else len(raw) // (4 * count * layers)
    if width < 1 or len(raw) != 4 * count * layers * width:
        raise Fault(field, len(raw), count, layers, topk)
    flat = list(struct.unpack(f"<{len(raw) // 4}i", raw))
    step = layers * width
    rows = [flat[start : start + step] for start in range(0, len(flat), step)]
    return {"layers": layers, "topk": width, "rows": rows}


def _check_row(field: str, layers: int, topk: int) -> None:
    if layers < 1 or 4 * layers * max(1, topk) >= 2**63:  # no array has such a shape, not even one without rows
        raise Fault(field, "num_layers", layers)


def _raw_bytes(payload: Any, field: str) -> bytes:
    if not isinstance(payload, str):
        raise Fault(field, "not base64 text", payload)
    try:
        return base64.b64decode(payload.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise Fault(field, "not base64", payload) from error


def check_same_topk(turns: list[dict[str, Any]], field: str) -> None:
    """Every turn of a chain whose payload had rows must agree on topk, also where a trim left none of them."""
    seen = {turn[field]["topk"] for turn in turns if turn[field] is not None and turn[field]["topk"]}
    if len(seen) > 1:
        raise Fault(field, *sorted(seen))


def cut_rows(value: Rows | None, amount: int) -> Rows | None:
    """The same rows without the last ``amount``."""
    if value is None:
        return None
    return {**value, "rows": value["rows"][: max(0, len(value["rows"]) - amount)]}


def as_array(value: Rows | None) -> dict[str, Any] | None:
    """The array as a case writes it."""
    if value is None:
        return None
    data = [item for row in value["rows"] for item in row]
    return {"dtype": "int32", "shape": [len(value["rows"]), value["layers"], value["topk"]], "data": data}


def additional_rows(records: list[dict[str, Any]], config: dict[str, Any], tokens: int) -> Rows | None:
    """The folded sample's rows, put together from each record's new rows (pipeline.md, "Additional replay rows")."""
    payloads = [_meta(record).get("routed_experts") for record in records]
    if all(payload is None for payload in payloads):
        return None
    spans = _check_spans(records, payloads)
    layers, topk = config["num_layers"], config["moe_router_topk"]
    _check_row("routed_experts", layers, topk)
    needed = max(0, tokens - 1)
    rows: list[list[int]] = []
    for (start, end), payload in zip(spans, payloads, strict=True):
        if start >= needed or end == start:
            continue
        patch = decode_rows(payload, "routed_experts", end - start, layers, topk)
        topk = patch["topk"]
        rows += patch["rows"]
    if len(rows) < needed:
        raise Fault("routed_experts", needed, len(rows))
    return {"layers": layers, "topk": topk, "rows": rows[:needed]}


def _check_spans(records: list[dict[str, Any]], payloads: list[Any]) -> list[tuple[int, int]]:
    spans = []
    covered = 0
    for record, payload in zip(records, payloads, strict=True):
        start = record["request"].get("routed_experts_start_len")
        if not is_integer(start):
            raise Fault("routed_experts_start_len", start)
        if start != covered:
            raise Fault("routed_experts_start_len", start, covered)
        end = len(record["request"]["input_ids"]) + len(_meta(record)["output_token_logprobs"]) - 1
        if end < start:
            raise Fault("routed_experts_start_len", start, end)
        if (payload is not None) != (end > start):
            raise Fault("routed_experts", start, end)
        spans.append((start, end))
        covered = end
    return spans


def _meta(record: dict[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = record["response"]["choices"][0]["meta_info"]
    return meta
