"""fold: the turns of one chain become one sample (pipeline.md, fold).

One pass that gathers parts and joins them once; only the last turn's tokens are laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from miles_ref.assembly.reading import common_prefix
from miles_ref.assembly.truncate import PER_TOKEN, ROWS
from miles_ref.errors import AssemblyError
from miles_ref.records import AssemblySettings, IntArray, TokenView
from miles_ref.sample import STUDENT_LOG_PROBS, PrefixCacheInfo, Sample, SpecInfo, Status

_JOINED = frozenset(
    {"tokens", "response", "response_length", "status", "weight_versions", "metadata", "prefix_cache_info", "spec_info"}
    | {*PER_TOKEN, *ROWS}
)
_EQUAL = tuple(field.name for field in fields(Sample) if field.name not in _JOINED)
_LIFECYCLE, _MESSAGES = "lifecycle", "messages"
_SET_ASIDE = frozenset({_LIFECYCLE, _MESSAGES, STUDENT_LOG_PROBS})
_DTYPES = {"loss_mask": np.uint8}


def fold(turns: Sequence[Sample], settings: AssemblySettings) -> Sample:
    """One sample of the turns (at least one), as far as they go on from each other. The turns are unchanged.

    Raises AssemblyError (422) naming the turn and the field where turns that must be joined contradict each other.
    """
    joined = turns[: _count_joined(turns)]
    last = joined[-1]
    tokens = np.asarray(last.tokens, dtype=np.int64)
    gaps = [len(after.tokens) - len(before.tokens) - after.response_length for before, after in pairwise(joined)]
    per_token = {name: _per_token(joined, gaps, name) for name in PER_TOKEN}
    return replace(
        joined[0],
        tokens=tokens,
        response=_response(joined, tokens, settings),
        response_length=sum(turn.response_length for turn in joined) + sum(gaps),
        status=last.status,
        weight_versions=[version for turn in joined for version in turn.weight_versions],
        prefix_cache_info=sum((turn.prefix_cache_info for turn in joined), PrefixCacheInfo()),
        spec_info=sum((turn.spec_info for turn in joined), SpecInfo()),
        metadata=_metadata(joined, gaps),
        rollout_routed_experts=last.rollout_routed_experts,
        rollout_indexer_topk=last.rollout_indexer_topk,
        **per_token,
    )


def _count_joined(turns: Sequence[Sample]) -> int:
    _check_lengths(turns[0], 0)
    for turn in range(1, len(turns)):
        before, after = turns[turn - 1], turns[turn]
        if before.status != Status.COMPLETED or _lacks_rows(before, after):
            return turn
        _check_lengths(after, turn)
        _check_tokens(before, after, turn)
        _check_equal(before, after, turn)
    return len(turns)


def _lacks_rows(before: Sample, after: Sample) -> bool:
    return any(getattr(before, name) is not None and getattr(after, name) is None for name in ROWS)


def _check_lengths(turn: Sample, at: int) -> None:
    if not 0 <= turn.response_length <= len(turn.tokens):
        raise AssemblyError(
            f"turn {at}: response_length is {turn.response_length}, but the turn has {len(turn.tokens)} tokens"
        )
    for name in PER_TOKEN:
        values = getattr(turn, name)
        if values is not None and len(values) != turn.response_length:
            raise AssemblyError(
                f"turn {at}: {name} has {len(values)} entries, response_length is {turn.response_length}"
            )


def _check_tokens(before: Sample, after: Sample, turn: int) -> None:
    if not _starts_with(after.tokens, before.tokens):
        left, right = np.asarray(before.tokens), np.asarray(after.tokens)
        raise AssemblyError(
            f"turn {turn}: the {len(left)} tokens of turn {turn - 1} are no prefix of its {len(right)} tokens, "
            f"they differ at index {common_prefix(left, right)}"
        )
    observation = len(after.tokens) - len(before.tokens) - after.response_length
    if observation <= 0:
        raise AssemblyError(
            f"turn {turn}: no observation tokens between it and turn {turn - 1}: {len(after.tokens)} tokens - "
            f"{len(before.tokens)} - response_length {after.response_length} = {observation}"
        )


def _starts_with(tokens: Any, beginning: Any) -> bool:
    if isinstance(tokens, TokenView):
        return tokens.starts_with(beginning)
    return bool(np.array_equal(np.asarray(tokens[: len(beginning)]), np.asarray(beginning)))


def _check_equal(before: Sample, after: Sample, turn: int) -> None:
    for name in _EQUAL:
        left, right = getattr(before, name), getattr(after, name)
        if left is not right and not _same(left, right):
            raise AssemblyError(f"turn {turn}: {name} is {right!r:.80}, in turn {turn - 1} it is {left!r:.80}")
    left, right = _compared(before.metadata), _compared(after.metadata)
    if left.keys() != right.keys():
        raise AssemblyError(
            f"turn {turn}: metadata has other keys than in turn {turn - 1}: {sorted(left.keys() ^ right.keys())}"
        )
    for key, value in left.items():
        if not _same(value, right[key]):
            raise AssemblyError(
                f"turn {turn}: metadata.{key} is {right[key]!r:.80}, in turn {turn - 1} it is {value!r:.80}"
            )


def _compared(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in _SET_ASIDE}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return bool(np.array_equal(left, right))
    return bool(left == right)


def _per_token(turns: Sequence[Sample], gaps: Sequence[int], name: str) -> Any:
    """The turns' values with zeros for the observations; zeros too for a turn that has none, where another has some."""
    values = [getattr(turn, name) for turn in turns]
    if all(value is None for value in values):
        return None
    if len(turns) == 1:
        return values[0]
    zeros = np.zeros(max((*gaps, *(turn.response_length for turn in turns))), dtype=_DTYPES.get(name, np.float64))
    parts = [
        zeros[: turn.response_length] if value is None else np.asarray(value)
        for turn, value in zip(turns, values, strict=True)
    ]
    joined = np.concatenate(list(_between(parts, (zeros[:gap] for gap in gaps))))
    joined.flags.writeable = False
    return joined


