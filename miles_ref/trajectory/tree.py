"""v2: a session is a forest; a request goes on from the deepest node that it replays (session-http.md, v2: tree)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from miles_ref.errors import MessageValidationError, TruncatedGenerationError
from miles_ref.records import IntArray
from miles_ref.trajectory.node import KnownEnds, Node, SnapshotCache, common_text
from miles_ref.trajectory.request import MessageList
from miles_ref.trajectory.turn import Attachment, Matching, append_only_error

MAX_NODES = 1024


@dataclass(frozen=True, slots=True)
class _Found:
    """Result of a search: the node whose whole path the request begins with, how many bytes the two texts share, and
    how many messages agreed anywhere."""

    node: Node | None
    common_text: int
    overlap: int


class TreeTrajectory:
    """The turns of a v2 session. Nothing is ever removed. `strict`: the forest stays one chain (append-only)."""

    def __init__(self, matching: Matching, *, strict: bool = False, max_nodes: int = MAX_NODES) -> None:
        self._matching = matching
        self._strict = strict
        self._max_nodes = max_nodes
        self._nodes: list[Node] = []
        self._children: dict[int | None, list[Node]] = {None: []}
        self._snapshots = SnapshotCache()

    @property
    def next_seq(self) -> int:
        """The number of commits so far: the id of the next node."""
        return len(self._nodes)

    def path(self) -> list[Node]:
        """The nodes from the root to the last committed one."""
        return self._nodes[-1].path() if self._nodes else []

    def nodes(self) -> list[Node]:
        """All nodes, in the order of their commits."""
        return list(self._nodes)

    def leaves(self) -> list[Node]:
        """The nodes without children, in the order of their commits."""
        return [node for node in self._nodes if not self._children[node.seq]]

    def attach(self, messages: MessageList, in_flight: int) -> Attachment:
        """Where the request goes on. `in_flight` turns are under way, each of which may become a node.

        Raises TruncatedGenerationError (409) where that node's generation was cut off, MessageValidationError (400)
        when the forest is full, or would not stay one chain under strict append-only.
        """
        found = self._find(messages)
        if self._strict:
            self._check_append_only(found, messages)
        if found.node is not None and found.node.is_truncated:
            raise TruncatedGenerationError(
                f"the request goes on from node {found.node.seq} ({found.node.message_count} messages), whose "
                "generation ended with finish_reason length; a truncated turn cannot be extended: retry it"
            )
        if len(self._nodes) + in_flight >= self._max_nodes:
            raise MessageValidationError(
                f"the session has {len(self._nodes)} nodes and {in_flight} turns in flight, at most {self._max_nodes} "
                "are allowed: most likely the client does not replay its history verbatim, so that each request "
                f"begins a branch (this one matched {0 if found.node is None else found.node.message_count} of "
                f"{len(messages)} messages)"
            )
        return Attachment(found.node, len(self._nodes), found.common_text, found.overlap)

    def snapshot(self, attachment: Attachment) -> IntArray:
        """Prompt + output of the attachment's parent, int64; valid until the next call."""
        return self._snapshots.tokens(attachment.parent)

    def can_commit(self, attachment: Attachment) -> bool:
        """False if, under strict append-only, the leaf moved since the request attached."""
        return not self._strict or attachment.generation == len(self._nodes)

    def commit(self, attachment: Attachment, node: Node) -> None:
        """Add the node under its parent, or as a root."""
        self._nodes.append(node)
        self._children[None if node.parent is None else node.parent.seq].append(node)
        self._children[node.seq] = []

    def _find(self, messages: MessageList) -> _Found:
        commons, known = self._know_by_text(messages)
        # A text that goes on after a node's reply was matched with that reply when its own node was attached.
        certain = set() if known is None or known.parent is None else {node.seq for node in known.parent.ancestry()}
        best: Node | None = None
        best_common = overlap = 0
        total = len(messages)
        level = [(child, 0) for child in self._children[None]]
        while level:
            node, common_with_parent = level.pop()
            common = commons.get(node.seq)
            if common is None:
                common = common_text(node, messages.text, common_with_parent)
            agreed = node.message_count if node.seq in certain else self._agree(node, messages, total, common)
            overlap = max(overlap, agreed)
            if agreed < node.message_count:
                continue
            if best is None or (node.message_count, node.seq) > (best.message_count, best.seq):
                best, best_common = node, common
            level += [(child, common) for child in self._children[node.seq]]
        return _Found(best, best_common, overlap)

    def _know_by_text(self, messages: MessageList) -> tuple[dict[int, int], Node | None]:
        """Go down along the nodes whose text the request's text begins with, and tell the messages what is known.

        How many bytes the nodes on the way and beside it share with the request, by seq, and the node with the longest
        text that the request's begins with.
        """
        commons: dict[int, int] = {}
        deepest: Node | None = None
        closest: tuple[int, Node | None] = (0, None)
        level = [(child, 0) for child in self._children[None]] if self._matching.by_text else []
        while level:
            node, common_with_parent = level.pop()
            common = commons[node.seq] = common_text(node, messages.text, common_with_parent)
            if common > closest[0]:
                closest = common, node
            if common == node.text.size:
                if deepest is None or common > deepest.text.size:
                    deepest = node
                level += [(child, common) for child in self._children[node.seq]]
        messages.know(KnownEnds(closest[1], closest[0]))
        return commons, deepest

    def _agree(self, node: Node, messages: MessageList, total: int, common: int) -> int:
        """How many messages of the node's path the request, of `total` messages, replays; the parent's are known to
        agree."""
        at = node.message_count - len(node.messages)
        appended = len(node.messages) - 1
        same_text = bisect_right(node.ends[len(node.ends) - appended :], common) if self._matching.by_text else 0
        for stored in node.messages[same_text:]:
            if at + same_text >= total or not self._matching.matcher(stored, messages[at + same_text]):
                break
            at += 1
        return at + same_text

    def _check_append_only(self, found: _Found, messages: MessageList) -> None:
        leaf = self._nodes[-1] if self._nodes else None
        if found.node is leaf:
            return
        assert leaf is not None
        raise append_only_error(
            f"the request does not extend the leaf (node {leaf.seq}, {leaf.message_count} messages)",
            found.node,
            found.overlap,
            len(messages),
        )
