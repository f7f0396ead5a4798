"""densest-leaf: of each tree of a session's forest, train the leaf with the largest share of generated tokens.

A leaf that spent its budget on tool output teaches little; one whose response is mostly the model's own teaches most.
Ties go to the leaf that was committed first, so the choice depends on the records alone.
"""

from __future__ import annotations

from typing import Any

from miles_ref.hookspecs import hookimpl
from miles_ref.sample import Sample


def generated_share(sample: Sample) -> float:
    """Generated tokens over response tokens, 0 to 1; an empty response has none."""
    return sum(sample.loss_mask) / sample.response_length if sample.response_length else 0.0


@hookimpl
def pick(leaf_samples: list[Sample]) -> list[Sample]:
    """The densest leaf of each root, in the order in which the roots were committed (pipeline.md, v2: pick)."""
    best: dict[int, Sample] = {}
    for sample in sorted(leaf_samples, key=node_id):
        root = sample.metadata["leaf"]["path_node_ids"][0]
        if root not in best or generated_share(sample) > generated_share(best[root]):
            best[root] = sample
    return [best[root] for root in sorted(best)]


def node_id(sample: Sample) -> Any:
    """The commit index of the leaf."""
    return sample.metadata["leaf"]["node_id"]
