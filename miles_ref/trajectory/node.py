"""A committed turn as what it added to the turn before it, and views on the path that leads to it.

A node costs its own tokens, messages and reply. Whole prompts, texts and token arrays are laid out from the path when
somebody asks for them (session-http.md, Life of a session: storage is linear).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from miles_ref.records import Chain, IntArray, Leaf, Payload, Record
from miles_ref.tokens.mismatch import SegmentIndex
from miles_ref.trajectory.request import Message

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
        out = np.empty(self.record.end, dtype=np.int64)
        limit = self.record.end
        for node in self.ancestry():
            record = node.record
            for start, ids in ((record.start, record.output_ids), (record.shared, record.prompt_tail)):
                if start < limit:
                    out[start:limit] = ids[: limit - start]
                    limit = start
            if not limit:
                break
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


def common_text(node: Node, text: bytes, common_with_parent: int) -> int:
    """How many bytes `text` shares with the node's request text, known how many it shares with the parent's."""
    own = node.text
    if common_with_parent < own.shared:
        return common_with_parent
    return own.shared + Payload(own.tail).common(text[own.shared : own.shared + len(own.tail)])


def messages_within(node: Node | None, limit: int) -> tuple[int, int]:
    """Of the messages of the node's request those whose text ends within the first `limit` bytes: count, and end."""
    while node is not None:
        inside = sum(end <= limit for end in node.ends)
        if inside:
            return node.message_count - 1 - (len(node.ends) - inside), node.ends[inside - 1]
        limit = min(limit, node.text.shared)
        node = node.parent
    return 0, 0


def ids_text(ids: IntArray) -> bytes:
    """Ids in decimal, separated by commas."""
    return ",".join(map(str, ids.tolist())).encode()


def extended_ids_text(parent: Node | None, shared: int, more: IntArray) -> Payload:
    """The text of the parent's first `shared` ids and of `more`."""
    if parent is None or shared == 0:
        return Payload(ids_text(more))
    dropped = parent.tokens()[shared:] if shared < parent.record.end else ()
    kept_size = parent.ids_text.size - sum(len(str(token)) + 1 for token in dropped)
    return Payload(b"," + ids_text(more) if len(more) else b"", parent.ids_text, kept_size)
