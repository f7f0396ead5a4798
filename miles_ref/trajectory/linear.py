"""v1: a session is one chain of turns, and may step back over its last one (session-http.md, v1: linear)."""

from __future__ import annotations

from miles_ref.errors import MessageValidationError
from miles_ref.records import IntArray
from miles_ref.tokens.matching import Message, first_difference
from miles_ref.trajectory.node import KnownEnds, Node, SnapshotCache, common_text
from miles_ref.trajectory.request import MessageList
from miles_ref.trajectory.turn import Attachment, Matching


class LinearTrajectory:
    """The turns of a v1 session."""

    def __init__(self, matching: Matching) -> None:
        self._matching = matching
        self._path: list[Node] = []
        self._messages: list[Message] = []
        self._commits = 0
        self._snapshots = SnapshotCache()

    @property
    def next_seq(self) -> int:
        """The number of commits so far: the id of the next node."""
        return self._commits

    def path(self) -> list[Node]:
        """The nodes of the chain, in order."""
        return list(self._path)

    def nodes(self) -> list[Node]:
        """As `path`: what was rolled back is gone."""
        return list(self._path)

    def leaves(self) -> list[Node]:
        """The last node, if any."""
        return self._path[-1:]

    def attach(self, messages: MessageList, in_flight: int) -> Attachment:
        """Where the request goes on: after the last turn, or, as a retry, after the one before it.

        Raises MessageValidationError (400) for a request that leaves the conversation further back.
        """
        tip = self._path[-1] if self._path else None
        if (
            tip is not None
            and self._matching.by_text
            and messages.begins_with == tip.seq
            and self._match(messages, tip.text.size) == len(self._messages)
        ):
            # Nothing of what the tip's own request said is compared again.
            return Attachment(tip, self._commits, tip.text.size)
        commons = self._common_texts(messages.text)
        matched = self._match(messages, commons[-1] if commons else 0)
        if matched == len(self._messages):
            return self._attachment(len(self._path), commons)
        kept = sum(node.message_count <= matched for node in self._path)
        if kept < len(self._path) - 1:
            raise MessageValidationError(self._too_far_back(messages, matched, kept))
        return self._attachment(kept, commons)

    def snapshot(self, attachment: Attachment) -> IntArray:
        """Prompt + output of the attachment's parent, int64; valid until the next call."""
        return self._snapshots.tokens(attachment.parent)

    def can_commit(self, attachment: Attachment) -> bool:
        """False if another turn was committed since the request attached: the session has moved on."""
        return attachment.generation == self._commits

    def commit(self, attachment: Attachment, node: Node) -> None:
        """Put the node after its attachment's parent; later nodes are forgotten."""
        kept = 0 if attachment.parent is None else self._path.index(attachment.parent) + 1
        del self._path[kept:]
        del self._messages[attachment.matched :]
        self._path.append(node)
        self._messages.extend(node.messages)
        self._commits += 1

    def _attachment(self, kept: int, commons: list[int]) -> Attachment:
        if not kept:
            return Attachment(None, self._commits)
        return Attachment(self._path[kept - 1], self._commits, commons[kept - 1] if commons else None)

    def _match(self, messages: MessageList, common_with_tip: int) -> int:
        """How many of the stored messages the request replays from the start."""
        known = KnownEnds(self._path[-1] if self._path else None, common_with_tip)
        messages.know(known)
        limit = min(len(messages), len(self._messages))
        return next(
            (at for at in range(len(known), limit) if not self._matching.matcher(self._messages[at], messages[at])),
            limit,
        )

    def _common_texts(self, text: bytes) -> list[int]:
        """For each node of the chain, how many bytes its request's text shares with `text`; [] if text says nothing."""
        commons: list[int] = []
        if self._matching.by_text:
            common = 0
            for node in self._path:
                common = common_text(node, text, common)
                commons.append(common)
        return commons

    def _too_far_back(self, messages: MessageList, matched: int, kept: int) -> str:
        where = (
            f"the request ends after message {matched - 1}"
            if matched == len(messages)
            else f"message {matched} differs: {first_difference(self._messages[matched], messages[matched])}"
        )
        return (
            f"the request does not extend the conversation of {len(self._messages)} messages: {where}; going back "
            f"there would drop {len(self._path) - kept} generated turns, at most one can be retried"
        )
