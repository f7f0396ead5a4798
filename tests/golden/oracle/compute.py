"""records -> turns (pipeline.md, compute)."""

from __future__ import annotations

import math
from typing import Any

from .replay import check_same_topk, cut_rows, decode_rows
from .values import Fault, decode_tokens, is_integer, is_number, log_prob_value

STATUSES = {"stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted"}
SPEC_KEYS = {
    "spec_accept_token_num": "spec_accept_token_num",
    "spec_draft_token_num": "spec_draft_token_num",
    "spec_verify_ct": "spec_verify_ct",
    "completion_token_num": "completion_tokens",
}


def compute_turns(
    records: list[dict[str, Any]], accumulated: list[int] | None, config: dict[str, Any]
) -> list[dict[str, Any]]:
    """One turn for each record of a chain."""
    turns = []
    for i in range(len(records)):
        previous = records[i - 1] if i > 0 else None
        turns.append(_turn(records[i], previous, i, i == len(records) - 1, accumulated, config))
    check_same_topk(turns, "routed_experts")
    check_same_topk(turns, "indexer_topk")
    return turns


def _turn(
    record: dict[str, Any],
    previous: dict[str, Any] | None,
    i: int,
    is_last: bool,
    accumulated: list[int] | None,
    config: dict[str, Any],
) -> dict[str, Any]:
    prompt = _prompt(record)
    choice = _choice(record)
    meta = choice["meta_info"]
    pairs = meta.get("output_token_logprobs")
    if not isinstance(pairs, list):
        raise Fault("output_token_logprobs", pairs)
    output = [pair[1] for pair in pairs]
    log_probs = [_log_prob(pair[0]) for pair in pairs]
    trim = _trim(prompt, output, accumulated, is_last, config["max_trim_tokens"])
    kept = len(output) - trim
    metadata: dict[str, Any] = {"lifecycle": _lifecycle(record, previous, meta, i)}
    turn: dict[str, Any] = {
        "tokens": prompt + output[:kept],
        "response": decode_tokens(output[:kept]),
        "response_length": kept,
        "loss_mask": [1] * kept,
        "rollout_log_probs": log_probs[:kept],
        "status": _status(choice.get("finish_reason")),
        "weight_versions": _weight_versions(meta.get("weight_version")),
        "prefix_cache_info": {
            "cached_tokens": meta.get("cached_tokens") or 0,
            "total_prompt_tokens": meta.get("prompt_tokens") or 0,
        },
        "spec_info": {name: (meta.get(key) or 0) if config["speculative"] else 0 for name, key in SPEC_KEYS.items()},
        "metadata": metadata,
        "output_tokens": output[:kept],
    }
    turn.update(_replay(meta, len(prompt) + len(output), trim, config))
    if is_last and config["debug_messages"]:
        metadata["messages"] = [*(record["request"].get("messages") or []), choice["message"]]
    return turn


def _prompt(record: dict[str, Any]) -> list[int]:
    prompt = record["request"].get("input_ids")
    if prompt is None:
        raise Fault("input_ids")
    return list(prompt)


def _choice(record: dict[str, Any]) -> dict[str, Any]:
    choices = record["response"].get("choices")
    if not choices:
        raise Fault("choices", choices)
    choice: dict[str, Any] = choices[0]
    if not isinstance(choice.get("meta_info"), dict):
        raise Fault("meta_info", choice.get("meta_info"))
    return choice


def _log_prob(item: Any) -> float:
    value = log_prob_value(item)
    if not is_number(value):
        raise Fault("log prob", "null" if value is None else value, value)
    if math.isnan(value) or value == math.inf:
        raise Fault("log prob", value)
    return float(value)


def _trim(prompt: list[int], output: list[int], accumulated: list[int] | None, is_last: bool, limit: int) -> int:
    if accumulated is None:
        return 0
    rest = accumulated[len(prompt) :]
    matched = 0
    while matched < len(output) and matched < len(rest) and output[matched] == rest[matched]:
        matched += 1
    trim = len(output) - matched
    allowed = 0 if is_last else limit
    if trim > allowed:
        raise Fault("trim", trim, allowed, output[matched:], rest[matched : matched + trim])
    if is_last and len(prompt) + matched != len(accumulated):
        raise Fault("accumulated", len(prompt) + matched, len(accumulated))
    return trim


def _status(finish_reason: Any) -> str:
    if not isinstance(finish_reason, str) or finish_reason not in STATUSES:
        raise Fault("finish_reason", finish_reason)
    return STATUSES[finish_reason]


def _weight_versions(version: Any) -> list[str]:
    if version is None:
        return []
    return [version if isinstance(version, str) else str(version)]


def _lifecycle(record: dict[str, Any], previous: dict[str, Any] | None, meta: dict[str, Any], i: int) -> dict[str, Any]:
    end = record["timestamp"]
    latency = meta.get("e2e_latency")
    life: dict[str, Any] = {"t0": None if latency is None else end - latency, "t1": end, "turn": i + 1}
    if record.get("request_timestamp") is not None:
        life["req_ts"] = record["request_timestamp"]
    if previous is not None:
        life["prev_t1"] = previous["timestamp"]
    return life


def _replay(meta: dict[str, Any], total: int, trim: int, config: dict[str, Any]) -> dict[str, Any]:
    experts = indexer = None
    if config["routed_experts"] and not config["additional_r3"] and meta.get("routed_experts") is not None:
        layers, topk = config["num_layers"], config["moe_router_topk"]
        experts = decode_rows(meta["routed_experts"], "routed_experts", total - 1, layers, topk)
    if config["indexer_topk"] and meta.get("indexer_topk") is not None:
        indexer_layers: Any = meta.get("indexer_topk_num_layers")
        if not is_integer(indexer_layers) or indexer_layers >= 2**31:
            raise Fault("indexer_topk_num_layers", indexer_layers)
        indexer = decode_rows(meta["indexer_topk"], "indexer_topk", total - 1, indexer_layers, 0)
    return {"routed_experts": cut_rows(experts, trim), "indexer_topk": cut_rows(indexer, trim)}
