"""From messages to prompt ids: what the model produced is kept, only what the client appended is encoded.

Contract: tokens.md, Rendering; session-http.md, "A turn" (kwargs), "Matching messages" (roles), "v2: tree" (splice).
Nothing here changes its inputs; messages and tools are copied only where they are rewritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec
import numpy as np

from miles_ref.errors import MessageValidationError, UsageError
from miles_ref.records import IntArray
from miles_ref.tokens.exact_json import is_deeper, same
from miles_ref.tokens.families import BoundFamily, Family
from miles_ref.tokens.matching import Message
from miles_ref.tokens.tokenizer import Tokenizer

RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
    }
)
"""Keyword arguments that decide how a template is applied: the server sets them, never a request."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_ARGUMENTS_DEPTH = 100
"""Arguments nested deeper than this are rendered as the text they are: templates and json recurse, and would fail."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A prompt that extends a snapshot: input_ids = snapshot[:kept] + tail (int64, 1-d)."""

    kept: int
    tail: IntArray


@dataclass(frozen=True, slots=True)
class Spliced:
    """The prompt of a suffix with client assistants (int64, 1-d), and how many of the snapshot's ids it begins with.

    `kept` is None where it does not begin with the snapshot, less what the family drops at its end.
    """

    ids: IntArray
    kept: int | None


class Renderer:
    """Renders requests for one tokenizer and one family.

    `template_kwargs` are the server's own (`--apply-chat-template-kwargs`). `append_roles` narrows the family's
    (`--tito-allowed-append-roles`). Raises UsageError for kwargs that are reserved or contradict the family, for roles
    that the family does not know, and for a tokenizer that lacks a token of the family.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: Family,
        template_kwargs: Mapping[str, Any] | None = None,
        append_roles: Collection[str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self.bound: BoundFamily = family.bind(tokenizer)
        problem = _kwargs_problem(template_kwargs or {}, family.fixed_template_kwargs)
        if problem:
            raise UsageError(f"template kwargs of the server: {problem}")
        self.template_kwargs: dict[str, Any] = {**(template_kwargs or {}), **family.fixed_template_kwargs}
        """The server's kwargs with the family's fixed ones: those of the mismatch report."""
        unknown = sorted(set(append_roles or ()) - set(family.append_roles))
        if unknown:
            raise UsageError(
                f"append roles {', '.join(unknown)}: family {family.name!r} has {', '.join(family.append_roles)}"
            )
        self._last_dummy = b"", ""
        self.append_roles = tuple(role for role in family.append_roles if append_roles is None or role in append_roles)

    def merge_kwargs(self, request_kwargs: Any) -> dict[str, Any]:
        """The server's template kwargs with the request's over them; {} means that there are none at all.

        Raises MessageValidationError (400) unless the request's are an object or null and agree with the fixed ones.
        """
        if request_kwargs is None:
            return dict(self.template_kwargs)
        if not isinstance(request_kwargs, dict):
            raise MessageValidationError(
                f"chat_template_kwargs must be an object or null, not {type(request_kwargs).__name__}"
            )
        problem = _kwargs_problem(request_kwargs, self.family.fixed_template_kwargs)
        if problem:
            raise MessageValidationError(f"chat_template_kwargs: {problem}")
        return {**self.template_kwargs, **request_kwargs}

    def check_append_roles(
        self, appended: Sequence[Message], *, client_assistants_allowed: bool, first_index: int = 0
    ) -> None:
        """Raise MessageValidationError (400) for a message whose role may not be appended.

        `client_assistants_allowed`: under v2 without strict append-only, where they are prompt material.
        `first_index` is the index of the first appended message in the request.
        """
        for index, message in enumerate(appended, first_index):
            role = message.get("role")
            if role in self.append_roles or (role == "assistant" and client_assistants_allowed):
                continue
            raise MessageValidationError(
                f"message {index} has role {role!r}, which may not be appended to a conversation "
                f"(family {self.family.name!r}): allowed are {', '.join(self.append_roles) or 'none'}"
            )

    def check_tools(self, tools: Any) -> None:
        """Raise MessageValidationError (400) for tools that cannot be rendered."""
        normalize_tools(tools)

    def first(self, messages: Sequence[Message], tools: Any, kwargs: Mapping[str, Any]) -> IntArray:
        """Ids of the whole conversation, generation prompt on: the prompt of a first turn or a new root (int64, 1-d).

        `kwargs` are merged ones. Raises MessageValidationError (400) for tools or messages that cannot be rendered.
        """
        return self._encode(self._render(normalize_messages(messages), normalize_tools(tools), kwargs, prompt=True))

    def extend(
        self,
        snapshot: IntArray,
        last_stored_message: Message,
        appended: Sequence[Message],
        tools: Any,
        kwargs: Mapping[str, Any],
    ) -> Extension:
        """The prompt of a later turn: the snapshot and the encoded suffix, joined by the family's rule.

        The suffix is what the appended messages add to a dummy conversation that ends with the last stored message's
        tool calls, so the cost depends on the suffix alone. Raises MessageValidationError (400) for what cannot be
        rendered, and where the template does not simply append.
        """
        wrapped = normalize_tools(tools)
        dummy = _dummy_conversation(last_stored_message)
        before = self._render_dummy(dummy, wrapped, kwargs)
        after = self._render([*dummy, *normalize_messages(appended)], wrapped, kwargs, prompt=True)
        if not after.startswith(before):
            raise MessageValidationError(
                "the chat template does not append: with the new messages it writes the earlier ones differently, "
                f"from character {_common_length(before, after)} of {len(before)} on"
            )
        kept, tail = self.bound.join(snapshot, self._encode(after[len(before) :]))
        return Extension(kept, tail)

    def splice(
        self,
        snapshot: IntArray,
        stored_messages: Sequence[Message],
        request_messages: Sequence[Message],
        tools: Any,
        kwargs: Mapping[str, Any],
    ) -> Spliced:
        """The prompt of a suffix that carries client assistants (session-http.md, v2).

        `request_messages` is the whole path: the stored messages and the suffix. Where the snapshot does not begin the
        render of the stored messages, or that not the render of the whole, nothing is inherited and the branch is a
        new root. A token that the family drops at the end of a snapshot (the next opener) is in no render of the stored
        messages: it is left aside. Raises MessageValidationError (400) for what cannot be rendered, and for a carried
        assistant that a user message follows where the family cannot re-render it.
        """
        self._check_midpath_assistants(request_messages, len(stored_messages))
        wrapped = normalize_tools(tools)
        stored = self._encode(self._render(normalize_messages(stored_messages), wrapped, kwargs, prompt=False))
        whole = self._encode(self._render(normalize_messages(request_messages), wrapped, kwargs, prompt=True))
        kept, _ = self.bound.join(snapshot, whole[:0])
        inherited = _begins(stored, snapshot[:kept]) and _begins(whole, stored)
        return Spliced(whole, kept if inherited else None)

    def _check_midpath_assistants(self, messages: Sequence[Message], first_index: int) -> None:
        if self.family.supports_midpath_assistant_rerender:
            return
        carried: int | None = None
        for index in range(first_index, len(messages)):
            role = messages[index].get("role")
            if role == "user" and carried is not None:
                raise MessageValidationError(
                    f"message {carried} is a client's assistant that user message {index} follows, "
                    f"which family {self.family.name!r} cannot render again"
                )
            if role == "assistant" and carried is None:
                carried = index

    def _render_dummy(
        self, dummy: Sequence[Message], tools: Sequence[Message] | None, kwargs: Mapping[str, Any]
    ) -> str:
        """The text of a dummy conversation; turn after turn it is the same one."""
        key = msgspec.json.encode((dummy, tools, kwargs))
        known, text = self._last_dummy
        if known != key:
            text = self._render(dummy, tools, kwargs, prompt=False)
            self._last_dummy = key, text
        return text

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, kwargs: Mapping[str, Any], *, prompt: bool
    ) -> str:
        return self.tokenizer.render(messages, tools=tools, add_generation_prompt=prompt, template_kwargs=kwargs)

    def _encode(self, text: str) -> IntArray:
        return np.array(self.tokenizer.encode(text), dtype=np.int64)


def normalize_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates expect them: an assistant's null content is "", arguments that spell an object are one."""
    return [_normalize_message(message) for message in messages]


