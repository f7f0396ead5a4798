"""Each stage alone: compute to encode, decode, pick and merge by the number of leaves, matching, rendering."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.conftest import sizes
from bench.episode import timed
from miles_ref.assembly.merge import merge
from miles_ref.assembly.pick import pick
from miles_ref.plugins import Assembly, Pipeline
from miles_ref.records import AssemblySettings, Chain, Leaf, Payload, Record
from miles_ref.sample import Sample
from miles_ref.tokens.families import get_family
from miles_ref.tokens.matching import get_matcher
from miles_ref.tokens.rendering import Renderer
from miles_ref.tokens.tokenizer import Tokenizer
from miles_ref.wire import SAMPLES_VALUE_SPEC, decode_samples_and_merge_input_sample

OBSERVED, GENERATED = 400, 200
LAYERS, TOPK = 8, 32
LINEAR = Pipeline("v1")


def linear_chain(turns: int, rows: bool = False) -> Chain:
    """Records as a server stores them: deltas, with replay rows that share their beginning."""
    rng = np.random.default_rng(turns)
    records: list[Record] = []
    payload: Payload | None = None
    end = 0
    for turn in range(turns):
        if rows:
            new = rng.integers(0, 128, (OBSERVED + GENERATED - (turn == 0)) * LAYERS * TOPK, dtype=np.int32).tobytes()
            payload = Payload(new, payload, 0 if payload is None else payload.size)
        records.append(
            Record(
                shared=end,
                prompt_tail=rng.integers(0, 2000, OBSERVED),
                output_ids=rng.integers(0, 2000, GENERATED),
                log_probs=-rng.random(GENERATED),
                finish_reason="stop",
                timestamp=float(turn + 1),
                routed_experts=payload,
                prompt_tail_text="o" * OBSERVED,
                output_text="g" * GENERATED,
            )
        )
        end += OBSERVED + GENERATED
    chain = Chain(records, None)
    return Chain(records, chain.tokens(turns - 1))


def settings(tokenizer: Tokenizer, rows: bool = False) -> AssemblySettings:
    return AssemblySettings(tokenizer.decode, num_layers=LAYERS, moe_router_topk=TOPK, routed_experts=rows)


def collect(chain: Chain, config: AssemblySettings) -> bytes:
    """Assemble and encode, from the stored deltas to the payload."""
    fresh = Chain(chain.records, chain.accumulated)
    return LINEAR.collect([fresh], {"accumulated_token_ids": chain.accumulated}, None, config)


@pytest.mark.parametrize("turns", sizes(16, 64, 128, 256))
@pytest.mark.parametrize("rows", [False, True], ids=["plain", "replay"])
def test_assemble_and_encode(benchmark: Any, tokenizer: Tokenizer, turns: int, rows: bool) -> None:
    """In one process; `memcpy` is how long a copy of the payload takes, in the same run."""
    chain, config = linear_chain(turns, rows), settings(tokenizer, rows)
    payload = collect(chain, config)
    reply = decode_samples_and_merge_input_sample(payload, Sample(), fields=SAMPLES_VALUE_SPEC)
    assert len(reply.samples[0].tokens) == turns * (OBSERVED + GENERATED)
    assert sum(reply.samples[0].loss_mask) == turns * GENERATED
    benchmark.group = f"assemble + encode, {'replay' if rows else 'plain'}"
    benchmark.pedantic(lambda: collect(chain, config), rounds=7, warmup_rounds=1)
    note_memcpy(benchmark, payload)


@pytest.mark.parametrize("turns", sizes(16, 64, 128, 256))
@pytest.mark.parametrize("rows", [False, True], ids=["plain", "replay"])
def test_decode(benchmark: Any, tokenizer: Tokenizer, turns: int, rows: bool) -> None:
    payload = collect(linear_chain(turns, rows), settings(tokenizer, rows))

    def decode() -> Any:
        return decode_samples_and_merge_input_sample(payload, Sample(), fields=SAMPLES_VALUE_SPEC)

    assert decode().samples[0].response_length == turns * (OBSERVED + GENERATED) - OBSERVED
    benchmark.group = f"decode, {'replay' if rows else 'plain'}"
    benchmark.pedantic(decode, rounds=7, warmup_rounds=1)
    note_memcpy(benchmark, payload)


def note_memcpy(benchmark: Any, payload: bytes) -> None:
    """How many copies of the payload the bench takes, both measured in this run."""
    seconds, _ = timed(lambda: bytearray(payload), rounds=15)
    benchmark.extra_info.update(
        bench="stage", payload_mb=len(payload) / 1e6, memcpies=benchmark.stats.stats.median / seconds
    )


def star(leaves: int) -> tuple[list[Sample], dict[str, Any]]:
    """One root with `leaves` children, folded: what pick and merge are given."""
    rng = np.random.default_rng(leaves)
    root = Record(
        0, rng.integers(0, 2000, OBSERVED), rng.integers(0, 2000, GENERATED), -rng.random(GENERATED), "stop", 1.0
    )
    pipeline = Pipeline("v2", picker="keep-all")
    nodes = [node(0, None, root)]
    chains = []
    for seq in range(1, leaves + 1):
        child = Record(
            root.end,
            rng.integers(0, 2000, OBSERVED),
            rng.integers(0, 2000, GENERATED),
            -rng.random(GENERATED),
            "stop",
            2.0,
        )
        nodes.append(node(seq, 0, child))
        lone = Chain([root, child], None)
        chains.append(Chain([root, child], lone.tokens(1), Leaf(seq, 0, (0, seq), f"r{seq}")))
    tree = {"nodes": nodes, "leaves": [{"node_id": seq, "path_node_ids": [0, seq]} for seq in range(1, leaves + 1)]}
    config = AssemblySettings(lambda ids: "")
    return pipeline.assemble(chains, {"tree": tree}, None, config).samples, {"tree": tree}


def node(seq: int, parent: int | None, record: Record) -> dict[str, Any]:
    return {
        "id": seq, "parent": parent, "seq": seq, "truncated": False, "committed_at": record.timestamp,
        "completion_span": [record.start, record.end], "num_tokens": record.end, "response_id": f"r{seq}",
    }  # fmt: skip


@pytest.mark.parametrize("leaves", sizes(1, 16, 256, 1024))
@pytest.mark.parametrize("stage", ["pick", "merge", "encode"])
def test_leaves(benchmark: Any, stage: str, leaves: int) -> None:
    samples, session_metadata = star(leaves)
    assert len(samples) == leaves
    trained = sum(int(np.sum(sample.loss_mask)) for sample in samples)
    assert trained == GENERATED * (leaves + 1)  # the root's completion is trained in one of them only
    pipeline = Pipeline("v2")
    work = {
        "pick": lambda: pick(samples, session_metadata),
        "merge": lambda: merge(samples, session_metadata),
        "encode": lambda: pipeline.encode(Assembly(samples, session_metadata, None)),
    }[stage]
    benchmark.group = f"{stage} by leaves"
    benchmark.extra_info.update(bench="leaves", leaves=leaves)
    benchmark.pedantic(work, rounds=5, warmup_rounds=1)


def conversation(turns: int) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1 + 2"}'}}
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn} some tool output with words and 123 numbers, " * 8})
        messages.append({"role": "assistant", "content": "word " * 100, "tool_calls": [call]})
    return messages


@pytest.mark.parametrize("matcher", ["strict", "loose_tool_call", "role_content_only"])
def test_matching(benchmark: Any, matcher: str) -> None:
    """256 stored messages against a replay whose objects are others."""
    stored, replayed, match = conversation(128), conversation(128), get_matcher(matcher)

    def run() -> bool:
        return all(match(a, b) for a, b in zip(stored, replayed, strict=True))

    assert run()
    benchmark.group = "match 256 messages"
    benchmark.extra_info.update(bench="matching", matcher=matcher)
    benchmark.pedantic(run, rounds=10, warmup_rounds=1)


@pytest.mark.parametrize("depth", sizes(1, 64, 256))
def test_rendering(benchmark: Any, tokenizer: Tokenizer, depth: int) -> None:
    """The suffix of one turn: its cost must not depend on how deep the session is."""
    renderer = Renderer(tokenizer, get_family("qwen3"), None, None)
    kwargs = renderer.merge_kwargs(None)
    messages = conversation(depth)
    snapshot = renderer.first(messages, None, kwargs)
    appended = [{"role": "user", "content": "and now? " * 100}]
    extension = renderer.extend(snapshot, messages[-1], appended, None, kwargs)
    assert extension.kept <= len(snapshot)
    assert len(extension.tail) > 100
    benchmark.group = "render a turn's suffix"
    benchmark.extra_info.update(bench="rendering", depth=depth)
    benchmark.pedantic(
        lambda: renderer.extend(snapshot, messages[-1], appended, None, kwargs), rounds=30, warmup_rounds=3
    )
