"""A toy model in front of real trajectories: one byte one id, and a template that is easy to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from miles_ref.errors import MessageValidationError
from miles_ref.records import AssemblySettings, IntArray
from miles_ref.tokens.families import Family
from miles_ref.tokens.matching import strict
from miles_ref.tokens.rendering import Renderer
from miles_ref.trajectory.commit import Committer, Times
from miles_ref.trajectory.linear import LinearTrajectory
from miles_ref.trajectory.node import Node
from miles_ref.trajectory.reply import read_reply
from miles_ref.trajectory.request import ChatRequest
from miles_ref.trajectory.tree import TreeTrajectory
from miles_ref.trajectory.turn import ForwardSettings, Matching, Turn, TurnPlanner

END = 256


class ToyTokenizer:
    """Ids are bytes; 256 is `<|end|>`, 257 `<|begin|>`. A message renders as `<|begin|>role:content<|end|>`.

    As some templates do, it refuses a tool's answer that nobody asked for.
    """

    name = "toy"
    special_ids = frozenset({END, 257})
    pieces = None

    def encode(self, text: str) -> list[int]:
        raw = text.replace("<|end|>", "\x00").replace("<|begin|>", "\x01").encode()
        return [{0: END, 1: 257}.get(byte, byte) for byte in raw]

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        texts = {END: "<|end|>", 257: "<|begin|>"}
        return "".join(texts.get(int(token)) or chr(int(token)) for token in ids)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        parts = ["" if not tools else f"<|begin|>tools:{len(tools)}<|end|>"]
        called = False
        for message in messages:
            if message.get("role") != "tool":
                called = bool(message.get("tool_calls"))
            elif not called:
                raise MessageValidationError("no call before the tool's answer")
            if message.get("content") == "refuse":
                raise MessageValidationError("the template refuses")
            parts.append(f"<|begin|>{message.get('role')}:{message.get('content')}<|end|>")
        return "".join(parts) + ("<|begin|>assistant:" if add_generation_prompt else "")


class TrimFamily(Family):
    """The stop token is written again by the template: it is dropped from the snapshot."""

    name = "trim"
    max_trim_tokens = 1

    def join(self, snapshot: IntArray, suffix: IntArray, ids: Mapping[str, int]) -> tuple[int, IntArray]:
        drop = len(snapshot) > 0 and int(snapshot[-1]) == END
        return len(snapshot) - drop, suffix


class ToySession:
    """A session without a server: `attach`, `turn`, `commit` are the steps of a turn, `say` is all of them."""

    def __init__(
        self,
        version: str = "v1",
        *,
        family: Family | None = None,
        forward: ForwardSettings | None = None,
        matcher: Callable[..., bool] | None = None,
        strict_append_only: bool = False,
        max_nodes: int = 1024,
        **assembly: Any,
    ) -> None:
        tokenizer = ToyTokenizer()
        self.family = family or Family()
        matching = Matching(strict) if matcher is None else Matching(matcher, by_text=False)
        self.trajectory: LinearTrajectory | TreeTrajectory = (
            LinearTrajectory(matching)
            if version == "v1"
            else TreeTrajectory(matching, strict=strict_append_only, max_nodes=max_nodes)
        )
        self.settings = AssemblySettings(
            decode=tokenizer.decode, max_trim_tokens=self.family.max_trim_tokens, **assembly
        )
        self.planner = TurnPlanner(
            Renderer(tokenizer, self.family),
            forward or ForwardSettings(),
            tree=version == "v2",
            strict=strict_append_only,
        )
        self.committer = Committer(tokenizer, self.settings)
        self.now = 1000.0

    def turn(self, messages: Any, *, in_flight: int = 0, **members: Any) -> Turn:
        body = json.dumps({"model": "m", "messages": messages, **members}).encode()
        return self.turn_of(body, in_flight)

    def turn_of(self, body: bytes, in_flight: int = 0) -> Turn:
        request = ChatRequest(body)
        self.planner.check(request)
        attachment = self.trajectory.attach(request.messages, in_flight)
        return self.planner.plan(attachment, self.trajectory.snapshot(attachment), request)

    def node(self, turn: Turn, reply: Mapping[str, Any] | bytes) -> Node:
        raw = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.now += 1
        times = Times(requested=self.now - 0.5, committed=self.now)
        read = read_reply(raw)
        return self.committer.node(turn, read, self.committer.read(turn, read), self.trajectory.next_seq, times)

    def commit(self, turn: Turn, reply: Mapping[str, Any] | bytes) -> Node | None:
        if not self.trajectory.can_commit(turn.attachment):
            return None
        node = self.node(turn, reply)
        self.trajectory.commit(turn.attachment, node)
        return node

    def say(self, messages: Any, content: str, **reply: Any) -> Node:
        node = self.commit(self.turn(messages), toy_reply(content, **reply))
        assert node is not None
        return node


def toy_reply(
    content: str,
    *,
    finish_reason: str = "stop",
    response_id: str = "r",
    ids: Sequence[int] | None = None,
    message: Mapping[str, Any] = MappingProxyType({}),
    **meta: Any,
) -> dict[str, Any]:
    """A reply that says `content` and ends with the stop token."""
    ids = [*content.encode(), END] if ids is None else ids
    return {
        "id": response_id,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **message},
                "finish_reason": finish_reason,
                "meta_info": {
                    "output_token_logprobs": [[-at / 128, token, None] for at, token in enumerate(ids)],
                    "completion_tokens": len(ids),
                    **meta,
                },
            }
        ],
    }


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


class Toys:
    """What the tests of this folder build with."""

    Session = ToySession
    TrimFamily = TrimFamily
    reply = staticmethod(toy_reply)
    user = staticmethod(user)
    assistant = staticmethod(assistant)


@pytest.fixture
def toys() -> type[Toys]:
    return Toys
