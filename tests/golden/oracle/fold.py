"""turns of one chain -> one leaf sample (pipeline.md, fold)."""

from __future__ import annotations

from typing import Any

from .replay import additional_rows
from .values import Fault, decode_tokens, same

SET_ASIDE = ("lifecycle", "messages", "opd_student_top_logprobs")


def fold_turns(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins from the first turn on, until a turn may not be continued.

    ``spans`` holds, for each joined turn in order, where its kept output lies in tokens: (start, end).
    """
    folded = dict(turns[0])
    folded["spans"] = [_span(turns[0])]
    for turn in turns[1:]:
        if folded["status"] != "completed" or _loses_rows(folded, turn):
            break
        folded = _join(folded, turn)
    return folded


def fold_chain(turns: list[dict[str, Any]], records: list[dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    """The fold, and the additional rows where the server asked for these only."""
    folded = fold_turns(turns)
    if config["routed_experts"] and config["additional_r3"]:
        folded["routed_experts"] = additional_rows(records, config, len(folded["tokens"]))
    return folded


def _span(turn: dict[str, Any]) -> tuple[int, int]:
    end = len(turn["tokens"])
    return (end - turn["response_length"], end)


def _loses_rows(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return any(left[field] is not None and right[field] is None for field in ("routed_experts", "indexer_topk"))


def _join(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    length = len(left["tokens"])
    if right["tokens"][:length] != left["tokens"]:
        raise Fault("prefix", length, len(right["tokens"]))
    seen = len(right["tokens"]) - length - right["response_length"]
    if seen <= 0:
        raise Fault("observation", seen)
    observation = right["tokens"][length : length + seen]
    return {
        **right,
        "response": left["response"] + decode_tokens(observation) + right["response"],
        "response_length": left["response_length"] + seen + right["response_length"],
        "loss_mask": left["loss_mask"] + [0] * seen + right["loss_mask"],
        "rollout_log_probs": left["rollout_log_probs"] + [0.0] * seen + right["rollout_log_probs"],
        "weight_versions": left["weight_versions"] + right["weight_versions"],
        "prefix_cache_info": _add(left["prefix_cache_info"], right["prefix_cache_info"]),
        "spec_info": _add(left["spec_info"], right["spec_info"]),
        "metadata": _join_metadata(left["metadata"], right["metadata"]),
        "spans": [*left["spans"], _span(right)],
    }


def _add(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    return {key: left[key] + right[key] for key in left}


def _join_metadata(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    common_left = {key: value for key, value in left.items() if key not in SET_ASIDE}
    common_right = {key: value for key, value in right.items() if key not in SET_ASIDE}
    if not same(common_left, common_right):
        raise Fault("metadata", common_left, common_right)
    joined = dict(right)
    segments = left["lifecycle"] if isinstance(left["lifecycle"], list) else [left["lifecycle"]]
    joined["lifecycle"] = [*segments, right["lifecycle"]]
    return joined
