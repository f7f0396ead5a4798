"""compute: the records of one chain become turns (pipeline.md, compute)."""

from __future__ import annotations

from typing import Any

import numpy as np

from miles_ref.assembly.reading import common_prefix, read_status, shown_ids
from miles_ref.assembly.replay import RowRule
from miles_ref.errors import AssemblyError, FieldError
from miles_ref.records import AssemblySettings, Chain, IntArray, Record, RowView, TokenView
from miles_ref.sample import PrefixCacheInfo, Sample

_SHOWN = 64
"""How many tokens of each side an error shows: those that were trimmed are to be named (pipeline.md, compute)."""


def compute(chain: Chain, settings: AssemblySettings) -> list[Sample]:
    """One turn a record, in order. Tokens and replay rows are views; mask (uint8) and log probs (float64) read-only.

    Raises AssemblyError (422) naming turn, field and value.
    """
    experts = RowRule("routed_experts", settings.moe_router_topk)
    indexer = RowRule("indexer_topk")
    ones = np.ones(max((len(record.output_ids) for record in chain.records), default=0), dtype=np.uint8)
    ones.flags.writeable = False
    turns = []
    for turn, record in enumerate(chain.records):
        try:
            kept = len(record.output_ids) - _trim(chain, turn, settings)
            sample = _turn(chain, turn, kept, ones, settings)
            sample.rollout_routed_experts = _routed_experts(record, kept, experts, settings)
            sample.rollout_indexer_topk = _indexer_topk(record, kept, indexer, settings)
        except FieldError as error:
            raise AssemblyError(f"turn {turn}: {error}") from error
        turns.append(sample)
    return turns


def _turn(chain: Chain, turn: int, kept: int, ones: IntArray | Any, settings: AssemblySettings) -> Sample:
    record = chain.records[turn]
    metadata: dict[str, Any] = {"lifecycle": _lifecycle(chain, turn)}
    if settings.debug_messages and turn == len(chain) - 1:
        metadata["messages"] = record.messages()
    return Sample(
        tokens=TokenView(chain, turn, record.start + kept),
        response=_text(record, kept, settings),
        response_length=kept,
        loss_mask=ones[:kept],
        rollout_log_probs=record.log_probs[:kept],
        status=read_status(record.finish_reason),
        weight_versions=[] if record.weight_version is None else [record.weight_version],
        prefix_cache_info=PrefixCacheInfo(record.cached_tokens, record.prompt_tokens),
        spec_info=record.spec_info,
        metadata=metadata,
    )


def _trim(chain: Chain, turn: int, settings: AssemblySettings) -> int:
    """How many of the output's last tokens the next turn's template rendered itself."""
    accumulated = chain.accumulated
    if accumulated is None:
        return 0
    record = chain.records[turn]
    rest = accumulated[record.start : record.end]
    matched = common_prefix(record.output_ids, rest)
    trim = len(record.output_ids) - matched
    last = turn == len(chain) - 1
    allowed = 0 if last else settings.max_trim_tokens
    if trim > allowed:
        raise FieldError(
            "output_token_logprobs",
            f"ends in {trim} tokens that are not in the accumulated token ids (trim {trim}, allowed {allowed}): "
            f"output {shown_ids(record.output_ids[matched:], _SHOWN)}, "
            f"accumulated {shown_ids(rest[matched:], _SHOWN)} "
            f"from index {record.start + matched}",
        )
    if last and record.start + matched != len(accumulated):
        raise FieldError(
            "accumulated_token_ids",
            f"has {len(accumulated)} ids, the last turn ends at {record.start + matched}: "
            f"{shown_ids(accumulated[record.start + matched :])} belong to no turn",
        )
    return trim


def _text(record: Record, kept: int, settings: AssemblySettings) -> str:
    if kept == len(record.output_ids) and record.output_text is not None:
        return record.output_text
    return settings.decode(record.output_ids[:kept])


def _lifecycle(chain: Chain, turn: int) -> dict[str, Any]:
    record = chain.records[turn]
    end, latency = record.timestamp, record.e2e_latency
    lifecycle = {"t0": None if latency is None else end - latency, "t1": end, "turn": turn + 1}
    if record.request_timestamp is not None:
        lifecycle["req_ts"] = record.request_timestamp
    if turn:
        lifecycle["prev_t1"] = chain.records[turn - 1].timestamp
    return lifecycle


def _routed_experts(record: Record, kept: int, rule: RowRule, settings: AssemblySettings) -> RowView | None:
    if not settings.routed_experts or settings.additional_r3 or record.routed_experts is None:
        return None
    rows = rule.rows(record.routed_experts, max(0, record.end - 1), settings.num_layers)
    return rows.cut(len(record.output_ids) - kept)


def _indexer_topk(record: Record, kept: int, rule: RowRule, settings: AssemblySettings) -> RowView | None:
    if not settings.indexer_topk or record.indexer_topk is None:
        return None
    if record.indexer_layers is None:
        raise FieldError("indexer_topk_num_layers", "is absent beside indexer_topk")
    rows = rule.rows(record.indexer_topk, max(0, record.end - 1), record.indexer_layers)
    return rows.cut(len(record.output_ids) - kept)
