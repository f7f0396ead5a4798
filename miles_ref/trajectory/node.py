"""A committed turn as what it added to the turn before it, and views on the path that leads to it.

A node costs its own tokens, messages and reply. Whole prompts, texts and token arrays are laid out from the path when
somebody asks for them (session-http.md, Life of a session: storage is linear).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import orjson

from miles_ref.records import Chain, IntArray, Leaf, Payload, Record
from miles_ref.tokens.matching import Message
from miles_ref.tokens.mismatch import SegmentIndex

NO_IDS: IntArray = np.empty(0, dtype=np.int64)
NO_IDS.flags.writeable = False

ReplayField = Literal["routed_experts", "indexer_topk"]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One committed turn.

    Its prompt is the first `record.shared` ids of the parent's prompt + output, and what it adds. Its stored messages
    are those of the parent's path and its own `messages`, the reply last. Its request's messages stand one to one for
    the stored ones before the reply; `text` has them as the client spelled them, without the closing bracket.
    """

    seq: int
    """Index of the commit in its session, from 0: the node's id."""
    parent: Node | None
    messages: tuple[Message, ...]
    message_count: int
    """Messages of the whole path, the reply included."""
    text: Payload
    ends: tuple[int, ...]
    """Where the request's messages end in `text`, of those that the parent's text does not share."""
    members: Mapping[str, bytes]
    """The other members of the forwarded request, raw, without `input_ids`."""
    tools: Any
    ids_text: Payload
    """Prompt and output ids in decimal, separated by commas."""
    prompt_size: int
    """Bytes of `ids_text` that are the prompt's."""
    response: tuple[bytes | ReplayField, ...]
    """The reply's JSON in pieces; a name stands for the base64 text of the record's payload."""
    record: Record
    index: SegmentIndex
    floor: int
    """How many ids of this path no later turn may change, so that assembly holds (tokens.md, Commit check)."""
    size: int
    """Bytes that the node keeps, about."""

    @property
    def is_truncated(self) -> bool:
        """Whether the generation ended with finish_reason length."""
        return self.record.finish_reason == "length"

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes = list(self.ancestry())
        nodes.reverse()
        return nodes

    def ancestry(self) -> Iterator[Node]:
        """This node, its parent, and so on to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def stored_messages(self) -> list[Message]:
        """The messages of the path, the replies as the backend sent them."""
        return [message for node in self.path() for message in node.messages]

    def tokens(self) -> IntArray:
        """Prompt + output ids, int64, read-only."""
        parts: list[IntArray] = []
        limit = self.record.end
        for node in self.ancestry():
            record = node.record
            for start, ids in ((record.start, record.output_ids), (record.shared, record.prompt_tail)):
                if start < limit:
                    parts.append(ids[: limit - start])
                    limit = start
        parts.reverse()
        out = np.concatenate(parts)
        out.flags.writeable = False
        return out

    def leaf(self) -> Leaf:
        """Where the path ends, as v2 describes it."""
        return Leaf(
            node_id=self.seq,
            parent=None if self.parent is None else self.parent.seq,
            path_node_ids=tuple(node.seq for node in self.path()),
            response_id=self.record.response_id,
        )

    def chain(self, *, leaf: bool = False, mismatch: Any = None) -> Chain:
        """The records of the path, for assembly; with the leaf's place in the forest under v2."""
        records = [node.record for node in self.path()]
        return Chain(records, self.tokens(), self.leaf() if leaf else None, mismatch)


class SnapshotCache:
    """The tokens of the node that was asked for last, in a buffer that grows with a conversation that goes on.

    What it gives is valid until it is asked again.
    """

    def __init__(self) -> None:
        self._node: Node | None = None
        self._buffer: IntArray = NO_IDS

    def tokens(self, node: Node | None) -> IntArray:
        """As `node.tokens()`; no ids for None."""
        if node is None:
            return NO_IDS
        if node is not self._node:
            if node.parent is self._node:
                self._append(node)
            else:
                self._buffer = np.array(node.tokens())
            self._node = node
        view = self._buffer[: node.record.end]
        view.flags.writeable = False
        return view

    def _append(self, node: Node) -> None:
        record = node.record
        if record.end > len(self._buffer):
            grown = np.empty(2 * record.end, dtype=np.int64)
            grown[: record.shared] = self._buffer[: record.shared]
            self._buffer = grown
        self._buffer[record.shared : record.start] = record.prompt_tail
        self._buffer[record.start : record.end] = record.output_ids


def common_text(node: Node, text: bytes, common_with_parent: int) -> int:
    """How many bytes `text` shares with the node's request text, known how many it shares with the parent's.

    Where the two differ, they are compared message by message: it is the end of the last one that they share.
    """
    own = node.text
    if common_with_parent < own.shared:
        return common_with_parent
    if text.startswith(own.tail, own.shared):
        return own.size
    at = own.shared
    for end in node.ends:
        if not text.startswith(own.tail[at - own.shared : end - own.shared], at):
            break
        at = end
    return at


class KnownEnds(Sequence[int]):
    """Where messages of a request end in its text, as far as it shares its first `limit` bytes with `node`'s request.

    The length and the last one are told without walking to the root.
    """

    def __init__(self, node: Node | None, limit: int) -> None:
        self._all: list[int] | None = None
        while node is not None:
            inside = bisect_right(node.ends, limit)
            limit = min(limit, node.text.shared)
            if inside:
                break
            node = node.parent
        self._node, self._limit = node, limit
        self._own = () if node is None else node.ends[:inside]
        self._length = 0 if node is None else node.message_count - 1 - len(node.ends) + inside

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if at == -1 and self._own:
            return self._own[-1]
        if self._all is None:
            self._all = self._collect()
        return self._all[at]

    def _collect(self) -> list[int]:
        parts = [self._own]
        limit = self._limit
        node = None if self._node is None else self._node.parent
        while node is not None and limit:
            parts.append(node.ends[: bisect_right(node.ends, limit)])
            limit = min(limit, node.text.shared)
            node = node.parent
        return [end for part in reversed(parts) for end in part]


def ids_text(ids: IntArray) -> bytes:
    """Ids in decimal, separated by commas."""
    return orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def extended_ids_text(parent: Node | None, snapshot: IntArray, shared: int, more: IntArray) -> Payload:
    """The text of the first `shared` ids of the parent's `snapshot`, and of `more`."""
    if parent is None or shared == 0:
        return Payload(ids_text(more))
    dropped = snapshot[shared:].tolist()
    kept_size = parent.ids_text.size - sum(len(str(token)) + 1 for token in dropped)
    return Payload(b"," + ids_text(more) if len(more) else b"", parent.ids_text, kept_size)
