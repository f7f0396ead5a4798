"""Which leaf samples survive: retry trim (pipeline.md, "v2: tree")."""

from __future__ import annotations

from typing import Any

from .values import Fault


def path_of(nodes: list[dict[str, Any]], node_id: int) -> list[int]:
    """Node ids from the root down to ``node_id``."""
    path = [node_id]
    while nodes[path[0]]["parent"] is not None:
        path.insert(0, nodes[path[0]]["parent"])
    return path


def leaves_of(nodes: list[dict[str, Any]]) -> list[int]:
    """Ids of the nodes without children, in commit order."""
    parents = [node["parent"] for node in nodes]
    return [node_id for node_id in range(len(nodes)) if node_id not in parents]


def pick_survivors(nodes: list[dict[str, Any]], candidates: list[int]) -> list[int]:
    """The leaves, of those that gave a sample, that no retry gave up."""
    return [leaf for leaf in candidates if not _given_up(nodes, leaf)]


def _given_up(nodes: list[dict[str, Any]], leaf: int) -> bool:
    parent = nodes[leaf]["parent"]
    if parent is None:
        return False
    later = [i for i in range(leaf + 1, len(nodes)) if nodes[i]["parent"] == parent]
    if not later:
        return False
    below = [other for other in leaves_of(nodes) if set(path_of(nodes, other)) & set(later)]
    longest = max(num_tokens(nodes[other]) for other in below)
    if num_tokens(nodes[leaf]) > longest:
        raise Fault(response_id(nodes[leaf]), leaf, num_tokens(nodes[leaf]), longest)
    return True


def num_tokens(node: dict[str, Any]) -> int:
    """Prompt and whole output of a node."""
    record = node["record"]
    output = record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]
    return len(record["request"]["input_ids"]) + len(output)


def response_id(node: dict[str, Any]) -> Any:
    """The id that the backend gave its reply."""
    return node["record"]["response"].get("id")
