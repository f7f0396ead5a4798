"""Random forests: what must hold of every session's samples, whatever its retries, branches, trims and budgets.

A session is made as a server would make it: each turn's prompt goes on from its parent's tokens, perhaps less the last
one or two, which the next turn's template rendered itself (tokens.md, max_trim_tokens). All values are exact.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from miles_ref.plugins import Assembly, Pipeline
from miles_ref.testing.cases import Case, parse_case
from miles_ref.testing.kinds.assemble import assemble

MAX_NODES = 40
MAX_TRIM = 2
Trained = Counter[tuple[int, int]]


@dataclass
class Shape:
    """How one turn comes about: after which node, what it trims, adds and says, and how it ends."""

    parent: int
    trim: int
    observation: int
    output: int
    finish_reason: str


SHAPES = st.lists(
    st.builds(
        Shape,
        parent=st.integers(-1, MAX_NODES),
        trim=st.integers(0, MAX_TRIM),
        observation=st.integers(1, 3),
        output=st.integers(1, 4),
        finish_reason=st.sampled_from(["stop", "stop", "stop", "tool_calls", "length"]),
    ),
    min_size=1,
    max_size=MAX_NODES,
)


def nodes_of(shapes: list[Shape]) -> list[dict[str, Any]]:
    """The forest in commit order. Every new token is told from all others, so that what is lost or repeated shows."""
    nodes: list[dict[str, Any]] = []
    fresh = iter(range(256, 1_000_000))
    for at, shape in enumerate(shapes):
        parent = None if shape.parent < 0 or not nodes else shape.parent % len(nodes)
        if parent is not None and nodes[parent]["record"]["response"]["choices"][0]["finish_reason"] == "length":
            parent = None  # a server answers 409; the agent starts again
        before = [] if parent is None else nodes[parent]["token_ids"]
        if parent is not None:
            before = before[: len(before) - min(shape.trim, len(completion_of(nodes[parent])))]
        prompt = before + [next(fresh) for _ in range(shape.observation)]
        output = [next(fresh) for _ in range(shape.output)]
        meta = {"output_token_logprobs": [[-token / 1024, token] for token in output]}
        choice = {"message": {}, "finish_reason": shape.finish_reason, "meta_info": meta}
        nodes.append(
            {
                "parent": parent,
                "messages": [],
                "token_ids": prompt + output,
                "record": {
                    "timestamp": 100.0 + at,
                    "request_timestamp": None,
                    "request": {"input_ids": prompt, "messages": []},
                    "response": {"id": f"r{at}", "choices": [choice]},
                },
            }
        )
    return nodes


def session(nodes: list[dict[str, Any]], max_seq_len: int | None, agent: Any = None) -> Case:
    given = {"nodes": nodes, "max_seq_len": max_seq_len, "agent": agent}
    config = {"max_trim_tokens": MAX_TRIM}
    expect = {"samples": [], "empty_reason": None}
    return parse_case(
        {"id": "forest", "kind": "assemble", "version": "v2", "config": config, "input": given, "expect": expect}
    )


def assembled(case: Case, picker: str = "drop-retries") -> Assembly:
    """With a picker that never refuses; the guard of the default one is the corpus' matter."""
    return assemble(case, Pipeline("v2", picker=picker))


def completion_of(node: dict[str, Any]) -> dict[int, int]:
    """Position in the sequence -> token, of what the node's call generated."""
    start = len(node["record"]["request"]["input_ids"])
    return dict(enumerate(node["token_ids"][start:], start))


def kept_of(nodes: list[dict[str, Any]], sample: Any) -> set[tuple[int, int]]:
    """(node, position) of the generated tokens that a sample's chain kept: those that still stand in its tokens."""
    tokens = [int(token) for token in sample.tokens]
    return {
        (node_id, position)
        for node_id in sample.metadata["leaf"]["path_node_ids"]
        for position, token in completion_of(nodes[node_id]).items()
        if position < len(tokens) and tokens[position] == token
    }


def trained_by(nodes: list[dict[str, Any]], sample: Any) -> Trained:
    """How often the sample's mask trains each (node, position); every trained token must be some node's own."""
    start = len(sample.tokens) - sample.response_length
    owners = {token: node_id for node_id, node in enumerate(nodes) for token in completion_of(node).values()}
    positions = [start + at for at, mask in enumerate(sample.loss_mask) if mask]
    return Counter((owners[int(sample.tokens[position])], position) for position in positions)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(SHAPES, st.none() | st.integers(1, 60), st.sampled_from(["drop-retries", "keep-all", "longest"]))
