"""The story of a forest: for each node, which sample trains its completion, and why leaves did not survive.

Told from a session's metadata and, if there are any, the samples of its reply (pipeline.md, v2). Pure; `miles-ref tree`
draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_ref.assembly.merge import completion_spans
from miles_ref.assembly.pick import Forest, leaf_id
from miles_ref.sample import Sample


@dataclass
class NodeStory:
    """One node. `trained` is {leaf's node id: trained tokens of this completion}; `fate` is set for leaves only."""

    node_id: int
    parent: int | None
    response_id: str | None
    prompt_tokens: int
    completion_tokens: int
    ending: str
    fate: str | None = None
    survives: bool = False
    trained: dict[int, int] = field(default_factory=dict)


def tell(
    session_metadata: Mapping[str, Any],
    samples: Sequence[Sample] | None = None,
    finish_reasons: Mapping[str, str] | None = None,
) -> list[NodeStory]:
    """The nodes of `session_metadata["tree"]` in commit order.

    Without samples the default picker and merger are assumed. `finish_reasons` by response id are used where known; the
    tree itself only knows whether a node was cut by its length.
    """
    tree = session_metadata["tree"]
    forest = Forest(tree)
    stories = {node["id"]: _story(node, finish_reasons or {}) for node in tree["nodes"]}
    paths = {leaf["node_id"]: leaf["path_node_ids"] for leaf in tree["leaves"]}
    survivors = _default_survivors(forest, paths) if samples is None else {leaf_id(sample) for sample in samples}
    for node_id in paths:
        story = stories[node_id]
        story.survives = node_id in survivors
        why_not = "" if story.survives else _why_not(forest, node_id, told_by_samples=samples is not None)
        story.fate = "survives" if story.survives else f"dropped: {why_not}"
    if samples is None:
        _credit_by_default(stories, paths, sorted(survivors))
    else:
        _credit_by_masks(stories, tree, samples)
    return list(stories.values())


def linear_metadata(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A tree for the records of a v1 session's dump: one chain."""
    nodes = []
    for at, record in enumerate(records):
        choice = record["response"]["choices"][0]
        start = len(record["request"]["input_ids"])
        end = start + len(choice["meta_info"]["output_token_logprobs"])
        nodes.append(
            {
                "id": at,
                "parent": at - 1 if at else None,
                "seq": at,
                "truncated": choice.get("finish_reason") == "length",
                "committed_at": record["timestamp"],
                "completion_span": [start, end],
                "num_tokens": end,
                "response_id": record["response"].get("id"),
            }
        )
    leaves = [{"node_id": len(nodes) - 1, "path_node_ids": list(range(len(nodes)))}] if nodes else []
    return {"tree": {"nodes": nodes, "leaves": leaves}}


def finish_reasons_of(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Finish reasons of a dump's records by response id."""
    choices = ((record["response"].get("id"), record["response"]["choices"][0]) for record in records)
    return {response_id: str(choice.get("finish_reason")) for response_id, choice in choices if response_id is not None}


def _story(node: Mapping[str, Any], finish_reasons: Mapping[str, str]) -> NodeStory:
    start, end = node["completion_span"]
    known = finish_reasons.get(node["response_id"])
    return NodeStory(
        node_id=node["id"],
        parent=node["parent"],
        response_id=node["response_id"],
        prompt_tokens=start,
        completion_tokens=end - start,
        ending=known or ("length" if node["truncated"] else "complete"),
    )


def _default_survivors(forest: Forest, leaves: Iterable[int]) -> set[int]:
    return {node_id for node_id in leaves if not forest.is_superseded(node_id)}


def _why_not(forest: Forest, node_id: int, *, told_by_samples: bool) -> str:
    if not forest.is_superseded(node_id):
        return "truncated away, or not picked"
    fate = f"given up by a retry: its sibling #{forest.later_siblings(node_id)[0]} was committed later"
    node, longest = forest.nodes[node_id], forest.longest_later(node_id)
    if node["num_tokens"] > longest and not told_by_samples:
        return f"{fate}, but it is longer ({node['num_tokens']} tokens) than what follows ({longest}): 422"
    return fate


def _credit_by_default(stories: Mapping[int, NodeStory], paths: Mapping[int, Sequence[int]], order: list[int]) -> None:
    for leaf in order:
        for node_id in paths[leaf]:
            story = stories[node_id]
            if not story.trained and story.completion_tokens:
                story.trained[leaf] = story.completion_tokens


def _credit_by_masks(stories: Mapping[int, NodeStory], tree: Mapping[str, Any], samples: Sequence[Sample]) -> None:
    spans = {node["id"]: node["completion_span"] for node in tree["nodes"]}
    for sample in samples:
        mask = np.asarray(sample.loss_mask)
        start = len(sample.tokens) - sample.response_length
        for node_id, low, high in completion_spans(sample.metadata["leaf"]["path_node_ids"], spans, len(sample.tokens)):
            count = int(np.count_nonzero(mask[max(low - start, 0) : max(high - start, 0)]))
            if count:
                stories[node_id].trained[leaf_id(sample)] = count
