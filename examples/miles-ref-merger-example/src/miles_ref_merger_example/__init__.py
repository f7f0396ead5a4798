"""length-normalized-reward: the built-in merge, then rewards divided by how many tokens a sample trains.

Long answers collect more gradient than short ones for the same reward. Dividing by the trained tokens (relative to the
mean of the session's samples) takes that back, and `metadata` keeps the reward that the agent gave.
"""

from __future__ import annotations

from typing import Any

from miles_ref.assembly.merge import merge as merge_by_default
from miles_ref.hookspecs import hookimpl
from miles_ref.sample import Sample


@hookimpl
def merge(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Exactly-once masks and rewards as built in, then each number of a reward over its sample's trained length."""
    samples = list(merge_by_default(leaf_samples, session_metadata))
    trained = [int(sum(int(mask) for mask in sample.loss_mask)) for sample in samples]
    mean = sum(trained) / len(trained) if trained else 0.0
    for sample, count in zip(samples, trained, strict=True):
        if isinstance(sample.reward, int | float) and not isinstance(sample.reward, bool) and count:
            sample.metadata["raw_reward"] = sample.reward
            sample.reward = sample.reward * mean / count
    return samples
