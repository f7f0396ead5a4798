"""Record and Chain: what a session remembers of its model calls, stored as deltas.

A record holds what its call *added* to the call before it: the new prompt ids, the output ids, the new replay bytes.
A chain is the records from a root to a leaf. Whole prompts exist only as views that are laid out on request, so that a
chain costs the tokens of its leaf, not one prefix a record (pipeline.md, Words; session-http.md, Life of a session).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from miles_ref.sample import SpecInfo

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def int_array(ids: Sequence[int] | IntArray) -> IntArray:
    """Token ids as a read-only int64 array (a view where it already is one).

    Raises OverflowError for an id outside int64, TypeError or ValueError for what is not an integer.
    """
    array = np.asarray(ids, dtype=np.int64)
    view = array.view()
    view.flags.writeable = False
    return view


def common_bytes(text: bytes, data: bytes, at: int) -> int:
    """How many bytes of `text` stand in `data` from `at` on, before the two differ."""
    if data.startswith(text, at):
        return len(text)
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if data.startswith(text[low:middle], at + low) else (low, middle)
    return low


class Payload:
    """Bytes that share their beginning with a parent's: replay rows, and the texts that a session remembers.

    Bytes are `parent[:shared] + tail`, so that a chain of payloads that each go on from the last costs what they add.
    """

    __slots__ = ("parent", "shared", "size", "tail")

    def __init__(self, tail: bytes, parent: Payload | None = None, shared: int = 0) -> None:
        self.tail = tail
        self.parent = parent
        self.shared = shared
        self.size = shared + len(tail)

    @classmethod
    def of(cls, raw: bytes | bytearray | memoryview, parent: Payload | None = None) -> Payload:
        """Keep of `raw` only what follows the parent's bytes, where it begins with them; else all of it."""
        data = raw if isinstance(raw, bytes) else bytes(raw)
        if parent is None or parent.size == 0 or parent.common(data) < parent.size:
            return cls(data)
        return cls(data[parent.size :], parent, parent.size)

    def common(self, data: bytes) -> int:
        """How many bytes this and `data` have in common at their beginning."""
        at = 0
        for chunk in self.chunks(self.size):
            # Comparing bytes is a memcmp; comparing memoryviews goes item by item.
            known = common_bytes(bytes(chunk), data, at)
            at += known
            if known < len(chunk):
                break
        return at

    def check(self) -> None:
        """Raise the error that makes the bytes unusable, if there is one."""

    def chunks(self, size: int) -> list[bytes | memoryview]:
        """The first `size` bytes in order, without a copy."""
        parts: list[bytes | memoryview] = []
        node: Payload | None = self
        while node is not None and size > 0:
            wanted = size - node.shared
            if wanted > 0:
                parts.append(node.tail if wanted >= len(node.tail) else memoryview(node.tail)[:wanted])
                size = node.shared
            node = node.parent
        parts.reverse()
        return parts

    def to_bytes(self, size: int | None = None) -> bytes:
        """The first `size` bytes (default: all) as one object."""
        return b"".join(self.chunks(self.size if size is None else size))


