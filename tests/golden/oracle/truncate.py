"""turns -> turns within max_seq_len (pipeline.md, truncate)."""

from __future__ import annotations

from typing import Any

from .replay import cut_rows
from .values import decode_tokens


def truncate_turns(turns: list[dict[str, Any]], max_seq_len: int | None) -> list[dict[str, Any]]:
    """The turns that fit; the first that does not is cut, or dropped, and ends the walk."""
    if max_seq_len is None:
        return list(turns)
    kept = []
    for turn in turns:
        over = len(turn["tokens"]) - max_seq_len
        if over <= 0:
            kept.append(turn)
            continue
        if turn["response_length"] - over >= 1:
            kept.append(_cut(turn, over))
        break
    return kept


def _cut(turn: dict[str, Any], over: int) -> dict[str, Any]:
    left = turn["response_length"] - over
    return {
        **turn,
        "tokens": turn["tokens"][: len(turn["tokens"]) - over],
        "response": decode_tokens(turn["output_tokens"][:left]),
        "response_length": left,
        "loss_mask": turn["loss_mask"][:left],
        "rollout_log_probs": turn["rollout_log_probs"][:left],
        "output_tokens": turn["output_tokens"][:left],
        "routed_experts": cut_rows(turn["routed_experts"], over),
        "indexer_topk": cut_rows(turn["indexer_topk"], over),
        "status": "truncated",
    }
