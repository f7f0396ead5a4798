"""merge: finish the surviving samples (pipeline.md, v2: merge): exactly-once masks, rewards, metadata layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_ref.assembly.pick import leaf_id
from miles_ref.errors import AssemblyError
from miles_ref.sample import Sample

SERVER_OWNED = ("accumulated_token_ids", "tito_session_mismatch", "leaf")
"""Keys of sample metadata that an agent cannot set."""

_REWARDS = "rewards"
Mask = npt.NDArray[np.bool_]


def merge(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Train each completion in one sample only, and give each sample its reward and its metadata.

    The owner of a token is the earliest-committed surviving leaf whose chain kept it. The samples are changed and
    returned in the order given; a loss mask stays a list or an array, as it was. Raises AssemblyError for rewards that
    are no object.
    """
    own_once(sorted(leaf_samples, key=leaf_id), session_metadata["tree"])
    rewards = rewards_of(agent_metadata(session_metadata))
    for sample in with_layers(leaf_samples, session_metadata):
        response_id = sample.metadata["leaf"]["response_id"]
        if response_id in rewards:
            sample.reward = rewards[response_id]
    return leaf_samples


def with_layers(leaf_samples: list[Sample], session_metadata: Mapping[str, Any]) -> list[Sample]:
    """The samples, each with its metadata in layers: fold < agent < server-owned keys."""
    agent = agent_metadata(session_metadata)
    for sample in leaf_samples:
        sample.metadata = _layers(sample.metadata, agent)
    return leaf_samples


def agent_metadata(session_metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the driver sent with the request; empty if nothing. Raises AssemblyError if it is no object."""
    agent = session_metadata.get("agent")
    if agent is not None and not isinstance(agent, Mapping):
        raise AssemblyError(f"agent metadata is {agent!r:.80}, not an object")
    return agent or {}


def rewards_of(agent: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rewards` of the agent's metadata, by response id. Raises AssemblyError if it is no object."""
    rewards = agent.get(_REWARDS)
    if rewards is not None and not isinstance(rewards, Mapping):
        raise AssemblyError(f"agent metadata: rewards is {rewards!r:.80}, not an object {{response_id: reward}}")
    return rewards or {}


def own_once(samples: Iterable[Sample], tree: Mapping[str, Any]) -> None:
    """Mask in each sample the completion tokens that a sample before it trains: the first in order owns a token."""
    spans = {node["id"]: node["completion_span"] for node in tree["nodes"]}
    owned: dict[int, Mask] = {}
    for sample in samples:
        if sample.loss_mask is None:
            raise AssemblyError(f"leaf {leaf_id(sample)} has no loss_mask, so its completions cannot be trained once")
        mask = np.array(sample.loss_mask)
        start = len(sample.tokens) - sample.response_length
        for node_id, low, high in completion_spans(_joined(sample.metadata), spans, len(sample.tokens)):
            window = mask[max(low - start, 0) : max(high - start, 0)]
            first = max(low, start) - low  # of the span; a response that begins within it owns from there on
            trained = window != 0
            taken = owned.setdefault(node_id, np.zeros(spans[node_id][1] - low, dtype=np.bool_))
            taken = taken[first : first + len(window)]
            window[taken] = 0
            taken |= trained
        sample.loss_mask = mask.tolist() if isinstance(sample.loss_mask, list) else mask


def _joined(metadata: Mapping[str, Any]) -> Sequence[int]:
    """The nodes of the leaf's path whose turns the fold joined: a lifecycle each, where there is one at all.

    What a turn behind the end of the fold wrote anew must not be taken for what the sample holds there.
    """
    path: Sequence[int] = metadata["leaf"]["path_node_ids"]
    lifecycle = metadata.get("lifecycle")
    if isinstance(lifecycle, Mapping):
        return path[:1]
    return path[: len(lifecycle)] if isinstance(lifecycle, list) and lifecycle else path


def completion_spans(
    path: Sequence[int], spans: Mapping[int, Sequence[int]], length: int
) -> Iterator[tuple[int, int, int]]:
    """Each node of a path with the part of its completion span that lies in the sample and before the next node's."""
    for node_id, after in zip(path, [*path[1:], None], strict=True):
        low, high = spans[node_id]
        end = high if after is None else min(high, spans[after][0])
        if low < (end := min(end, length)):
            yield node_id, low, end


def _layers(metadata: Mapping[str, Any], agent: Mapping[str, Any]) -> dict[str, Any]:
    layers = {key: value for key, value in metadata.items() if key not in SERVER_OWNED}
    layers |= {key: value for key, value in agent.items() if key != _REWARDS and key not in SERVER_OWNED}
    return layers | {key: metadata[key] for key in SERVER_OWNED if key in metadata}
