"""Reading a record: what a sample is made of, and what is refused (pipeline.md, Record and compute).

The rules stand here once. The assembler answers a FieldError with 422; the session server calls the same functions
before it commits and answers 502, so that what was committed can always be assembled.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64

from miles_ref.errors import AssemblyError, FieldError
from miles_ref.records import AssemblySettings, FloatArray, IntArray, Payload, Record
from miles_ref.sample import SpecInfo, Status

SPEC_COUNTERS = ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct")
_STATUS = {
    "stop": Status.COMPLETED,
    "tool_calls": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
}
_NO_IDS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Meta:
    """The parsed values of one reply's meta_info: ids int64, log probs float64 (natural), latency in seconds."""

    output_ids: IntArray
    log_probs: FloatArray
    weight_version: str | None
    cached_tokens: int
    prompt_tokens: int
    e2e_latency: float | None
    spec_info: SpecInfo


def read_meta(meta: Mapping[str, Any], settings: AssemblySettings) -> Meta:
    """meta_info without its replay payloads. Counters of speculative decoding are read only where it is configured.

    Raises FieldError.
    """
    output_ids, log_probs = read_output(meta.get("output_token_logprobs"))
    return Meta(
        output_ids=output_ids,
        log_probs=log_probs,
        weight_version=_weight_version(meta.get("weight_version")),
        cached_tokens=read_count(meta, "cached_tokens"),
        prompt_tokens=read_count(meta, "prompt_tokens"),
        e2e_latency=read_seconds(meta.get("e2e_latency"), "e2e_latency"),
        spec_info=_spec_info(meta) if settings.speculative else SpecInfo(),
    )


def read_output(pairs: Any) -> tuple[IntArray, FloatArray]:
    """Token ids and log probs of `[[logprob, token_id, ...], ...]`, read-only. -inf may be the text "-inf".

    Raises FieldError for a log prob that is null, NaN or plus infinity.
    """
    field = "output_token_logprobs"
    if not isinstance(pairs, list):
        raise FieldError(field, "is absent" if pairs is None else f"is {pairs!r:.80}, not a list")
    if not set(map(type, pairs)) <= {list, tuple} or min(map(len, pairs), default=2) < 2:
        at = next(at for at, pair in enumerate(pairs) if type(pair) not in (list, tuple) or len(pair) < 2)
        raise FieldError(f"{field}[{at}]", f"is {pairs[at]!r:.80}, not [logprob, token_id, ...]")
    ids = read_ids([pair[1] for pair in pairs], field)
    column = [pair[0] for pair in pairs]
    if not set(map(type, column)) <= {float, int}:
        column = [_log_prob(value, f"{field}[{at}]") for at, value in enumerate(column)]
    try:
        log_probs = np.array(column, dtype=np.float64)
    except OverflowError as error:
        raise FieldError(field, f"has a log prob beyond float64: {error}") from error
    refused = ~(log_probs < np.inf)  # NaN too
    if refused.any():
        at = int(refused.argmax())
        raise FieldError(f"{field}[{at}]", f"has the log prob {log_probs[at]} (NaN and +inf are none)")
    log_probs.flags.writeable = False
    return ids, log_probs


def _log_prob(value: Any, field: str) -> float | int:
    if value == "-inf":
        return -math.inf
    if type(value) is not float and type(value) is not int:
        raise FieldError(field, f"has the log prob {'null' if value is None else repr(value)[:80]}, which is no number")
    return value


def read_ids(ids: Any, field: str) -> IntArray:
    """A list of token ids as a read-only int64 array. Raises FieldError for what is absent or no id."""
    if ids is None:
        raise FieldError(field, "is absent: the tokens are not known")
    if not isinstance(ids, list):
        raise FieldError(field, f"is {ids!r:.80}, not a list of token ids")
    array = _NO_IDS
    with contextlib.suppress(OverflowError):
        if set(map(type, ids)) <= {int}:
            array = np.array(ids, dtype=np.int64)
    if len(array) < len(ids) or (len(array) and array.min() < 0):
        at = next(at for at, token in enumerate(ids) if type(token) is not int or not 0 <= token < 2**63)
        raise FieldError(f"{field}[{at}]", f"has the token id {ids[at]!r:.80}, which is no int64 id")
    array.flags.writeable = False
    return array


def read_count(meta: Mapping[str, Any], key: str) -> int:
    """A counter of meta_info; absent or null counts 0, and 3.0 is 3, as JSON has it. Raises FieldError."""
    value = meta.get(key)
    if value is None:
        return 0
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value < 2**63:
        raise FieldError(key, f"is {value!r:.100}, not a count")
    return value


