"""The quadratic way, as it was done before: download every record, assemble on the driver.

Each record repeats its whole prompt, so the bytes, the parse and the per-turn samples all grow with turns x prefix.
This is what server-side assembly is measured against. It is a plain and fair implementation: orjson like the server,
lists where the driver wants lists, one sample a record, and a pairwise merge (pipeline.md, compute, truncate, fold).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

Decode = Callable[[Sequence[int]], str]


@dataclass
class TurnSample:
    """One turn on the driver: whole prompt and output as lists, replay rows int32 (tokens - 1, layers, topk)."""

    tokens: list[int]
    response: str
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float]
    status: str
    weight_versions: list[str]
    cached_tokens: int
    prompt_tokens: int
    lifecycle: list[dict[str, Any]] = field(default_factory=list)
    routed_experts: np.ndarray | None = None


STATUS = {"stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted"}


def compute(
    records: list[dict[str, Any]], accumulated: list[int], max_trim: int, decode: Decode, layers: int
) -> list[TurnSample]:
    """One sample a record, trimmed to the accumulated ids."""
    turns = []
    for i, record in enumerate(records):
        prompt = record["request"]["input_ids"]
        choice = record["response"]["choices"][0]
        meta = choice["meta_info"]
        output = [entry[1] for entry in meta["output_token_logprobs"]]
        log_probs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
        if not all(math.isfinite(value) or value == -math.inf for value in log_probs):
            raise ValueError(f"turn {i}: a log prob is not a number")
        matched = 0
        while matched < len(output) and accumulated[len(prompt) + matched : len(prompt) + matched + 1] == [
            output[matched]
        ]:
            matched += 1
        if len(output) - matched > (max_trim if i < len(records) - 1 else 0):
            raise ValueError(f"turn {i}: {len(output) - matched} tokens would be trimmed")
        tokens = prompt + output[:matched]
        rows = None
        if layers and meta.get("routed_experts") is not None:
            raw = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4")
            rows = raw.reshape(len(prompt) + len(output) - 1, layers, -1)[: len(tokens) - 1]
        latency = meta.get("e2e_latency")
        segment = {
            "t0": None if latency is None else record["timestamp"] - latency,
            "t1": record["timestamp"],
            "turn": i + 1,
        }
        if record.get("request_timestamp") is not None:
            segment["req_ts"] = record["request_timestamp"]
        if i:
            segment["prev_t1"] = records[i - 1]["timestamp"]
        turns.append(
            TurnSample(
                tokens=tokens,
                response=decode(output[:matched]),
                response_length=matched,
                loss_mask=[1] * matched,
                rollout_log_probs=log_probs[:matched],
                status=STATUS[choice["finish_reason"]],
                weight_versions=[] if meta.get("weight_version") is None else [str(meta["weight_version"])],
                cached_tokens=meta.get("cached_tokens") or 0,
                prompt_tokens=meta.get("prompt_tokens") or 0,
                lifecycle=[segment],
                routed_experts=rows,
            )
        )
    return turns


def truncate(turns: list[TurnSample], max_seq_len: int | None, decode: Decode) -> list[TurnSample]:
    """Keep the turns within the budget; cut the first that is longer."""
    if max_seq_len is None:
        return turns
    kept = []
    for turn in turns:
        over = len(turn.tokens) - max_seq_len
        if over <= 0:
            kept.append(turn)
            continue
        if turn.response_length > over:
            turn.tokens = turn.tokens[:-over]
            turn.response_length -= over
            turn.response = decode(turn.tokens[-turn.response_length :])
            turn.loss_mask = turn.loss_mask[:-over]
            turn.rollout_log_probs = turn.rollout_log_probs[:-over]
            turn.status = "truncated"
            if turn.routed_experts is not None:
                turn.routed_experts = turn.routed_experts[:-over]
            kept.append(turn)
        break
    return kept


def merge(turns: list[TurnSample], decode: Decode) -> TurnSample:
    """Join the turns pairwise, the prefix compared and copied at each step."""
    joined = turns[0]
    for turn in turns[1:]:
        if joined.status != "completed" or (joined.routed_experts is not None and turn.routed_experts is None):
            break
        if turn.tokens[: len(joined.tokens)] != joined.tokens:
            raise ValueError("a turn does not extend the turn before it")
        observed = len(turn.tokens) - len(joined.tokens) - turn.response_length
        observation = turn.tokens[len(joined.tokens) : len(joined.tokens) + observed]
        joined = TurnSample(
            tokens=turn.tokens,
            response=joined.response + decode(observation) + turn.response,
            response_length=joined.response_length + observed + turn.response_length,
            loss_mask=joined.loss_mask + [0] * observed + turn.loss_mask,
            rollout_log_probs=joined.rollout_log_probs + [0.0] * observed + turn.rollout_log_probs,
            status=turn.status,
            weight_versions=joined.weight_versions + turn.weight_versions,
            cached_tokens=joined.cached_tokens + turn.cached_tokens,
            prompt_tokens=joined.prompt_tokens + turn.prompt_tokens,
            lifecycle=joined.lifecycle + turn.lifecycle,
            routed_experts=turn.routed_experts,
        )
    return joined


def assemble(body: bytes, decode: Decode, *, max_seq_len: int | None = None, layers: int = 0) -> TurnSample:
    """The sample of a GET dump of one linear session: parse, compute, truncate, merge."""
    dump = orjson.loads(body)
    metadata = dump["metadata"]
    turns = compute(dump["records"], metadata["accumulated_token_ids"], metadata["max_trim_tokens"], decode, layers)
    return merge(truncate(turns, max_seq_len, decode), decode)
