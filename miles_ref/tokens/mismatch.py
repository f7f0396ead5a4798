"""How a session's ids differ from the canonical render of its messages (tokens.md, Mismatch report).

`full_report` follows the contract step by step. `incremental_report` gives the same entries at the cost of one render:
a `SegmentIndex` has decoded each id when it was committed, and the canonical text is compared piece by piece, so that
only what differs is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from miles_ref.records import IntArray
from miles_ref.tokens.families import BoundFamily, Family
from miles_ref.tokens.rendering import normalize_messages, normalize_tools
from miles_ref.tokens.tokenizer import TextPieces, Tokenizer

Entry = dict[str, Any]
Message = Mapping[str, Any]

_OPENER_IDS = 20
_REPLACEMENT = "\ufffd"


class Segment:
    """One special token, or a run of other ids. Text is decoded, and ids are encoded from `source`, only when read."""

    __slots__ = ("_ids", "_source", "_text", "_tokenizer", "special")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special: bool,
        ids: IntArray | None = None,
        text: str | None = None,
        source: str = "",
    ) -> None:
        self.special = special
        self._tokenizer = tokenizer
        self._ids = ids
        self._text = text
        self._source = source

    @property
    def ids(self) -> IntArray:
        """The segment's ids, int64, 1-d."""
        if self._ids is None:
            self._ids = np.array(self._tokenizer.encode(self._source), dtype=np.int64)
        return self._ids

    @property
    def text(self) -> str:
        """decode(ids)."""
        if self._text is None:
            self._text = self._tokenizer.decode(self.ids)
        return self._text

    def beginning(self) -> str:
        """The text of the first 20 ids."""
        return self._tokenizer.decode(self.ids[:_OPENER_IDS])


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
        _segments(_strip(expected, bound.tail_ids), tokenizer),
        _segments(_strip(accumulated_ids, bound.tail_ids), tokenizer),
        family.assistant_opener,
    )


class Fragment(NamedTuple):
    """Part of a segment: the half-open range of its ids in the sequence, and their text (None: a special token)."""

    start: int
    end: int
    text: str | None


class SegmentIndex:
    """The decoded segments of a node's ids, as a delta on its parent: immutable, and linear in the ids that it adds."""

    __slots__ = ("end", "fragments", "kept", "parent")

    def __init__(self, parent: SegmentIndex | None, kept: int, end: int, fragments: tuple[Fragment, ...]) -> None:
        self.parent = parent
        self.kept = kept
        self.end = end
        self.fragments = fragments

    @classmethod
    def extend(cls, parent: SegmentIndex | None, kept: int, new_ids: IntArray, tokenizer: Tokenizer) -> SegmentIndex:
        """The index of the sequence parent[:kept] + new_ids (int64, 1-d); `kept` may cut the parent's end.

        Raises ValueError for a `kept` beyond the parent's end.
        """
        if not 0 <= kept <= (parent.end if parent else 0):
            raise ValueError(f"cannot keep {kept} ids of a parent that has {parent.end if parent else 0}")
        end = kept + len(new_ids)
        if tokenizer.pieces is None:
            return cls(parent, kept, end, ())  # The report of such a tokenizer is the full one.
        fragments = (
            Fragment(kept + a, kept + b, None if special else tokenizer.decode(new_ids[a:b]))
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
        _expected_segments(text, tokenizer, tokenizer.pieces, bound),
        _indexed_segments(index, _strip(accumulated_ids, bound.tail_ids), tokenizer),
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


def _cut(ids: IntArray, special_ids: Set[int]) -> list[tuple[int, int, bool]]:
    """(start, end, special) of each special token and each run of other ids between them."""
    if not len(ids):
        return []
    special = np.isin(ids, np.fromiter(special_ids, dtype=np.int64, count=len(special_ids)))
    begins = special.copy()
    begins[0] = True
    begins[1:] |= special[:-1]
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(ids))
    return list(zip(starts.tolist(), ends.tolist(), special[starts].tolist(), strict=True))


def _segments(ids: IntArray, tokenizer: Tokenizer) -> list[Segment]:
    return [
        Segment(tokenizer, special=special, ids=ids[start:end])
        for start, end, special in _cut(ids, tokenizer.special_ids)
    ]


def _expected_segments(text: str, tokenizer: Tokenizer, pieces: TextPieces, bound: BoundFamily) -> list[Segment]:
    segments = [
        Segment(tokenizer, special=False, text=pieces.normalize(piece), source=piece)
        if token is None
        else Segment(tokenizer, special=True, ids=np.array([token], dtype=np.int64))
        for token, piece in pieces.split(text)
    ]
    content_tail = bound.tail_ids - tokenizer.special_ids
    while segments:
        last = segments[-1]
        if not last.special and not content_tail:
            break
        rest = _strip(last.ids, bound.tail_ids)
        if len(rest) == len(last.ids):
            break
        segments.pop()
        if len(rest):
            segments.append(Segment(tokenizer, special=False, ids=rest))
            break
    return segments


def _indexed_segments(index: SegmentIndex, ids: IntArray, tokenizer: Tokenizer) -> list[Segment]:
    segments: list[Segment] = []
    run: list[Fragment] = []
    for fragment in index.until(len(ids)):
        if fragment.text is not None:
            run.append(fragment)
            continue
        if run:
            segments.append(_joined(run, ids, tokenizer))
            run = []
        segments.append(Segment(tokenizer, special=True, ids=ids[fragment.start : fragment.end]))
    if run:
        segments.append(_joined(run, ids, tokenizer))
    return segments


def _joined(run: Sequence[Fragment], ids: IntArray, tokenizer: Tokenizer) -> Segment:
    """A content segment of fragments; decoded again where one may end inside a character."""
    texts = [fragment.text or "" for fragment in run]
    clean = not any(text.endswith(_REPLACEMENT) for text in texts)
    return Segment(
        tokenizer, special=False, ids=ids[run[0].start : run[-1].end], text="".join(texts) if clean else None
    )


def _compare(expected: Sequence[Segment], actual: Sequence[Segment], opener: str | None) -> list[Entry]:
    detail = _structure_difference(expected, actual)
    if detail:
        return [_entry("special_token_count", -1, _structure(expected), _structure(actual), detail)]
    entries: list[Entry] = []
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one.special:
            if one.ids[0] != other.ids[0]:
                entries.append(_entry("special_token_type", index, one.text, other.text))
        elif one.text != other.text:
            spoken = opener is not None and all(_opens(side, index, opener) for side in (expected, actual))
            kind = "assistant_text" if spoken else "non_assistant_text"
            entries.append(_entry(kind, index, one.text, other.text))
    return entries


def _structure_difference(expected: Sequence[Segment], actual: Sequence[Segment]) -> str:
    if len(expected) != len(actual):
        return f"segment count differs: expected {len(expected)}, got {len(actual)}"
    if any(one.special != other.special for one, other in zip(expected, actual, strict=True)):
        return "segment structure (special/content pattern) differs"
    return ""


def _structure(segments: Sequence[Segment]) -> str:
    return " ".join(f"[{one.text}]" if one.special else f"({len(one.ids)} tokens)" for one in segments)


def _opens(segments: Sequence[Segment], index: int, opener: str) -> bool:
    before = segments[index - 1].text if index else ""
    return (before + segments[index].beginning()).startswith(opener)


def _entry(kind: str, index: int, expected: str, actual: str, detail: str = "") -> Entry:
    return {
        "type": kind,
        "segment_index": index,
        "expected_text": expected,
        "actual_text": actual,
        "detail": detail,
    }
