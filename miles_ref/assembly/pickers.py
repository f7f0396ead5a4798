"""The pickers beside the default one: each a pure selection of leaf samples (pipeline.md, v2: pick)."""

from __future__ import annotations

import sys
from typing import Any

from miles_ref.assembly.merge import agent_metadata, rewards_of
from miles_ref.assembly.pick import Forest, leaf_id
from miles_ref.errors import AssemblyError
from miles_ref.sample import Sample


def keep_all(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Every leaf, in commit order: for forests whose branches are all wanted, such as sub-agents."""
    return list(leaf_samples)


def drop_retries(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """The default's choice without its guard, deepest leaf first; equally deep ones in commit order.

    For agents that give up long attempts on purpose, where the default refuses the session.
    """
    forest = Forest(session_metadata["tree"])
    kept = [sample for sample in leaf_samples if not forest.is_superseded(leaf_id(sample))]
    return sorted(kept, key=lambda sample: (-len(sample.metadata["leaf"]["path_node_ids"]), leaf_id(sample)))


def longest(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """The one leaf sample with the most tokens; of equally long ones the first that was committed."""
    return sorted(leaf_samples, key=lambda sample: (-len(sample.tokens), leaf_id(sample)))[:1]


def best_reward(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """The one leaf with the highest reward; of equally good ones the first that was committed.

    Raises AssemblyError where no leaf has a reward, or one has a reward that is no number.
    """
    rewards = leaf_rewards(leaf_samples, session_metadata)
    rated = [sample for sample in leaf_samples if leaf_id(sample) in rewards]
    return sorted(rated, key=lambda sample: (-rewards[leaf_id(sample)], leaf_id(sample)))[:1]


def leaf_rewards(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> dict[int, float]:
    """The reward of each leaf that has one, by node id. Raises AssemblyError where none has, or one is no number."""
    given = rewards_of(agent_metadata(session_metadata))
    rewards: dict[int, float] = {}
    for sample in leaf_samples:
        response_id = sample.metadata["leaf"]["response_id"]
        reward = given.get(response_id)
        if reward is None:
            continue
        if not _is_comparable(reward):
            raise AssemblyError(f"the reward of {response_id} is {reward!r:.80}, not a number that float64 holds")
        rewards[leaf_id(sample)] = reward
    if not rewards:
        ids = [sample.metadata["leaf"]["response_id"] for sample in leaf_samples]
        raise AssemblyError(
            f"no leaf has a reward; send metadata {{rewards: {{response_id: reward}}}} with the samples "
            f"request, for some of {ids}"
        )
    return rewards


def _is_comparable(reward: Any) -> bool:
    """Whether it is a number that a float64 can hold, and not NaN or infinite."""
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return False
    return abs(reward) <= sys.float_info.max
