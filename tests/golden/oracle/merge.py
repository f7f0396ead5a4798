"""Finishes the survivors: exactly once, rewards, metadata layers (pipeline.md, "v2: tree")."""

from __future__ import annotations

from typing import Any

from .pick import path_of, response_id

SERVER_KEYS = ("accumulated_token_ids", "tito_session_mismatch", "leaf")


def merge_samples(
    nodes: list[dict[str, Any]], survivors: list[int], samples: dict[int, dict[str, Any]], agent: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """The survivors' samples, in the survivors' order."""
    owned: set[tuple[int, int]] = set()
    masks = {leaf: _train_once(samples[leaf], path_of(nodes, leaf), owned) for leaf in sorted(survivors)}
    rewards = (agent or {}).get("rewards") or {}
    merged = []
    for leaf in survivors:
        sample = dict(samples[leaf])
        sample["loss_mask"] = masks[leaf]
        sample["reward"] = rewards.get(response_id(nodes[leaf]))
        sample["metadata"] = _layers(sample["metadata"], agent or {}, nodes, leaf)
        merged.append(sample)
    return merged


def _train_once(sample: dict[str, Any], path: list[int], owned: set[tuple[int, int]]) -> list[int]:
    """The mask without the tokens that an earlier leaf trains. A token is a node and a position in its sequence."""
    mask = list(sample["loss_mask"])
    offset = len(sample["tokens"]) - sample["response_length"]
    for node_id, (start, end) in zip(path, sample["spans"], strict=False):
        for position in range(start, end):
            if (node_id, position) in owned:
                mask[position - offset] = 0
            owned.add((node_id, position))
    return mask


def _layers(folded: dict[str, Any], agent: dict[str, Any], nodes: list[dict[str, Any]], leaf: int) -> dict[str, Any]:
    metadata = dict(folded)
    for key, value in agent.items():
        if key != "rewards" and key not in SERVER_KEYS:
            metadata[key] = value
    metadata["accumulated_token_ids"] = list(nodes[leaf]["token_ids"])
    metadata["leaf"] = {
        "node_id": leaf,
        "parent": nodes[leaf]["parent"],
        "path_node_ids": path_of(nodes, leaf),
        "response_id": response_id(nodes[leaf]),
    }
    return metadata