def normalize_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as `{"type": "function", "function": {description, name, parameters, strict}}`, in this order; none: None.

    Raises MessageValidationError (400) for what is not a list or null, and for a tool or a function that is not an
    object.
    """
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise MessageValidationError(f"tools must be a list or null, not {type(tools).__name__}")
    return [_normalize_tool(index, tool) for index, tool in enumerate(tools)] or None


def _normalize_tool(index: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else tool
    if not isinstance(function, dict):
        raise MessageValidationError(
            f"tool {index} must be an object, with its function an object, not {function!r:.100}"
        )
    return {
        "type": "function",
        "function": {
            "description": function.get("description"),
            "name": function.get("name"),
            "parameters": function.get("parameters"),
            "strict": function.get("strict", False),
        },
    }


def _normalize_message(message: Message) -> Message:
    if message.get("role") == "assistant" and "content" in message and message["content"] is None:
        message = {**message, "content": ""}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    normal = [_normalize_call(call) for call in calls]
    if all(one is other for one, other in zip(normal, calls, strict=True)):
        return message
    return {**message, "tool_calls": normal}


def _normalize_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    value = _read_arguments(function["arguments"])
    return call if value is None else {**call, "function": {**function, "arguments": value}}


def _read_arguments(text: str) -> dict[str, Any] | None:
    """The JSON object that tool-call arguments spell; None for any other text, which is then rendered as it is."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or (
        text.count("{") + text.count("[") > _ARGUMENTS_DEPTH and is_deeper(value, _ARGUMENTS_DEPTH)
    ):
        return None
    return None if _ESCAPED_SURROGATE.search(text) and _has_lone_surrogate(value) else value


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} has no float")
    return value


def _has_lone_surrogate(value: dict[str, Any]) -> bool:
    """Whether an escape spelled half a character, which no tokenizer encodes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _dummy_conversation(last_stored_message: Message) -> list[Message]:
    assistant: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": " "}
    calls = last_stored_message.get("tool_calls")
    if calls:
        assistant["tool_calls"] = calls
    return [{"role": "system", "content": "dummy system"}, _normalize_message(assistant)]


def _kwargs_problem(kwargs: Mapping[str, Any], fixed: Mapping[str, Any]) -> str | None:
    reserved = sorted(RESERVED_KWARGS.intersection(kwargs))
    if reserved:
        return f"{', '.join(reserved)} cannot be set, it belongs to the server"
    for key, value in fixed.items():
        if key in kwargs and not same(kwargs[key], value):
            return f"{key} is fixed to {json.dumps(value)} by the family, it cannot be {kwargs[key]!r:.100}"
    return None


def _begins(ids: IntArray, beginning: IntArray) -> bool:
    return len(beginning) <= len(ids) and bool(np.array_equal(ids[: len(beginning)], beginning))


def _common_length(one: str, other: str) -> int:
    """Length of the common beginning, one of the two not being the other's beginning."""
    return next(
        (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )
