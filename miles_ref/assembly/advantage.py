"""The tree-advantage merger: what a leaf is worth, spread over the nodes that it shares (pipeline.md, v2: merge)."""

from __future__ import annotations

from typing import Any

from miles_ref.assembly.merge import own_once, with_layers
from miles_ref.assembly.pick import leaf_id
from miles_ref.assembly.pickers import leaf_rewards
from miles_ref.sample import Sample

KEY = "tree_advantage"


def tree_advantage(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Rewards become advantages within the session, and the best leaf owns what leaves share.

    A leaf's advantage is its reward less the mean reward of the survivors that have one; it becomes the sample's
    reward, and a leaf without a reward gets none. A node's advantage is the mean over the rated leaves below it. Each
    sample's `metadata.tree_advantage` is `{advantage, nodes: {node id: advantage}}`, so that a driver can credit each
    completion by its node. Shared completions are trained in the leaf with the highest reward, the first committed of
    equals. Raises AssemblyError where no leaf has a reward, or one is no number.
    """
    rewards = leaf_rewards(leaf_samples, session_metadata)
    mean = sum(rewards.values()) / len(rewards)
    advantages = {node_id: reward - mean for node_id, reward in rewards.items()}
    by_node = _node_advantages(leaf_samples, advantages)
    lowest = min(advantages.values())
    own_once(
        sorted(leaf_samples, key=lambda one: (-advantages.get(leaf_id(one), lowest), leaf_id(one))),
        session_metadata["tree"],
    )
    for sample in with_layers(leaf_samples, session_metadata):
        advantage = advantages.get(leaf_id(sample))
        path = sample.metadata["leaf"]["path_node_ids"]
        sample.reward = advantage
        sample.metadata[KEY] = {
            "advantage": advantage,
            "nodes": {str(node_id): by_node[node_id] for node_id in path if node_id in by_node},
        }
    return leaf_samples


def _node_advantages(leaf_samples: list[Sample], advantages: dict[int, float]) -> dict[int, float]:
    below: dict[int, list[float]] = {}
    for sample in leaf_samples:
        if leaf_id(sample) in advantages:
            for node_id in sample.metadata["leaf"]["path_node_ids"]:
                below.setdefault(node_id, []).append(advantages[leaf_id(sample)])
    return {node_id: sum(values) / len(values) for node_id, values in below.items()}
