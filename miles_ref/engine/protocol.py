"""SGLang's chat API as this engine speaks it: the request's fields and their types, and the reply's form."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64

from miles_ref.engine.speech import Spoken
from miles_ref.errors import MessageValidationError

Count = Annotated[int, msgspec.Meta(ge=0)]


class ChatRequest(msgspec.Struct, kw_only=True):
    """The fields that are read; others are ignored, as SGLang does. null is the same as absent."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    model: str | None = None
    input_ids: Annotated[list[int], msgspec.Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_meta_info: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Count | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    separate_reasoning: bool | None = None
    rid: str | None = None

    @property
    def uses_tools(self) -> bool:
        """Whether tool calls may be made and are taken out of the text."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts, empty ones left out."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)


class AbortRequest(msgspec.Struct, kw_only=True):
    """The body of POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False


_chat_decoder = msgspec.json.Decoder(ChatRequest)
_abort_decoder = msgspec.json.Decoder(AbortRequest)


def read_chat_request(body: bytes) -> ChatRequest:
    """Parse and check. Raises MessageValidationError that names the field."""
    request: ChatRequest = _decode(_chat_decoder, body)
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")
    if request.n not in (None, 1):
        raise MessageValidationError(f"n is {request.n}, but only one choice is made: leave n out or set it to 1")
    if request.top_logprobs:
        raise MessageValidationError(f"top_logprobs is {request.top_logprobs}, but only the chosen token's are given")
    return request


def read_abort_request(body: bytes) -> AbortRequest:
    """Parse and check. Raises MessageValidationError."""
    request: AbortRequest = _decode(_abort_decoder, body)
    if request.rid is None and not request.abort_all:
        raise MessageValidationError("give the rid of the request to abort, or abort_all: true")
    return request


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageValidationError(f"the request body cannot be used: {error}") from error


def _check_message(message: Mapping[str, Any], where: str) -> None:
    if not isinstance(message.get("role"), str):
        raise MessageValidationError(f"{where}.role must be a text, not {message.get('role')!r}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) for part in content):
            raise MessageValidationError(f"{where}.content must be a list of objects")
    elif content is not None and not isinstance(content, str):
        raise MessageValidationError(f"{where}.content must be a text, a list of parts or null, not {content!r:.60}")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise MessageValidationError(f"{where}.tool_calls must be a list of objects or null, not {calls!r:.60}")


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation, as far as the reply must know it.

    `tokens` are id, text and log prob of each output id; `routes` int32, shape (tokens - 1, layers, topk).
    """

    rid: str
    model: str
    created: int
    spoken: Spoken
    call_ids: Sequence[str]
    finish: str
    matched: int | str | None
    prompt_tokens: int
    cached_tokens: int
    output_ids: Sequence[int]
    log_probs: Sequence[float]
    routes: npt.NDArray[np.int32] | None
    latency: float
    weight_version: str


def chat_reply(result: Result, request: ChatRequest, texts: Sequence[str]) -> dict[str, Any]:
    """The chat.completion object. `texts` are the output ids' texts, used where logprobs are asked for."""
    message: dict[str, Any] = {"role": "assistant", "content": result.spoken.content}
    if result.spoken.reasoning:
        message["reasoning_content"] = result.spoken.reasoning
    if result.spoken.calls:
        message["tool_calls"] = [_tool_call(result, at) for at in range(len(result.spoken.calls))]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(result, texts) if request.logprobs else None,
        "finish_reason": "tool_calls" if result.finish == "stop" and result.spoken.calls else result.finish,
        "matched_stop": result.matched,
    }
    if request.return_meta_info is not False:
        choice["meta_info"] = _meta_info(result, request)
    return {
        "id": result.rid,
        "object": "chat.completion",
        "created": result.created,
        "model": result.model,
        "choices": [choice],
        "usage": _usage(result),
        "metadata": {"weight_version": result.weight_version},
    }


def _meta_info(result: Result, request: ChatRequest) -> dict[str, Any]:
    finish: dict[str, Any] = {"type": result.finish}
    if result.finish == "stop":
        finish["matched"] = result.matched
    elif result.finish == "length":
        finish["length"] = len(result.output_ids)
    else:
        finish["message"] = "Aborted"
    info = {
        "id": result.rid,
        "finish_reason": finish,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "completion_tokens": len(result.output_ids),
        "output_token_logprobs": [
            [value, token, None] for value, token in zip(result.log_probs, result.output_ids, strict=True)
        ],
        "e2e_latency": result.latency,
        "weight_version": result.weight_version,
    }
    if request.return_routed_experts and result.routes is not None:
        rows = result.routes[request.routed_experts_start_len or 0 :]
        if len(rows):
            info["routed_experts"] = pybase64.b64encode(np.ascontiguousarray(rows, dtype="<i4")).decode()
    return info


def _tool_call(result: Result, index: int) -> dict[str, Any]:
    call = result.spoken.calls[index]
    # Spelled as templates write objects (transformers' tojson), so that a replayed call is rendered as it was said.
    return {
        "id": result.call_ids[index],
        "index": index,
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
    }


def _logprobs(result: Result, texts: Sequence[str]) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "bytes": list(text.encode()), "logprob": value, "top_logprobs": []}
            for text, value in zip(texts, result.log_probs, strict=True)
        ]
    }


def _usage(result: Result) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.output_ids),
        "total_tokens": result.prompt_tokens + len(result.output_ids),
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
    }


def stream_events(reply: Mapping[str, Any], request: ChatRequest) -> list[bytes]:
    """The reply as server-sent events: the whole message in one chunk, the finish reason in the next."""
    choice = reply["choices"][0]
    head = {"id": reply["id"], "object": "chat.completion.chunk", "created": reply["created"], "model": reply["model"]}

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode({**head, "choices": choices, **more}) + b"\n\n"

    said = {"index": 0, "delta": choice["message"], "logprobs": choice["logprobs"], "finish_reason": None}
    events = [
        chunk([said]),
        chunk([{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]),
    ]
    if (request.stream_options or {}).get("include_usage"):
        events.append(chunk([], usage=reply["usage"]))
    return [*events, b"data: [DONE]\n\n"]


def error_reply(message: str, status: int) -> dict[str, Any]:
    """An error in OpenAI's form under `error`, and with SGLang's own flat fields, which its clients read."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError", 503: "ServiceUnavailableError"}
    kind = kinds.get(status, "InternalServerError")
    flat = {"message": message, "type": kind, "param": None, "code": status}
    return {"object": "error", **flat, "error": flat}


def model_list(name: str, context_length: int) -> dict[str, Any]:
    """The body of GET /v1/models."""
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "miles-ref",
        "root": name,
        "max_model_len": context_length,
    }
    return {"object": "list", "data": [card]}
