"""From messages to token ids and back: the prompt, the ids of a scripted reply, and the message in an output's text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_ref.engine.policy import Call, Reply
from miles_ref.errors import MessageValidationError, UsageError
from miles_ref.tokens.rendering import normalize_messages, normalize_tools
from miles_ref.tokens.tokenizer import Tokenizer

_OPEN, _CLOSE = "<think>", "</think>"
_CALL_OPEN = re.compile(r"<tool_call>\s*")
_CALL_CLOSE = re.compile(r"\s*</tool_call>")
_LINE_ENDS = "\r\n"
_QUESTION: dict[str, Any] = {"role": "user", "content": "?"}
_PROBES = (
    (Reply("."), {"role": "user", "content": "."}),
    (Reply(".", calls=(Call("f", {}),)), {"role": "tool", "tool_call_id": "call_0", "content": "."}),
)


@dataclass(frozen=True, slots=True)
class Speech:
    """A tokenizer with its chat template, and the special ids at which its turns end.

    A turn ends with the first special token that the template writes after an assistant's text: `<|im_end|>`, or, where
    templates close no turn, the opener of whoever speaks next (`<|user|>`, `<|observation|>`).
    """

    tokenizer: Tokenizer
    stop_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Speech:
        """Try the template out. Raises UsageError where it cannot render a conversation."""
        speech = cls(tokenizer, frozenset())
        ends = set()
        for probe, follower in _PROBES:
            try:
                ends.add(speech._spoken(probe, follower, {})[-1])
            except MessageValidationError as error:
                if follower["role"] == "user":
                    raise UsageError(f"tokenizer {tokenizer.name} has no usable chat template: {error}") from error
        return cls(tokenizer, frozenset(ends & tokenizer.special_ids))

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> list[int]:
        """Ids of the rendered conversation with the generation prompt. Raises MessageValidationError."""
        return self.tokenizer.encode(
            self.tokenizer.render(
                normalize_messages(messages),
                tools=normalize_tools(tools),
                add_generation_prompt=True,
                template_kwargs=kwargs,
            )
        )

    def completion(self, reply: Reply, kwargs: Mapping[str, Any]) -> list[int]:
        """The ids that a model would have to say for this reply, its stop token included.

        They are taken from the template itself, so that rendering the parsed reply again gives the same text.
        """
        return self._spoken(reply, _PROBES[1 if reply.calls else 0][1], kwargs)

    def _spoken(self, reply: Reply, follower: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[int]:
        message = {
            "role": "assistant",
            "content": reply.content,
            "tool_calls": [
                {"id": f"call_{at}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for at, call in enumerate(reply.calls)
            ],
        }
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        before = self._render([_QUESTION], kwargs, generate=True)
        after = self._render([_QUESTION, message, follower], kwargs, generate=False)
        if not after.startswith(before):
            raise MessageValidationError(
                "the chat template's generation prompt is not how it writes an assistant's turn, so a scripted reply "
                "has no ids; use --policy sample"
            )
        ids = self.tokenizer.encode(after[len(before) :])
        end = next((at for at, token in enumerate(ids) if token in self.tokenizer.special_ids), None)
        if end is None:
            raise MessageValidationError("the chat template writes no special token after an assistant's turn")
        return ids[: end + 1]

    def _render(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], *, generate: bool) -> str:
        return self.tokenizer.render(messages, tools=None, add_generation_prompt=generate, template_kwargs=kwargs)

    def text(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of output ids, without their special tokens if so wished."""
        return self.tokenizer.decode([t for t in ids if t not in self.tokenizer.special_ids] if skip_special else ids)

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends inside a reasoning block that its generation prompt has opened."""
        return self.tokenizer.decode(prompt[-8:]).rstrip().endswith(_OPEN)


@dataclass(frozen=True, slots=True)
class Spoken:
    """An output's text taken apart. `reasoning` None: there was no reasoning block."""

    content: str
    reasoning: str | None
    calls: tuple[Call, ...]


def parse(text: str, *, reasoning: bool = True, tools: bool = True, opened: bool = False) -> Spoken:
    """Take the reasoning block and the tool calls out of `text`.

    `reasoning`, `tools`: whether to look for them at all. `opened`: the text begins inside a reasoning block. A block
    that is never closed is reasoning to its end. A tool call that is no JSON object `{"name": text, "arguments":
    object}` between its tags stays in the content.
    """
    thought: str | None = None
    if reasoning and (opened or text.lstrip().startswith(_OPEN)):
        body = text if opened else text.lstrip().removeprefix(_OPEN)
        thought, _, text = body.partition(_CLOSE)
        thought, text = thought.strip(_LINE_ENDS), text.lstrip(_LINE_ENDS)
    content, calls = _take_calls(text) if tools else (text, ())
    return Spoken(content, thought, calls)


def _take_calls(text: str) -> tuple[str, tuple[Call, ...]]:
    calls: list[Call] = []
    kept: list[str] = []
    at = copied = 0
    while (opening := _CALL_OPEN.search(text, at)) is not None:
        at = opening.end()
        found = _call_at(text, at)
        if found is not None:
            call, at = found
            calls.append(call)
            kept.append(text[copied : opening.start()])
            copied = at
    kept.append(text[copied:])
    content = "".join(kept)
    return (content.strip(_LINE_ENDS) if calls else content), tuple(calls)


def _call_at(text: str, at: int) -> tuple[Call, int] | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    closing = _CALL_CLOSE.match(text, end)
    if closing is None or not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], arguments), closing.end()


def call_id(prompt: Sequence[int], index: int) -> str:
    """An id for the tool call `index` of the reply to `prompt`; the same prompt gives the same id."""
    digest = hashlib.sha256(np.asarray(prompt, dtype="<i8").tobytes() + index.to_bytes(4, "little"))
    return f"call_{digest.hexdigest()[:24]}"
