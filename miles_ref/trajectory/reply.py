"""A backend's reply, read before anything is committed (session-http.md, A turn: what is refused with 502 and 503).

The reply is cut into raw parts and put together again twice: for the client, without the replay payloads, and for the
record, where the payloads' decoded bytes are kept apart. Only what a sample is made of is parsed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pybase64

from miles_ref.errors import GenerationAbortedError, UpstreamResponseError
from miles_ref.limits import MAX_DEPTH
from miles_ref.tokens.exact_json import is_deeper
from miles_ref.tokens.matching import Message
from miles_ref.trajectory.node import ReplayField
from miles_ref.trajectory.raw_json import (
    Buffer,
    RawJSONError,
    cut_list,
    cut_object,
    dump,
    parse,
    parse_any_depth,
)

REPLAY_FIELDS: tuple[ReplayField, ...] = ("routed_experts", "indexer_topk")
FINISH_REASONS = ("stop", "tool_calls", "length")

_NEEDED = ("output_token_logprobs", "completion_tokens")
_READ = (
    *_NEEDED,
    "prompt_tokens",
    "cached_tokens",
    "weight_version",
    "e2e_latency",
    "indexer_topk_num_layers",
    "spec_accept_token_num",
    "spec_draft_token_num",
    "spec_verify_ct",
)

Piece = bytes | ReplayField
_Part = Buffer | ReplayField


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that is a turn. `meta` has the parsed members of meta_info that a sample is made of."""

    client_body: bytes
    """What the client gets: as the backend sent it, less the replay payloads."""
    pieces: tuple[Piece, ...]
    """The record's form in pieces; a name stands for the base64 text of a payload. Minus infinity is "-inf" here."""
    message: Message
    """The choice's message; its role is assistant where the backend named none."""
    finish_reason: str
    response_id: str | None
    """The reply's `id` where that is a text: samples name their leaf by it."""
    meta: Mapping[str, Any]
    payloads: Mapping[ReplayField, bytes]
    """The decoded replay payloads of those that are there and are base64."""
    refused_payloads: Mapping[ReplayField, str]
    """Why the others that are there cannot be decoded."""
    envelope: Mapping[str, Any]
    """`id`, `created`, `model` and `usage`, parsed, of those that are there."""

    def event_stream(self) -> bytes:
        """The reply as one server-sent event and the end marker (session-http.md, `stream: true`)."""
        delta: dict[str, Any] = {
            "role": self.message["role"],
            "content": self.message["content"],
        }
        if self.message.get("reasoning_content"):
            delta["reasoning_content"] = self.message["reasoning_content"]
        if self.message.get("tool_calls"):
            delta["tool_calls"] = [_indexed(call, at) for at, call in enumerate(self.message["tool_calls"])]
        chunk = {
            "id": self.envelope.get("id"),
            "object": "chat.completion.chunk",
            "created": self.envelope.get("created"),
            "model": self.envelope.get("model"),
            "choices": [{"index": 0, "delta": delta, "finish_reason": self.finish_reason}],
        }
        if self.envelope.get("usage") is not None:
            chunk["usage"] = self.envelope["usage"]
        return b"data: " + dump(chunk) + b"\n\ndata: [DONE]\n\n"


def read_reply(body: bytes) -> Reply:
    """Read the body of a 200.

    Raises GenerationAbortedError (503) for finish_reason abort, UpstreamResponseError (502) for a body that is not of
    the protocol's form. The rules on the values of `meta` are those of the records (`assembly.reading`).
    """
    text, lifted = _lift(body)
    try:
        try:
            return _read(body, text, lifted)
        except _NotLiftable:
            return _read(body, body, {})
        except RawJSONError:
            return _read_spelled_by_python(body)
    except RawJSONError as error:
        raise UpstreamResponseError(f"the backend's reply cannot be read: {error}") from error


