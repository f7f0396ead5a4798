"""From a request and where it attaches to the turn that goes to the backend (session-http.md, A turn, step 1)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_ref.errors import MessageValidationError
from miles_ref.records import IntArray, Payload
from miles_ref.tokens.matching import Matcher, Message
from miles_ref.tokens.rendering import Renderer
from miles_ref.trajectory.node import Node, extended_ids_text
from miles_ref.trajectory.raw_json import cut_object, dump, join_object, object_parts
from miles_ref.trajectory.request import ChatRequest, MessageList

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Matching:
    """How replayed messages are matched. `by_text`: messages with the same text match without asking the matcher,
    which holds for every built-in one; a custom one is always asked."""

    matcher: Matcher
    by_text: bool = True


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a request attaches: below `parent`, whose path its first messages stand for; None: it begins anew.

    `generation` is the session's number of commits when this was found, `common_text` how many bytes the texts of the
    two requests' messages share at their beginning, None where nobody has compared them.
    """

    parent: Node | None
    generation: int
    common_text: int | None = None
    overlap: int = 0
    """v2: how many of its first messages agreed with stored ones on any path."""

    @property
    def matched(self) -> int:
        """How many stored messages stand for the request's first ones."""
        return 0 if self.parent is None else self.parent.message_count


def append_only_error(what: str, node: Node | None, overlap: int, length: int) -> MessageValidationError:
    """The refusal (400) of a request of `length` messages that would not leave the forest one chain: the contract's
    attach diagnostics. `node` is where it attaches, `overlap` how many messages agreed on any path."""
    at, matched = ("no node", 0) if node is None else (f"node {node.seq}", node.message_count)
    return MessageValidationError(
        f"append-only session: {what}. It attaches to {at}: {matched} messages matched, best overlap {overlap}, "
        f"request length {length}. A second root or a sibling is not allowed"
    )


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """What the server sets in every forwarded request, whatever the client sent.

    `additional_r3`: ask only for the replay rows that the parent does not have (pipeline.md, Additional replay rows).
    """

    routed_experts: bool = False
    indexer_topk: bool = False
    additional_r3: bool = False
    lora_path: str | None = None
    members: Mapping[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        members = {"logprobs": b"true", "return_meta_info": b"true", "no_stop_trim": b"false"}
        if self.routed_experts:
            members["return_routed_experts"] = b"true"
        if self.indexer_topk:
            members["return_indexer_topk"] = b"true"
        if self.lora_path is not None:
            members["lora_path"] = dump(self.lora_path)
        object.__setattr__(self, "members", members)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that is ready for the backend. Nothing of the session has changed yet.

    The prompt is the first `shared` ids of the parent's prompt + output, followed by `tail`. `parent` is None for a
    root, also where a branch could not inherit its attachment's tokens.
    """

    attachment: Attachment
    parent: Node | None
    messages: tuple[Message, ...]
    """Stored messages that the node will add, before its reply."""
    request: MessageList
    members: Mapping[str, bytes]
    tools: Any
    shared: int
    tail: IntArray
    ids_text: Payload
    """The prompt's ids, in decimal, separated by commas."""
    experts_start: int | None

    @property
    def start(self) -> int:
        """len(input_ids)."""
        return self.shared + len(self.tail)

    def body(self) -> bytes:
        """The request as it goes to the backend: the client's own texts, but for what the server sets."""
        parts = object_parts(self.members.items())[:-1]
        parts += (b',"messages":', self.request.text, b'],"input_ids":[', *self.ids_text.chunks(self.ids_text.size))
        return b"".join((*parts, b"]}"))


class TurnPlanner:
    """Renders turns. `tree` is for v2: suffixes may carry client assistants, but not under `strict` append-only."""

    def __init__(
        self, renderer: Renderer, forward: ForwardSettings, *, tree: bool = False, strict: bool = False
    ) -> None:
        self._renderer = renderer
        self._forward = forward
        self._tree = tree
        self._strict = strict

    def check(self, request: ChatRequest) -> None:
        """What can be said of a request before it is attached.

        Raises MessageValidationError (400) for template kwargs or tools that are not of their form.
        """
        self._renderer.merge_kwargs(request.value("chat_template_kwargs"))
        self._renderer.check_tools(request.value("tools"))

    def plan(self, attachment: Attachment, snapshot: IntArray, request: ChatRequest) -> Turn:
        """The turn of a request that `check` let pass; `snapshot` are the ids of the attachment's parent (int64).

        Raises MessageValidationError (400) for roles that may not be appended, and whatever the template refuses.
        """
        parent, tools = attachment.parent, request.value("tools")
        kwargs = self._renderer.merge_kwargs(request.value("chat_template_kwargs"))
        appended: tuple[Message, ...] = tuple(request.messages[attachment.matched :])
        if parent is None:
            shared, tail = 0, self._renderer.first(appended, tools, kwargs)
        else:
            self._renderer.check_append_roles(
                appended,
                client_assistants_allowed=self._tree and not self._strict,
                first_index=attachment.matched,
            )
            parent, appended, shared, tail = self._continue(attachment, parent, snapshot, appended, tools, kwargs)
        if parent is not None:
            _check_growth(parent, snapshot, shared, tail)
        experts_start = None
        if self._forward.additional_r3:
            experts_start = max(0, parent.record.end - 1) if parent is not None else 0
        return Turn(
            attachment=attachment,
            parent=parent,
            messages=appended,
            request=request.messages,
            members=self._members(request, parent, experts_start),
            tools=tools,
            shared=shared,
            tail=tail,
            ids_text=extended_ids_text(parent, snapshot, shared, tail),
            experts_start=experts_start,
        )

    def _continue(
        self,
        attachment: Attachment,
        parent: Node,
        snapshot: IntArray,
        appended: tuple[Message, ...],
        tools: Any,
        kwargs: Mapping[str, Any],
    ) -> tuple[Node | None, tuple[Message, ...], int, IntArray]:
        if not self._tree or all(message.get("role") != "assistant" for message in appended):
            extension = self._renderer.extend(snapshot, parent.messages[-1], appended, tools, kwargs)
            return parent, appended, extension.kept, extension.tail
        stored = parent.stored_messages()
        whole = (*stored, *appended)
        spliced = self._renderer.splice(snapshot, stored, whole, tools, kwargs)
        if spliced.kept is not None:
            return parent, appended, spliced.kept, spliced.ids[spliced.kept :].copy()
        if self._strict:
            raise append_only_error(
                f"the appended client assistant cannot be joined to the tokens of node {parent.seq}",
                parent,
                attachment.overlap,
                attachment.matched + len(appended),
            )
        logger.warning(
            "a branch with client assistants does not inherit the tokens of node %d (%d ids): it becomes a new root",
            parent.seq,
            len(snapshot),
        )
        return None, whole, 0, spliced.ids

    def _members(self, request: ChatRequest, parent: Node | None, experts_start: int | None) -> dict[str, bytes]:
        members = {**request.members, **self._forward.members}
        for key in ("stream", "stream_options", "input_ids", "chat_template_kwargs"):
            members.pop(key, None)
        kwargs = {key: dump(value) for key, value in self._renderer.template_kwargs.items()}
        if request.value("chat_template_kwargs") is not None:
            kwargs |= {key: bytes(raw) for key, raw in cut_object(request.members["chat_template_kwargs"]).items()}
        if kwargs:
            members["chat_template_kwargs"] = join_object(kwargs)
        if experts_start is not None:
            members["routed_experts_start_len"] = b"%d" % experts_start
        if parent is not None:  # Keep one copy of what a client repeats in every request, tools above all.
            members = {
                key: parent.members[key] if parent.members.get(key) == raw else raw for key, raw in members.items()
            }
        return members


def _check_growth(parent: Node, snapshot: IntArray, shared: int, tail: IntArray) -> None:
    """A fold needs an observation between two completions; a prompt that adds nothing could never be assembled."""
    if parent.is_truncated or shared + len(tail) > parent.record.end:
        return
    if (snapshot[shared : shared + len(tail)] == tail).all():
        raise MessageValidationError(
            f"the request adds no token to the {parent.record.end} ids of the conversation: "
            "append a message, or use a template with a generation prompt"
        )