def _weight_version(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FieldError("weight_version", f"is {value!r:.100}, not a text or a number")
    return repr(value)


def read_seconds(value: Any, field: str) -> float | None:
    """Seconds as they were given; absent or null is None. Raises FieldError for what is no finite number."""
    if value is None:
        return None
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise FieldError(field, f"is {value!r:.100}, not a finite number of seconds")
    seconds: float = value
    return seconds


def _spec_info(meta: Mapping[str, Any]) -> SpecInfo:
    counts = {name: read_count(meta, name) for name in SPEC_COUNTERS}
    return SpecInfo(**counts, completion_token_num=read_count(meta, "completion_tokens"))


def read_payload(field: str, text: str | bytes | memoryview) -> bytes:
    """The bytes of a replay payload's base64 text. Raises FieldError."""
    try:
        data: bytes = pybase64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise FieldError(field, f"{text!r:.40} is not base64: {error}") from error
    return data


class Undecodable(Payload):
    """A payload whose text is not base64. `check` and its bytes raise the FieldError that says so; its size is 0."""

    __slots__ = ("_error",)

    def __init__(self, error: FieldError) -> None:
        super().__init__(b"")
        self._error = error

    def chunks(self, size: int) -> list[bytes | memoryview]:
        raise self._error

    def check(self) -> None:
        raise self._error


def read_layers(meta: Mapping[str, Any]) -> int:
    """The number of layers of an indexer_topk payload, which must be given beside it."""
    value = meta.get("indexer_topk_num_layers")
    if type(value) is not int or not 1 <= value < 2**31:
        raise FieldError("indexer_topk_num_layers", f"is {value!r:.100} beside indexer_topk, not a number of layers")
    return value


def read_status(finish_reason: Any) -> Status:
    """The status of a turn by its finish_reason. Raises FieldError for any other value."""
    status = _STATUS.get(finish_reason) if isinstance(finish_reason, str) else None
    if status is None:
        raise FieldError("finish_reason", f"is {finish_reason!r:.80}; a turn ends by {', '.join(_STATUS)}")
    return status


def read_record(record: Mapping[str, Any], *, turn: int, before: IntArray | None, settings: AssemblySettings) -> Record:
    """A record from its JSON form; `before` is prompt + output of the record before it, which it is stored against.

    Replay payloads are read only where replay is configured. Raises AssemblyError (422) naming the turn and the field.
    """
    try:
        return _read_record(record, _NO_IDS if before is None else before, settings)
    except FieldError as error:
        raise AssemblyError(f"turn {turn}: {error}") from error


def _read_record(record: Mapping[str, Any], before: IntArray, settings: AssemblySettings) -> Record:
    request, response = _object(record, "request"), _object(record, "response")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise FieldError("response.choices", f"is {choices!r:.80}, not a list with a choice")
    choice = choices[0]
    reply_meta = _object(choice, "meta_info")
    prompt = read_ids(request.get("input_ids"), "request.input_ids")
    shared = common_prefix(prompt, before)
    meta = read_meta(reply_meta, settings)
    finish_reason = choice.get("finish_reason")
    read_status(finish_reason)
    timestamp = read_seconds(record.get("timestamp"), "timestamp")
    if timestamp is None:
        raise FieldError("timestamp", "is absent")
    response_id = response.get("id")
    experts = reply_meta.get("routed_experts") if settings.routed_experts else None
    indexer = reply_meta.get("indexer_topk") if settings.indexer_topk else None
    return Record(
        shared=shared,
        prompt_tail=prompt[shared:],
        output_ids=meta.output_ids,
        log_probs=meta.log_probs,
        finish_reason=finish_reason,
        timestamp=timestamp,
        request_timestamp=read_seconds(record.get("request_timestamp"), "request_timestamp"),
        e2e_latency=meta.e2e_latency,
        weight_version=meta.weight_version,
        cached_tokens=meta.cached_tokens,
        prompt_tokens=meta.prompt_tokens,
        spec_info=meta.spec_info,
        response_id=response_id if isinstance(response_id, str) else None,
        routed_experts=None if experts is None else _payload("routed_experts", experts, settings),
        routed_experts_start=request.get("routed_experts_start_len"),
        indexer_topk=None if indexer is None else Payload(read_payload("indexer_topk", indexer)),
        indexer_layers=None if indexer is None else read_layers(reply_meta),
        messages=_messages(request, choice),
    )


def shown_ids(ids: IntArray, limit: int = 8) -> str:
    """Token ids for a message, the first `limit` of many."""
    shown = ", ".join(map(str, ids[:limit].tolist()))
    return f"[{shown}{', ...' if len(ids) > limit else ''}]"


def common_prefix(left: IntArray, right: IntArray) -> int:
    """How many leading ids the two share."""
    length = min(len(left), len(right))
    same = left[:length] == right[:length]
    return length if same.all() else int(same.argmin())


def _object(holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = holder.get(key)
    if not isinstance(value, Mapping):
        raise FieldError(key, f"is {value!r:.80}, not an object")
    return value


def _payload(field: str, text: Any, settings: AssemblySettings) -> Payload:
    try:
        return Payload(read_payload(field, text))
    except FieldError as error:
        if not settings.additional_r3:
            raise
        # A payload that no folded token needs is never decoded: the error waits until somebody reads the rows.
        return Undecodable(error)


def _messages(request: Mapping[str, Any], choice: Mapping[str, Any]) -> Callable[[], list[Any]]:
    def messages() -> list[Any]:
        if not isinstance(request.get("messages"), list):
            raise FieldError("request.messages", f"is {request.get('messages')!r:.80}, not a list")
        if "message" not in choice:
            raise FieldError("choices[0].message", "is absent")
        return [*request["messages"], choice["message"]]

    return messages