def _between(parts: Sequence[Any], gaps: Iterable[Any]) -> Iterable[Any]:
    """The first part, then each gap and the part after it."""
    yield parts[0]
    for part, gap in zip(parts[1:], gaps, strict=True):
        yield gap
        yield part


def _response(turns: Sequence[Sample], tokens: IntArray, settings: AssemblySettings) -> str:
    texts = [turns[0].response]
    for before, after in pairwise(turns):
        start, stop = len(before.tokens), len(after.tokens) - after.response_length
        texts += [_observation(after.tokens, start, stop, tokens, settings.decode), after.response]
    return "".join(texts)


def _observation(view: Any, start: int, stop: int, tokens: IntArray, decode: Callable[[IntArray], str]) -> str:
    if isinstance(view, TokenView):
        record = view.chain.records[view.record]
        if (record.shared, record.start) == (start, stop) and record.prompt_tail_text is not None:
            return record.prompt_tail_text
    return decode(tokens[start:stop])


def _metadata(turns: Sequence[Sample], gaps: Sequence[int]) -> dict[str, Any]:
    if len(turns) == 1:
        return dict(turns[0].metadata)
    first, last = turns[0].metadata, turns[-1].metadata
    metadata = _compared(first)
    segments: list[Any] = []
    for turn in turns:
        if _LIFECYCLE in turn.metadata:
            segment = turn.metadata[_LIFECYCLE]
            segments.extend(segment if isinstance(segment, list) else [segment])
    if segments:
        metadata[_LIFECYCLE] = segments
    if _MESSAGES in last:
        metadata[_MESSAGES] = last[_MESSAGES]
    if any(STUDENT_LOG_PROBS in turn.metadata for turn in turns):
        metadata[STUDENT_LOG_PROBS] = _student_log_probs(turns, gaps)
    return metadata


def _student_log_probs(turns: Sequence[Sample], gaps: Sequence[int]) -> list[Any]:
    """The student's top log probs by response token; an observation, or a turn without them, has none: []."""
    parts = [turn.metadata.get(STUDENT_LOG_PROBS) or [[]] * turn.response_length for turn in turns]
    return [entry for part in _between(parts, ([[]] * gap for gap in gaps)) for entry in part]