def _read(body: bytes, text: bytes, lifted: Mapping[str, memoryview]) -> Reply:
    _check_utf8(text)
    top = cut_object(text)
    choices = cut_list(top["choices"]) if "choices" in top else []
    if not choices:
        raise UpstreamResponseError("the backend's reply has no choices")
    choice = cut_object(choices[0])
    finish_reason = parse(choice["finish_reason"]) if "finish_reason" in choice else None
    if finish_reason == "abort":
        raise GenerationAbortedError("the backend aborted the generation (finish_reason abort): send the request again")
    if finish_reason not in FINISH_REASONS:
        raise UpstreamResponseError(
            f"the backend's reply has finish_reason {finish_reason!r:.100}: "
            f"known are {', '.join(FINISH_REASONS)} and abort"
        )
    message = _message(choice)
    meta = cut_object(choice["meta_info"]) if _present(choice, "meta_info") else None
    if meta is None:
        raise UpstreamResponseError("the backend's reply has no choices[0].meta_info; it must honour return_meta_info")
    for key in _NEEDED:
        if not _present(meta, key):
            raise UpstreamResponseError(f"the backend's reply has no choices[0].meta_info.{key}")
    for field in lifted:
        if bytes(meta.get(field, b"")) != b'"%s"' % _marker(field):
            raise _NotLiftable
    payloads, refused = _payloads(meta, lifted)
    if lifted.keys() & refused.keys():
        raise _NotLiftable
    envelope: dict[str, Any] = {key: parse(top[key]) for key in ("id", "created", "model", "usage") if key in top}
    response_id = envelope.get("id")
    return Reply(
        client_body=_client_body(body, top, choices, choice, meta),
        pieces=_record_pieces(top, choices, choice, meta, payloads),
        message=message,
        finish_reason=finish_reason,
        response_id=response_id if isinstance(response_id, str) else None,
        meta={key: parse_any_depth(meta[key]) for key in _READ if key in meta},
        payloads=payloads,
        refused_payloads=refused,
        envelope=envelope,
    )


class _NotLiftable(Exception):
    """A text was lifted that is no payload of choices[0].meta_info: it must stay where it stands."""


def _check_utf8(text: bytes) -> None:
    try:
        text.isascii() or text.decode()
    except UnicodeDecodeError as error:
        raise RawJSONError(f"not UTF-8: {error}") from error


def _present(members: Mapping[str, Buffer], key: str) -> bool:
    return key in members and bytes(memoryview(members[key])[:5]) != b"null"


def _message(choice: Mapping[str, Buffer]) -> Message:
    message = parse(choice["message"]) if "message" in choice else None
    if not isinstance(message, dict):
        raise UpstreamResponseError("the backend's reply has no choices[0].message that is an object")
    content = message.get("content")
    if not isinstance(content, str):
        raise UpstreamResponseError(
            f"the backend's reply has choices[0].message.content {content!r:.100}: it must be a text, "
            'also beside tool calls ("" where there is none)'
        )
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise UpstreamResponseError(f"the backend's reply has choices[0].message.tool_calls {calls!r:.100}, not a list")
    # What a stream names is what is stored: else a client's own replay of it would not match.
    return message if message.get("role") else {**message, "role": "assistant"}


# Replay payloads


def _lift(body: bytes) -> tuple[bytes, dict[str, memoryview]]:
    """Take long payload texts out of a body before it is read as JSON: the rest, and the texts.

    Each is replaced by a marker. Whether it stood in meta_info shows when the rest has been read.
    """
    lifted: dict[str, memoryview] = {}
    text = body
    for field in REPLAY_FIELDS:
        found = re.search(rb'"%s"\s*:\s*"' % field.encode(), text)
        if found is None:
            continue
        end = text.find(b'"', found.end())
        marker = _marker(field)
        if end < 0 or text.find(b"\\", found.end(), end) >= 0:
            continue
        rest = b"".join((memoryview(text)[: found.end()], marker, memoryview(text)[end:]))
        if rest.count(marker) == 1:
            lifted[field] = memoryview(text)[found.end() : end]
            text = rest
    return text, lifted


def _marker(field: str) -> bytes:
    return f"miles-ref:payload:{field}".encode()