@example([Shape(-1, 0, 1, 3, "stop"), Shape(0, 2, 1, 2, "stop"), Shape(0, 2, 1, 2, "stop")], None, "keep-all")
def test_every_kept_token_of_a_surviving_path_is_trained_exactly_once(
    shapes: list[Shape], budget: int | None, picker: str
) -> None:
    nodes = nodes_of(shapes)
    samples = assembled(session(nodes, budget), picker).samples
    trained: Trained = Counter()
    for sample in samples:
        trained += trained_by(nodes, sample)
    assert trained == Counter(set().union(*(kept_of(nodes, sample) for sample in samples)))


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(SHAPES, st.none() | st.integers(1, 60))
def test_masks_log_probs_and_tokens_belong_together(shapes: list[Shape], budget: int | None) -> None:
    nodes = nodes_of(shapes)
    result = assembled(session(nodes, budget), "keep-all")
    assert (result.empty_reason is None) == bool(result.samples)
    for sample in result.samples:
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length <= len(sample.tokens)
        assert budget is None or len(sample.tokens) <= budget
        leaf = nodes[sample.metadata["leaf"]["node_id"]]
        assert sample.metadata["accumulated_token_ids"].tolist() == leaf["token_ids"]
        response = np.asarray(sample.tokens)[len(sample.tokens) - sample.response_length :]
        for token, mask, log_prob in zip(response, sample.loss_mask, sample.rollout_log_probs, strict=True):
            assert log_prob in ((-token / 1024,) if mask else (-token / 1024, 0.0))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(SHAPES)
def test_no_node_is_lost(shapes: list[Shape]) -> None:
    nodes = nodes_of(shapes)
    result = assembled(session(nodes, None), "keep-all")
    described = result.session_metadata["tree"]["nodes"]
    assert [node["id"] for node in described] == list(range(len(nodes)))
    assert [node["parent"] for node in described] == [node["parent"] for node in nodes]
    paths = [sample.metadata["leaf"]["path_node_ids"] for sample in result.samples]
    assert {node_id for path in paths for node_id in path} == set(range(len(nodes)))


def shuffled_keys(value: Any) -> Any:
    """The same JSON with every object's keys the other way round."""
    if isinstance(value, dict):
        return {key: shuffled_keys(member) for key, member in reversed(value.items())}
    return [shuffled_keys(member) for member in value] if isinstance(value, list) else value


def later(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same forest, recorded at another time, its clock running backwards."""
    return [node | {"record": node["record"] | {"timestamp": 9e8 - at}} for at, node in enumerate(nodes)]


def without_times(samples: list[Any]) -> list[Any]:
    plain = []
    for sample in samples:
        metadata = {key: value for key, value in sample.metadata.items() if key != "lifecycle"}
        metadata["accumulated_token_ids"] = metadata["accumulated_token_ids"].tolist()
        values = (np.asarray(getattr(sample, name)).tolist() for name in ("tokens", "loss_mask", "rollout_log_probs"))
        plain.append([*values, sample.response, str(sample.status), sample.reward, metadata])
    return plain


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(SHAPES, st.none() | st.integers(1, 60))
def test_neither_the_order_of_keys_nor_the_clock_decides_anything(shapes: list[Shape], budget: int | None) -> None:
    nodes = nodes_of(shapes)
    agent = {"rewards": {f"r{at}": at / 4 for at in range(0, len(nodes), 2)}, "b": 1, "a": [2]}
    samples = assembled(session(nodes, budget, agent)).samples
    again = assembled(session(shuffled_keys(nodes), budget, shuffled_keys(agent))).samples
    at_another_time = assembled(session(later(nodes), budget, agent)).samples
    assert without_times(samples) == without_times(again) == without_times(at_another_time)


SEEDED = """
import hashlib, json, sys
from miles_ref.plugins import Pipeline
from miles_ref.testing.cases import parse_case
from miles_ref.testing.kinds.assemble import assemble
pipeline = Pipeline("v2", picker="drop-retries")
print(hashlib.sha256(pipeline.encode(assemble(parse_case(json.load(sys.stdin)), pipeline))).hexdigest())
"""


def test_the_hash_seed_decides_nothing() -> None:
    shapes = [Shape(at // 2 - 1, at % 3, 1 + at % 3, 1 + at % 4, "stop") for at in range(20)]
    raw = json.dumps(session(nodes_of(shapes), 30, {"rewards": {"r1": 1}, "x": {"b": 1, "a": 2}}).raw)
    digests = set()
    for seed in ("0", "1", "4242"):
        run = subprocess.run(
            [sys.executable, "-c", SEEDED],
            input=raw,
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            timeout=60,
        )
        digests.add(run.stdout)
    assert len(digests) == 1
