"""How a session's ids differ from the canonical render of its messages (tokens.md, Mismatch report).

`full_report` follows the contract step by step. `incremental_report` gives the same entries at the cost of one render:
a `SegmentIndex` has decoded each id when it was committed, and the canonical text is compared piece by piece, so that
only what differs is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from miles_ref.records import IntArray
from miles_ref.tokens.families import BoundFamily, Family
from miles_ref.tokens.matching import Message
from miles_ref.tokens.rendering import normalize_messages, normalize_tools
from miles_ref.tokens.tokenizer import TextPieces, Tokenizer

Entry = dict[str, Any]

_OPENER_IDS = 20
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Segments:
    """A sequence cut into segments: each special token alone, runs of the other ids between.

    In parallel: the special token's id or None, and the content's decoded text or None. `ids` and `count` give the ids
    of segment i and their number, and are asked only where a difference is described.
    """

    tokens: Sequence[int | None]
    texts: Sequence[str | None]
    ids: Callable[[int], Sequence[int] | IntArray]
    count: Callable[[int], int]

    def __len__(self) -> int:
        return len(self.tokens)


def full_report(
    tokenizer: Tokenizer,
    family: Family,
    accumulated_ids: IntArray,
    messages: Sequence[Message],
    tools: Any,
    template_kwargs: Mapping[str, Any],
) -> list[Entry]:
    """Render, encode, decode and compare everything. `tools` are the last request's, the kwargs the server's.

    Entries are `{type, segment_index, expected_text, actual_text, detail}`; no difference: []. Raises
    MessageValidationError where the messages cannot be rendered: then there is no report.
    """
    bound = family.bind(tokenizer)
    expected = np.array(tokenizer.encode(_canonical_text(tokenizer, messages, tools, template_kwargs)), dtype=np.int64)
    return _compare(
        _decoded(_strip(expected, bound.tail_ids), tokenizer),
        _decoded(_strip(accumulated_ids, bound.tail_ids), tokenizer),
        tokenizer,
        family.assistant_opener,
    )


class Fragment(NamedTuple):
    """Part of a segment: the half-open range of its ids in the sequence, and their text (None: a special token).

    `encoded`: a whole content whose ids are what the tokenizer makes of the text.
    """

    start: int
    end: int
    text: str | None
    encoded: bool = False


class SegmentIndex:
    """The decoded segments of a node's ids, as a delta on its parent: immutable, and linear in the ids that it adds."""

    __slots__ = ("end", "fragments", "kept", "parent")

    def __init__(self, parent: SegmentIndex | None, kept: int, end: int, fragments: tuple[Fragment, ...]) -> None:
        self.parent = parent
        self.kept = kept
        self.end = end
        self.fragments = fragments

    @classmethod
    def extend(
        cls, parent: SegmentIndex | None, kept: int, new_ids: IntArray, tokenizer: Tokenizer, encoded: int = 0
    ) -> SegmentIndex:
        """The index of the sequence parent[:kept] + new_ids (int64, 1-d); `kept` may cut the parent's end.

        `encoded` is how many of the first new ids the tokenizer made (the prompt's tail): it saves a report encoding
        them again. Raises ValueError for a `kept` beyond the parent's end.
        """
        if not 0 <= kept <= (parent.end if parent else 0):
            raise ValueError(f"cannot keep {kept} ids of a parent that has {parent.end if parent else 0}")
        end = kept + len(new_ids)
        if tokenizer.pieces is None:
            return cls(parent, kept, end, ())  # The report of such a tokenizer is the full one.
        # A content is known to be whole, and so encoded on its own, between two special tokens among the encoded ids.
        fragments = (
            Fragment(kept + a, kept + b, None)
            if special
            else Fragment(kept + a, kept + b, tokenizer.decode(new_ids[a:b]), encoded=a > 0 and b < encoded)
            for a, b, special in _cut(new_ids, tokenizer.special_ids)
        )
        return cls(parent, kept, end, tuple(fragments))

    def until(self, length: int) -> list[Fragment]:
        """The fragments of the first `length` ids, in order; one that `length` or a `kept` cuts has text "\\ufffd".

        That is the text that says "decode me again": a fragment's end is where a character may have been cut.
        """
        nodes: list[tuple[SegmentIndex, int]] = []
        node: SegmentIndex | None = self
        while node is not None:
            nodes.append((node, length))
            length = min(length, node.kept)
            node = node.parent
        return [
            fragment if fragment.end <= limit else Fragment(fragment.start, limit, _REPLACEMENT)
            for node, limit in reversed(nodes)
            for fragment in node.fragments
            if fragment.start < limit
        ]


