"""pick: which leaf samples survive (pipeline.md, v2: pick). The default is the retry trim; others are beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_ref.errors import AssemblyError
from miles_ref.sample import Sample


class Forest:
    """The tree of a session's metadata: `{nodes, leaves}`, by node id, which is the commit index."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.nodes: dict[int, Mapping[str, Any]] = {node["id"]: node for node in tree["nodes"]}
        self.children: dict[int | None, list[int]] = {}
        for node_id, node in self.nodes.items():
            self.children.setdefault(node["parent"], []).append(node_id)
        self._later = self._longest_later(self._longest_below())

    def later_siblings(self, node_id: int) -> list[int]:
        """The siblings that were committed after the node; a root has none."""
        node = self.nodes[node_id]
        if node["parent"] is None:
            return []
        return [other for other in self.children[node["parent"]] if self.nodes[other]["seq"] > node["seq"]]

    def longest_later(self, node_id: int) -> int:
        """Tokens of the longest leaf at or below the node's later siblings, of which there must be one."""
        return self._later[node_id]

    def is_superseded(self, node_id: int) -> bool:
        """Whether the node is a childless leaf, not a root, with a sibling that was committed later."""
        return node_id not in self.children and node_id in self._later

    def _longest_below(self) -> dict[int, int]:
        """Node -> tokens of the longest leaf at or below it."""
        longest: dict[int, int] = {}
        for node_id in sorted(self.nodes, reverse=True):  # a child is committed after its parent
            below = [longest[child] for child in self.children.get(node_id, ())]
            longest[node_id] = max(below, default=self.nodes[node_id]["num_tokens"])
        return longest

    def _longest_later(self, longest: Mapping[int, int]) -> dict[int, int]:
        """Node -> the longest of its later siblings; a node without one, or without siblings, is not in it."""
        later: dict[int, int] = {}
        for parent, siblings in self.children.items():
            if parent is None:
                continue
            best: int | None = None
            for node_id in sorted(siblings, key=lambda one: self.nodes[one]["seq"], reverse=True):
                if best is not None:
                    later[node_id] = best
                best = max(longest[node_id], best or 0)
        return later


def leaf_id(sample: Sample) -> int:
    """The commit index of the leaf that the sample ends in."""
    node_id: int = sample.metadata["leaf"]["node_id"]
    return node_id


def pick(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Drop the leaves that a retry superseded, in the order given.

    Raises AssemblyError naming response id, seq and both lengths where a dropped leaf is longer than what superseded
    it: then the tree does not have the shape of retries, and dropping would lose training data.
    """
    forest = Forest(session_metadata["tree"])
    survivors = []
    for sample in leaf_samples:
        node_id = leaf_id(sample)
        if not forest.is_superseded(node_id):
            survivors.append(sample)
            continue
        node, longest = forest.nodes[node_id], forest.longest_later(node_id)
        if node["num_tokens"] > longest:
            raise AssemblyError(
                "pick retry-trim: the tree does not have the shape of retries: "
                f"leaf {node['response_id']} (seq {node['seq']}) has {node['num_tokens']} tokens, "
                f"more than the {longest} of the longest leaf below its later siblings; "
                "choose another picker, such as keep-all"
            )
    return survivors
