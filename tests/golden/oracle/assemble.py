"""Whole cases of the kind assemble: from records, or from a forest of nodes, to the expected reply (cases.md)."""

from __future__ import annotations

from typing import Any

from .compute import compute_turns
from .fold import fold_chain
from .merge import merge_samples
from .pick import leaves_of, path_of, pick_survivors
from .replay import as_array
from .truncate import truncate_turns
from .values import log_prob_word

CONFIG = {
    "max_trim_tokens": 0,
    "num_layers": 0,
    "moe_router_topk": 0,
    "speculative": False,
    "debug_messages": False,
    "additional_r3": False,
    "routed_experts": False,
    "indexer_topk": False,
}


def assemble(case: dict[str, Any]) -> dict[str, Any]:
    """The expected reply of an assemble case, or a Fault."""
    config = {**CONFIG, **(case.get("config") or {})}
    return _assemble_tree(case["input"], config) if case["version"] == "v2" else _assemble_linear(case["input"], config)


def _assemble_linear(given: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    records = given["records"]
    if not records:
        return {"samples": [], "empty_reason": "no_records"}
    turns = compute_turns(records, given["accumulated_token_ids"], config)
    kept = truncate_turns(turns, given["max_seq_len"])
    if not kept:
        return {"samples": [], "empty_reason": "all_truncated"}
    return {"samples": [wire_sample(fold_chain(kept, records, config))], "empty_reason": None}


def _assemble_tree(given: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    nodes = given["nodes"]
    if not nodes:
        return {"samples": [], "empty_reason": "no_records"}
    chains = {leaf: [nodes[i]["record"] for i in path_of(nodes, leaf)] for leaf in leaves_of(nodes)}
    turns = {leaf: compute_turns(chain, nodes[leaf]["token_ids"], config) for leaf, chain in chains.items()}
    samples = {}
    for leaf, chain in chains.items():
        kept = truncate_turns(turns[leaf], given["max_seq_len"])
        if kept:
            samples[leaf] = fold_chain(kept, chain, config)
    survivors = pick_survivors(nodes, list(samples))
    if not survivors:
        return {"samples": [], "empty_reason": "all_truncated"}
    merged = merge_samples(nodes, survivors, samples, given.get("agent"))
    return {"samples": [wire_sample(sample) | {"reward": sample["reward"]} for sample in merged], "empty_reason": None}


def wire_sample(folded: dict[str, Any]) -> dict[str, Any]:
    """The fields of the wire table, as a case lists them."""
    return {
        "tokens": folded["tokens"],
        "response": folded["response"],
        "response_length": folded["response_length"],
        "loss_mask": folded["loss_mask"],
        "rollout_log_probs": [log_prob_word(value) for value in folded["rollout_log_probs"]],
        "rollout_routed_experts": as_array(folded["routed_experts"]),
        "rollout_indexer_topk": as_array(folded["indexer_topk"]),
        "status": folded["status"],
        "weight_versions": folded["weight_versions"],
        "prefix_cache_info": folded["prefix_cache_info"],
        "metadata": folded["metadata"],
    }