def incremental_report(
    index: SegmentIndex,
    tokenizer: Tokenizer,
    family: Family,
    accumulated_ids: IntArray,
    messages: Sequence[Message],
    tools: Any,
    template_kwargs: Mapping[str, Any],
) -> list[Entry]:
    """What `full_report` gives for the same arguments; `index` is that of `accumulated_ids`.

    Falls back to `full_report` for a tokenizer where working piece by piece is not known to be exact.
    Raises ValueError if the index is of a sequence of another length.
    """
    if index.end != len(accumulated_ids):
        raise ValueError(f"the segment index covers {index.end} ids, the session has {len(accumulated_ids)}")
    if tokenizer.pieces is None:
        return full_report(tokenizer, family, accumulated_ids, messages, tools, template_kwargs)
    bound = family.bind(tokenizer)
    text = _canonical_text(tokenizer, messages, tools, template_kwargs)
    return _compare(
        _canonical(text, tokenizer, tokenizer.pieces, bound, partial(_known_counts, index)),
        _indexed(index, _strip(accumulated_ids, bound.tail_ids), tokenizer),
        tokenizer,
        family.assistant_opener,
    )


def _canonical_text(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Any, template_kwargs: Mapping[str, Any]
) -> str:
    return tokenizer.render(
        normalize_messages(messages),
        tools=normalize_tools(tools),
        add_generation_prompt=False,
        template_kwargs=template_kwargs,
    )


def _strip(ids: IntArray, tail_ids: Set[int]) -> IntArray:
    end = len(ids)
    while end and int(ids[end - 1]) in tail_ids:
        end -= 1
    return ids[:end]


@lru_cache(maxsize=16)
def _special_table(special_ids: frozenset[int]) -> npt.NDArray[np.bool_]:
    """Whether an id is special, by id; the last entry stands for all that follow."""
    table = np.zeros(max(special_ids, default=0) + 2, dtype=np.bool_)
    table[list(special_ids)] = True
    table.flags.writeable = False
    return table


def _cut(ids: IntArray, special_ids: Set[int]) -> list[tuple[int, int, bool]]:
    """(start, end, special) of each special token and each run of other ids between them."""
    spans: list[tuple[int, int, bool]] = []
    start = 0
    for at in np.flatnonzero(_special_table(frozenset(special_ids)).take(ids, mode="clip")).tolist():
        if start < at:
            spans.append((start, at, False))
        start = at + 1
        spans.append((at, start, True))
    if start < len(ids):
        spans.append((start, len(ids), False))
    return spans


def _decoded(ids: IntArray, tokenizer: Tokenizer) -> Segments:
    spans = _cut(ids, tokenizer.special_ids)
    return Segments(
        tokens=[int(ids[start]) if special else None for start, _, special in spans],
        texts=[None if special else tokenizer.decode(ids[start:end]) for start, end, special in spans],
        ids=lambda index: ids[spans[index][0] : spans[index][1]],
        count=lambda index: spans[index][1] - spans[index][0],
    )


def _canonical(
    text: str,
    tokenizer: Tokenizer,
    pieces: TextPieces,
    bound: BoundFamily,
    known_counts: Callable[[], Mapping[str, int]],
) -> Segments:
    """The segments of the canonical text, less the ids of the family's tail, without encoding what is not asked for."""
    parts = pieces.split(text)
    content_tail = bound.tail_ids - tokenizer.special_ids
    cut: IntArray | None = None
    while parts and cut is None:
        token, piece = parts[-1]
        if token in bound.tail_ids:
            parts.pop()
            continue
        if token is not None or not content_tail:
            break
        ids = np.array(tokenizer.encode(piece), dtype=np.int64)
        cut = _strip(ids, bound.tail_ids)
        if not len(cut):
            parts.pop()
            cut = None
    texts = [None if token is not None else pieces.normalize(piece) for token, piece in parts]
    if cut is not None:
        texts[-1] = tokenizer.decode(cut)
    known_counts = cache(known_counts)

    def ids_of(index: int) -> Sequence[int] | IntArray:
        return cut if cut is not None and index == len(parts) - 1 else tokenizer.encode(parts[index][1])

    def count(index: int) -> int:
        known = known_counts().get(parts[index][1])
        return len(ids_of(index)) if known is None or index == len(parts) - 1 else known

    return Segments(tokens=[token for token, _ in parts], texts=texts, ids=ids_of, count=count)


