"""From a turn and the backend's reply to the node that is committed (session-http.md, A turn, step 3).

Whatever could keep the session from being dumped or assembled later is refused here, before anything has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_ref.assembly.reading import Meta, read_layers, read_meta
from miles_ref.errors import FieldError, TokenizationError, UpstreamResponseError
from miles_ref.records import AssemblySettings, IntArray, Payload, Record
from miles_ref.tokens.matching import Message
from miles_ref.tokens.mismatch import SegmentIndex
from miles_ref.tokens.tokenizer import Tokenizer
from miles_ref.trajectory.node import Node, ReplayField, ids_text
from miles_ref.trajectory.raw_json import parse
from miles_ref.trajectory.replay_rules import check_replay
from miles_ref.trajectory.reply import Reply
from miles_ref.trajectory.turn import Turn


@dataclass(frozen=True, slots=True)
class Times:
    """When the request arrived and when its turn is committed, epoch seconds."""

    requested: float
    committed: float


class Committer:
    """Builds nodes; pure, so that a refusal leaves the session as it was."""

    def __init__(self, tokenizer: Tokenizer, settings: AssemblySettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

    def read(self, turn: Turn, reply: Reply) -> Meta:
        """The reply's meta_info. Its rules hold for every reply, whether its turn can still be committed or not.

        Raises UpstreamResponseError (502).
        """
        try:
            meta = read_meta(reply.meta, self._settings)
            _check_counts(reply, turn, len(meta.output_ids), meta.prompt_tokens)
        except FieldError as error:
            raise _unusable(error) from error
        return meta

    def node(self, turn: Turn, reply: Reply, meta: Meta, seq: int, times: Times) -> Node:
        """The node of a finished turn; `meta` is what `read` gave.

        Raises UpstreamResponseError (502) for a reply that breaks a rule, TokenizationError (500) for tokens that do
        not go on from the parent's.
        """
        parent = turn.parent
        text = _shared_text(turn, parent)
        try:
            record, index = self._record(turn, reply, meta, times, text)
            check_replay(record, parent, reply.refused_payloads, self._settings)
        except FieldError as error:
            raise _unusable(error) from error
        floor = self._check_tokens(turn, record)
        output_text = (b"," if turn.ids_text.size and len(record.output_ids) else b"") + ids_text(record.output_ids)
        prompt = turn.ids_text
        return Node(
            seq=seq,
            parent=parent,
            messages=(*turn.messages, reply.message),
            message_count=len(turn.request) + 1,
            text=text,
            ends=turn.request.ends(text.shared),
            members=turn.members,
            tools=turn.tools,
            ids_text=Payload(prompt.tail + output_text, prompt.parent, prompt.shared),
            prompt_size=prompt.size,
            response=reply.pieces,
            record=record,
            index=index,
            floor=floor,
            size=_size(reply, record, text),
        )

    def _record(self, turn: Turn, reply: Reply, meta: Meta, times: Times, text: Payload) -> tuple[Record, SegmentIndex]:
        indexer = self._payload("indexer_topk", turn, reply)
        layers = None
        if self._settings.indexer_topk and indexer is not None:
            layers = read_layers(reply.meta)
        try:
            prompt, index = self._indices(turn, meta.output_ids)
            output_text = self._text(index, meta.output_ids)
        except TokenizationError as error:
            raise FieldError("output_token_logprobs", f"has ids that cannot be decoded: {error}") from error
        record = Record(
            shared=turn.shared,
            prompt_tail=turn.tail,
            output_ids=meta.output_ids,
            log_probs=meta.log_probs,
            finish_reason=reply.finish_reason,
            timestamp=times.committed,
            request_timestamp=times.requested,
            e2e_latency=meta.e2e_latency,
            weight_version=meta.weight_version,
            cached_tokens=meta.cached_tokens,
            prompt_tokens=meta.prompt_tokens,
            spec_info=meta.spec_info,
            response_id=reply.response_id,
            routed_experts=self._payload("routed_experts", turn, reply),
            routed_experts_start=turn.experts_start,
            indexer_topk=indexer,
            indexer_layers=layers,
            messages=_messages(text, reply.message),
            prompt_tail_text=self._text(prompt, turn.tail),
            output_text=output_text,
        )
        return record, index

    def _indices(self, turn: Turn, output_ids: IntArray) -> tuple[SegmentIndex, SegmentIndex]:
        """The segments of the prompt, and those of prompt + output, which decodes the output."""
        tail, parent = turn.tail, turn.parent
        before = None if parent is None else parent.index
        prompt = SegmentIndex.extend(before, turn.shared, tail, self._tokenizer, encoded=len(tail))
        return prompt, SegmentIndex.extend(prompt, turn.start, output_ids, self._tokenizer)

    def _text(self, index: SegmentIndex, ids: IntArray) -> str:
        """decode(ids), put together from what the index of these ids has decoded."""
        if self._tokenizer.pieces is None:
            return self._tokenizer.decode(ids)
        first = index.kept
        return "".join(
            self._tokenizer.decode(ids[start - first : end - first]) if text is None else text
            for start, end, text, _ in index.fragments
        )

    def _payload(self, field: ReplayField, turn: Turn, reply: Reply) -> Payload | None:
        data = reply.payloads.get(field)
        if data is None:
            return None
        if field == "routed_experts" and self._settings.additional_r3:
            return Payload(data)  # It goes on where the parent's ends: there is nothing to look for in common.
        parent = turn.parent
        while parent is not None and getattr(parent.record, field) is None:
            parent = parent.parent
        return Payload.of(data, None if parent is None else getattr(parent.record, field))

    def _check_tokens(self, turn: Turn, record: Record) -> int:
        """The commit check (tokens.md); gives the node's floor."""
        max_trim = self._settings.max_trim_tokens
        own = max(record.start, record.end - max_trim)
        parent = turn.parent
        if parent is None:
            return own
        if record.shared < parent.floor:
            wanted = parent.tokens()[record.shared : parent.floor]
            got = np.concatenate((record.prompt_tail, record.output_ids))[: len(wanted)]
            same = len(got) == len(wanted) and bool((got == wanted).all())
            if not same:
                differing = next((at for at, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(got))
                raise TokenizationError(
                    f"prompt + completion ({record.end} ids) do not go on from the turn before ({parent.record.end} "
                    f"ids, of which the last {max_trim} may be trimmed): the first differing index is "
                    f"{record.shared + differing}"
                )
        return max(parent.floor, own)


def _unusable(error: FieldError) -> UpstreamResponseError:
    return UpstreamResponseError(f"the backend's reply cannot be used: meta_info.{error}")


def _check_counts(reply: Reply, turn: Turn, output_length: int, prompt_tokens: int) -> None:
    completion_tokens = reply.meta["completion_tokens"]
    if isinstance(completion_tokens, bool) or completion_tokens != output_length:
        raise FieldError(
            "completion_tokens", f"is {completion_tokens!r:.100}, output_token_logprobs has {output_length} entries"
        )
    if reply.meta.get("prompt_tokens") is not None and prompt_tokens != turn.start:
        raise FieldError(
            "prompt_tokens",
            f"is {prompt_tokens}, but {turn.start} input_ids were sent: the backend did not use the tokens that it was "
            "given (does a router on the way drop input_ids?)",
        )


def _messages(text: Payload, reply: Message) -> Callable[[], list[Any]]:
    """`request.messages + [choice.message]`, parsed again when somebody asks."""
    return lambda: [*parse(text.to_bytes() + b"]"), reply]


def _shared_text(turn: Turn, parent: Node | None) -> Payload:
    """The text of the request's messages, without what it has in common with the parent's."""
    text = turn.request.text
    if parent is None:
        return Payload(text)
    shared = turn.attachment.common_text
    if shared is None:
        shared = parent.text.common(text)
    return Payload(text[shared:], parent.text, shared)


def _size(reply: Reply, record: Record, text: Payload) -> int:
    pieces = sum(len(piece) for piece in reply.pieces)
    payloads = sum(len(one.tail) for one in (record.routed_experts, record.indexer_topk) if one is not None)
    ids = record.prompt_tail.nbytes + record.output_ids.nbytes + record.log_probs.nbytes
    texts = sys.getsizeof(record.prompt_tail_text) + sys.getsizeof(record.output_text)
    return 2 * len(text.tail) + pieces + payloads + ids + texts