def _payloads(
    meta: Mapping[str, Buffer], lifted: Mapping[str, memoryview]
) -> tuple[dict[ReplayField, bytes], dict[ReplayField, str]]:
    payloads: dict[ReplayField, bytes] = {}
    refused: dict[ReplayField, str] = {}
    for field in REPLAY_FIELDS:
        if not _present(meta, field):
            continue
        text = lifted[field] if field in lifted else parse(meta[field])
        try:
            payloads[field] = _decode_base64(text)
        except ValueError as error:
            refused[field] = str(error)
    return payloads, refused


def _decode_base64(text: Any) -> bytes:
    """The bytes of a canonical base64 text. Raises ValueError for what would not be written the same way again."""
    if not isinstance(text, str | memoryview):
        raise ValueError(f"is {text!r:.100}, not a text")
    try:
        data: bytes = pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"is not base64: {error}") from error
    # Only the last four letters can hold bits that do not belong to a byte.
    rest = len(data) % 3
    last = text[-4:] if isinstance(text, str) else bytes(text[-4:]).decode("ascii")
    if rest and pybase64.b64encode(data[-rest:]).decode() != last:
        raise ValueError(f"is not base64: its end {last!r} has stray bits")
    return data


# Putting the parts together again


def _client_body(
    body: bytes,
    top: Mapping[str, Buffer],
    choices: Sequence[Buffer],
    choice: Mapping[str, Buffer],
    meta: Mapping[str, Buffer],
) -> bytes:
    if not any(field in meta for field in REPLAY_FIELDS):
        return body
    kept: dict[str, list[_Part]] = {key: [raw] for key, raw in meta.items() if key not in REPLAY_FIELDS}
    return b"".join(part for part in _reassemble(top, choices, choice, kept) if not isinstance(part, str))


def _record_pieces(
    top: Mapping[str, Buffer],
    choices: Sequence[Buffer],
    choice: Mapping[str, Buffer],
    meta: Mapping[str, Buffer],
    payloads: Mapping[ReplayField, bytes],
) -> tuple[Piece, ...]:
    members: dict[str, list[_Part]] = {key: [raw] for key, raw in meta.items()}
    for field in payloads:
        members[field] = [b'"', field, b'"']
    pieces: list[Piece] = []
    run: list[Buffer] = []
    for part in _reassemble(top, choices, choice, members):
        if isinstance(part, str):
            pieces += (b"".join(run), part)
            run = []
        else:
            run.append(part)
    return (*pieces, b"".join(run))


def _reassemble(
    top: Mapping[str, Buffer],
    choices: Sequence[Buffer],
    choice: Mapping[str, Buffer],
    meta: Mapping[str, list[_Part]],
) -> list[_Part]:
    """The reply with another meta_info in its first choice."""
    first = _object({**{key: [raw] for key, raw in choice.items()}, "meta_info": _object(meta)})
    others: list[_Part] = [part for other in choices[1:] for part in (b",", other)]
    return _object({**{key: [raw] for key, raw in top.items()}, "choices": [b"[", *first, *others, b"]"]})


def _object(members: Mapping[str, list[_Part]]) -> list[_Part]:
    parts: list[_Part] = []
    for key, value in members.items():
        parts += (b"," if parts else b"{", dump(key), b":", *value)
    parts.append(b"}" if parts else b"{}")
    return parts


def _indexed(call: Any, at: int) -> Any:
    return {**call, "index": at} if isinstance(call, dict) else call


# Replies with NaN and Infinity


def _read_spelled_by_python(body: bytes) -> Reply:
    """Read a body that json.dumps of Python wrote, with NaN and Infinity, which are not JSON.

    In the record they become the texts "nan", "inf" and "-inf"; the client gets what the backend wrote.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RawJSONError(str(error) or "nested too deeply") from error
    if is_deeper(value, MAX_DEPTH):
        raise RawJSONError("nested too deeply")
    try:
        legal = json.dumps(_named(value), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RawJSONError(f"a lone surrogate: {error}") from error
    reply = _read(body, legal, {})
    meta = value["choices"][0]["meta_info"]
    if any(field in meta for field in REPLAY_FIELDS):
        for field in REPLAY_FIELDS:
            meta.pop(field, None)
        body = json.dumps(value, ensure_ascii=False).encode()
    return replace(reply, client_body=body)


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, list):
        return [_named(item) for item in value]
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    return value