def _known_counts(index: SegmentIndex) -> dict[str, int]:
    """How many ids the tokenizer makes of the contents that it has encoded for this sequence."""
    return {part.text: part.end - part.start for part in index.until(index.end) if part.encoded and part.text}


def _indexed(index: SegmentIndex, ids: IntArray, tokenizer: Tokenizer) -> Segments:
    """The segments of `ids`, a beginning of the sequence of `index`, with the texts that the index has decoded."""
    runs: list[list[Fragment]] = []
    for fragment in index.until(len(ids)):
        if fragment.text is None or not runs or runs[-1][0].text is None:
            runs.append([fragment])
        else:
            runs[-1].append(fragment)
    return Segments(
        tokens=[int(ids[run[0].start]) if run[0].text is None else None for run in runs],
        texts=[None if run[0].text is None else _joined_text(run, ids, tokenizer) for run in runs],
        ids=lambda index: ids[runs[index][0].start : runs[index][-1].end],
        count=lambda index: runs[index][-1].end - runs[index][0].start,
    )


def _joined_text(run: Sequence[Fragment], ids: IntArray, tokenizer: Tokenizer) -> str:
    """The text of a content segment's fragments; decoded again where one may end inside a character."""
    texts = [fragment.text or "" for fragment in run]
    if any(text.endswith(_REPLACEMENT) for text in texts):
        return tokenizer.decode(ids[run[0].start : run[-1].end])
    return "".join(texts)


def _compare(expected: Segments, actual: Segments, tokenizer: Tokenizer, opener: str | None) -> list[Entry]:
    if expected.tokens == actual.tokens and expected.texts == actual.texts:
        return []
    detail = _structure_difference(expected, actual)
    if detail:
        structures = _structure(expected, tokenizer), _structure(actual, tokenizer)
        return [_entry("special_token_count", -1, *structures, detail)]
    entries: list[Entry] = []
    for index, (one, other) in enumerate(zip(expected.tokens, actual.tokens, strict=True)):
        if one is not None and other is not None:
            if one != other:
                entries.append(_entry("special_token_type", index, tokenizer.decode([one]), tokenizer.decode([other])))
        elif expected.texts[index] != actual.texts[index]:
            spoken = opener is not None and all(_opens(side, index, tokenizer, opener) for side in (expected, actual))
            kind = "assistant_text" if spoken else "non_assistant_text"
            entries.append(_entry(kind, index, expected.texts[index], actual.texts[index]))
    return entries


def _structure_difference(expected: Segments, actual: Segments) -> str:
    if len(expected) != len(actual):
        return f"segment count differs: expected {len(expected)}, got {len(actual)}"
    if any((one is None) != (other is None) for one, other in zip(expected.tokens, actual.tokens, strict=True)):
        return "segment structure (special/content pattern) differs"
    return ""


def _structure(side: Segments, tokenizer: Tokenizer) -> str:
    return " ".join(
        f"({side.count(index)} tokens)" if token is None else f"[{tokenizer.decode([token])}]"
        for index, token in enumerate(side.tokens)
    )


def _opens(side: Segments, index: int, tokenizer: Tokenizer, opener: str) -> bool:
    before = side.tokens[index - 1] if index else None
    beginning = tokenizer.decode(side.ids(index)[:_OPENER_IDS])
    return (beginning if before is None else tokenizer.decode([before]) + beginning).startswith(opener)


def _entry(kind: str, index: int, expected: str | None, actual: str | None, detail: str = "") -> Entry:
    return {
        "type": kind,
        "segment_index": index,
        "expected_text": expected,
        "actual_text": actual,
        "detail": detail,
    }
