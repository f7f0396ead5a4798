"""The demo's agent function: the official OpenAI client works through an arithmetic task with a calculator.

It imports nothing of this project but the task, a number and `report_to_caller`, so that it runs in a child process or
on a worker as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from openai import AsyncOpenAI

from miles_ref.agents.api import report_to_caller
from miles_ref.demo import MOST_TURNS
from miles_ref.engine.task import Task, make_task

MODEL = "demo"  # the engine serves one model, whatever the name
SECONDS_PER_TURN = 120.0

Message = dict[str, Any]


async def solve(
    *,
    base_url: str,
    prompt: Sequence[Message],
    request_kwargs: Mapping[str, Any],
    metadata: Mapping[str, Any],
    **_: Any,
) -> dict[str, Any]:
    """Solve the task of `metadata["demo"]` (`seed`, `steps`, `tree`) and return what is to be known of it.

    With `tree` the episode also has a retry, a branch and a compaction, as a session server with v2 allows.
    """
    plan = metadata["demo"]
    async with AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=SECONDS_PER_TURN
    ) as client:
        work = _Work(client, make_task(plan["seed"], plan["steps"]), dict(request_kwargs))
        endings = await (_tree(work, list(prompt)) if plan["tree"] else _line(work, list(prompt)))
    rewards = {ending.response_id: float(ending.text.endswith(f" {work.task.answer}.")) for ending in endings}
    result: dict[str, Any] = {
        "solved": all(rewards.values()),
        "answer": work.task.answer,
        "agent_metrics": {"turns": work.turns, "total_tool_time": work.tool_seconds},
    }
    # By response id, so that every leaf of a tree gets its own (pipeline.md, merge).
    return result | {"rewards": rewards} if plan["tree"] else result


class Ending(NamedTuple):
    """The last reply of a line of work: its id and its text."""

    response_id: str
    text: str


@dataclass
class _Work:
    client: AsyncOpenAI
    task: Task
    request_kwargs: dict[str, Any]
    turns: int = 0
    tool_seconds: float = 0.0
    last_id: str = ""

    async def turn(self, messages: Sequence[Message], **more: Any) -> Message:
        """One model call: the assistant's message, to be sent back as it came."""
        completion: Any = await self.client.chat.completions.create(
            **{"model": MODEL, "messages": messages, "tools": self.task.tools} | self.request_kwargs | more
        )
        self.turns += 1
        self.last_id = completion.id
        choice = completion.choices[0]
        report_to_caller({"turn": self.turns, "finish_reason": choice.finish_reason})
        message: Message = choice.message.model_dump(exclude_unset=True)
        return message

    def run_tools(self, message: Message) -> list[Message]:
        """The tools' answers to the calls of an assistant's message."""
        began = time.perf_counter()
        answers = []
        for call in message.get("tool_calls") or ():
            result = self.task.run_tool(call["function"]["name"], call["function"]["arguments"])
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        self.tool_seconds += time.perf_counter() - began
        return answers

    async def to_the_end(self, messages: list[Message]) -> Ending:
        """Turn after turn until the model calls no tool any more; `messages` grows with them."""
        for _ in range(MOST_TURNS):
            message = await self.turn(messages)
            answers = self.run_tools(message)
            messages += [message, *answers]
            if not answers:
                return Ending(self.last_id, message["content"])
        raise RuntimeError(f"no answer after {MOST_TURNS} turns")


async def _line(work: _Work, messages: list[Message]) -> list[Ending]:
    return [await work.to_the_end(messages)]


async def _tree(work: _Work, messages: list[Message]) -> list[Ending]:
    start = len(messages)
    first = await work.turn(messages)
    messages += [first, *work.run_tools(first)]

    # A retry: the same request again, with another seed. The first reply is given up.
    await work.turn(messages, seed=1)
    second = await work.turn(messages, seed=2)
    messages += [second, *work.run_tools(second)]

    fork = list(messages)
    endings = [await work.to_the_end(messages)]

    # A branch: from an earlier point the user has something else to say.
    fork.append({"role": "user", "content": "Go on, and be brief."})
    endings.append(await work.to_the_end(fork))

    # A compaction: the client tells in an assistant's message of its own what has been worked out.
    calls = {call["id"]: call for message in messages[start:] for call in message.get("tool_calls") or ()}
    compacted = [*messages[: start + 2], {"role": "assistant", "content": _summary(calls, messages[:-3])}]
    compacted.append({"role": "user", "content": "Finish the work from here."})
    endings.append(await work.to_the_end(compacted))
    return endings


def _summary(calls: Mapping[str, Any], messages: Sequence[Message]) -> str:
    facts = [
        f"{json.loads(calls[message['tool_call_id']]['function']['arguments'])['expression']} = {message['content']}"
        for message in messages
        if message["role"] == "tool"
    ]
    return f"So far: {'; '.join(facts)}."
