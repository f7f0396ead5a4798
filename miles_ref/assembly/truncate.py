"""truncate: keep the turns that fit a budget of tokens, the last one cut (pipeline.md, truncate)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miles_ref.records import AssemblySettings, IntArray, RowView, TokenView
from miles_ref.sample import STUDENT_LOG_PROBS, Sample, Status

PER_TOKEN = ("loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl")
"""Fields with one entry for each token of the response."""

ROWS = ("rollout_routed_experts", "rollout_indexer_topk")


def truncate(turns: Sequence[Sample], max_seq_len: int | None, settings: AssemblySettings) -> list[Sample]:
    """The turns up to the first that does not fit, that one cut if some of its output fits. The input is unchanged."""
    if max_seq_len is None:
        return list(turns)
    for at, turn in enumerate(turns):
        overshoot = len(turn.tokens) - max_seq_len
        if overshoot > 0:
            cut = [cut_end(turn, overshoot, settings)] if turn.response_length > overshoot else []
            return [*turns[:at], *cut]
    return list(turns)


def cut_end(turn: Sample, count: int, settings: AssemblySettings) -> Sample:
    """A copy of the turn without its last `count` tokens, which must be fewer than its response, status truncated."""
    kept = turn.response_length - count
    per_token = {name: _cut(getattr(turn, name), count) for name in (*PER_TOKEN, *ROWS)}
    metadata = dict(turn.metadata)
    if isinstance(metadata.get(STUDENT_LOG_PROBS), list):
        metadata[STUDENT_LOG_PROBS] = _cut(metadata[STUDENT_LOG_PROBS], count)
    tokens = _cut(turn.tokens, count)
    return replace(
        turn,
        tokens=tokens,
        response=settings.decode(last_ids(tokens, kept)),
        response_length=kept,
        status=Status.TRUNCATED,
        metadata=metadata,
        **per_token,
    )


def last_ids(tokens: Any, count: int) -> IntArray:
    """The last `count` ids of a turn's tokens, int64."""
    if isinstance(tokens, TokenView):
        return tokens.last(count)
    return np.asarray(tokens, dtype=np.int64)[len(tokens) - count :]


def _cut(values: Any, count: int) -> Any:
    if values is None:
        return None
    if isinstance(values, TokenView | RowView):
        return values.cut(count)
    return values[: len(values) - count]