@dataclass(frozen=True, slots=True)
class Record:
    """One completed model call as a delta on the record before it in its chain.

    The prompt (`request.input_ids`) is the first `shared` ids of the previous record's prompt + output, followed by
    `prompt_tail`; the first record of a chain has `shared` 0. Log probs are natural logarithms, float64, one for each
    output id. Times are epoch seconds, `e2e_latency` seconds. `routed_experts` and `indexer_topk` are None where replay
    is not configured or the reply carried none. `messages()` gives `request.messages + [choice.message]`.
    The two texts are decode(prompt_tail) and decode(output_ids), where somebody already knows them.

    Source: pipeline.md, Record.
    """

    shared: int
    prompt_tail: IntArray
    output_ids: IntArray
    log_probs: FloatArray
    finish_reason: str | None
    timestamp: float
    request_timestamp: float | None = None
    e2e_latency: float | None = None
    weight_version: str | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    response_id: str | None = None
    routed_experts: Payload | None = None
    routed_experts_start: int | None = None
    indexer_topk: Payload | None = None
    indexer_layers: int | None = None
    messages: Callable[[], list[Any]] = list
    prompt_tail_text: str | None = None
    output_text: str | None = None

    @property
    def start(self) -> int:
        """len(prompt): where the completion begins."""
        return self.shared + len(self.prompt_tail)

    @property
    def end(self) -> int:
        """len(prompt) + len(output)."""
        return self.start + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where a v2 chain ends in its forest (pipeline.md, v2: `metadata.leaf`). Ids are commit indices."""

    node_id: int
    parent: int | None
    path_node_ids: tuple[int, ...]
    response_id: str | None


class Chain:
    """The records from a root to a leaf, in order, and the accumulated token ids if they are known.

    `accumulated` None means that they were not given: then nothing is trimmed and nothing is checked
    (pipeline.md, compute). `leaf` is set for v2.
    """

    def __init__(
        self, records: Sequence[Record], accumulated: IntArray | None, leaf: Leaf | None = None, mismatch: Any = None
    ) -> None:
        self.records = tuple(records)
        self.accumulated = accumulated
        self.leaf = leaf
        self.mismatch: list[dict[str, Any]] | None = mismatch

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def _leaf_tokens(self) -> IntArray:
        return self._lay_out(len(self.records) - 1)

    def _lay_out(self, index: int) -> IntArray:
        """Prompt + output of record `index`: every delta is written once, later ones over what they replace."""
        records = self.records[: index + 1]
        out = np.empty(max(record.end for record in records), dtype=np.int64)
        for record in records:
            out[record.shared : record.start] = record.prompt_tail
            out[record.start : record.end] = record.output_ids
        out = out[: records[-1].end]
        out.flags.writeable = False
        return out

    def tokens(self, index: int) -> IntArray:
        """Prompt + whole output of record `index`, int64, read-only."""
        return self._leaf_tokens if index == len(self.records) - 1 else self._lay_out(index)

    def agree(self, earlier: int, later: int, length: int) -> bool:
        """Whether prompt + output of the two records are known to agree in their first `length` ids.

        False means "not known from the deltas"; compare the ids then.
        """
        return all(record.shared >= length for record in self.records[earlier + 1 : later + 1])


class TokenView(Sequence[int]):
    """The tokens of a turn: the first `length` ids of a record's prompt + output, laid out only when read."""

    __slots__ = ("chain", "length", "record")

    def __init__(self, chain: Chain, record: int, length: int) -> None:
        self.chain, self.record, self.length = chain, record, length

    def __len__(self) -> int:
        return self.length

    def array(self) -> IntArray:
        """The ids as a read-only int64 array."""
        return self.chain.tokens(self.record)[: self.length]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.array(), dtype=dtype, copy=copy)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        ids: int | list[int] = self.array()[at].tolist()
        return ids

    def __iter__(self) -> Iterator[int]:
        return iter(self.array().tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenView | Sequence | np.ndarray):
            return len(self) == len(other) and bool(np.array_equal(self.array(), np.asarray(other)))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def cut(self, count: int) -> TokenView:
        """The view without its last `count` ids."""
        return TokenView(self.chain, self.record, self.length - count)

    def last(self, count: int) -> IntArray:
        """The last `count` ids; nothing is laid out where they are all of the record's own output."""
        record = self.chain.records[self.record]
        start = self.length - count
        if start >= record.start:
            return record.output_ids[start - record.start : self.length - record.start]
        return self.array()[start:]

    def starts_with(self, other: Sequence[int]) -> bool:
        """Whether the ids begin with all of `other`'s; known from the deltas for turns of one chain."""
        if len(other) > self.length:
            return False
        if (
            isinstance(other, TokenView)
            and other.chain is self.chain
            and other.record <= self.record
            and self.chain.agree(other.record, self.record, other.length)
        ):
            return True
        return bool(np.array_equal(self.array()[: len(other)], np.asarray(other)))


@dataclass(frozen=True, slots=True)
class RowView:
    """Replay rows of a turn: the first `rows` of a payload, int32, shape (rows, layers, topk), laid out when read."""

    payload: Payload
    rows: int
    layers: int
    topk: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.rows, self.layers, self.topk)

    def cut(self, count: int) -> RowView:
        """The view without its last `count` rows."""
        return RowView(self.payload, max(0, self.rows - count), self.layers, self.topk)

    def chunks(self) -> list[bytes | memoryview]:
        """The rows' bytes in order, little-endian, without a copy."""
        return self.payload.chunks(self.rows * self.layers * self.topk * 4)

    def array(self) -> npt.NDArray[np.int32]:
        """The rows as a contiguous read-only int32 array."""
        raw = self.payload.to_bytes(self.rows * self.layers * self.topk * 4)
        return np.frombuffer(raw, dtype="<i4").reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.array(), dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class AssemblySettings:
    """What assembly must know beside the records (cases.md, config). Counts are in tokens, layers and experts.

    `decode` turns token ids into text with special tokens kept. `moe_router_topk` 0: not configured, so topk is
    recovered from the payload's length.
    """

    decode: Callable[[IntArray], str]
    max_trim_tokens: int = 0
    num_layers: int = 0
    moe_router_topk: int = 0
    routed_experts: bool = False
    indexer_topk: bool = False
    additional_r3: bool = False
    speculative: bool = False
    debug_messages: bool = False
