"""The plugin's rule on one small forest: two leaves that share their first completion."""

from __future__ import annotations

from typing import Any

import pytest
from miles_ref_merger_example import merge

from miles_ref.sample import Sample


def forest() -> tuple[list[Sample], dict[str, Any]]:
    spans = [(1, 3), (4, 6), (4, 8)]
    nodes = [
        {"id": i, "parent": None if i == 0 else 0, "seq": i, "truncated": False, "committed_at": float(i),
         "completion_span": list(span), "num_tokens": span[1], "response_id": f"r{i}"}
        for i, span in enumerate(spans)
    ]  # fmt: skip
    samples = []
    for node_id in (1, 2):
        length = spans[node_id][1]
        mask = [1, 1, 0] + [1] * (length - 4)
        leaf = {"node_id": node_id, "parent": 0, "path_node_ids": [0, node_id], "response_id": f"r{node_id}"}
        samples.append(
            Sample(
                tokens=list(range(length)),
                response_length=length - 1,
                loss_mask=mask,
                rollout_log_probs=[-0.5] * len(mask),
                metadata={"leaf": leaf, "accumulated_token_ids": list(range(length))},
            )
        )
    leaves = [{"node_id": i, "path_node_ids": [0, i]} for i in (1, 2)]
    return samples, {"tree": {"nodes": nodes, "leaves": leaves}, "agent": {"rewards": {"r1": 1.0, "r2": 1.0}}}


def test_rewards_are_divided_by_the_trained_tokens_and_kept_raw() -> None:
    samples, session_metadata = forest()
    first, second = merge(samples, session_metadata)
    assert [sum(first.loss_mask), sum(second.loss_mask)] == [4, 4]  # the shared completion is trained once
    assert first.reward == pytest.approx(1.0)
    assert second.metadata["raw_reward"] == 1.0


def test_a_leaf_without_a_reward_gets_none() -> None:
    samples, session_metadata = forest()
    del session_metadata["agent"]["rewards"]["r2"]
    assert merge(samples, session_metadata)[1].reward is None
