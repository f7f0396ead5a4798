"""What the engine says by default: a small policy that works through an arithmetic task, one tool call a turn.

It has no memory of its own. Everything is read off the conversation, so that retries, branches and compacted histories
are answered as sensibly as straight ones, and the same conversation and seed always give the same reply.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from miles_ref.engine import task
from miles_ref.engine.task import ExpressionError, Operation

# Bounded, so that a long text of digits or parentheses costs linear time.
_CANDIDATE = re.compile(r"[0-9(][0-9.+\-*/() ×÷−]{1,500}[0-9)]")
_FACT = re.compile(r"([0-9(][0-9.+\-*/() ×÷−]{1,80}[0-9)])[ ]?=[ ]?(-?[0-9]{1,40}(?:/[0-9]{1,40})?)")
_NUMBER = re.compile(r"-?[0-9]{1,100}(?:/[0-9]{1,100}|\.[0-9]{1,100})?(?![0-9])")
_OPENINGS = ("Next comes", "Now I need", "The next part is", "What is left begins with")
_CALLS = ("I ask the calculator.", "The calculator shall do it.", "Better not in my head.")
_STEPS = ("", "", "Let me see.", "Working on {expression}.")
_ENDINGS = ("All parts are known.", "Nothing is left to work out.", "That was the last step.")
_ANSWERS = ("The answer is {value}.", "The result is {value}.", "It comes to {value}.")
_GREETINGS = (
    "I work out arithmetic, for example (3+4)*5. What shall I compute?",
    "Give me an expression such as 12/5-1 and I will work it out.",
)


class Call(NamedTuple):
    """A tool call: the tool's name and its arguments as an object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """An assistant's message before it becomes text. Texts have no white space at their ends."""

    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(slots=True)
class _Known:
    """What the conversation says about partial results: by the expression without spaces."""

    values: dict[str, Fraction] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)


def reply(messages: Sequence[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]] | None, seed: int) -> Reply:
    """The next assistant message for `messages`; never raises for a conversation of objects."""
    rng = random.Random(f"{seed}/{len(messages)}")
    found = _find_task(messages)
    if found is None:
        return Reply(rng.choice(_GREETINGS))
    position, tree = found
    known = _read(messages)
    tool = _calculator(tools)
    while True:
        try:
            result = _reduce(tree, known.values)
        except ExpressionError as error:
            return Reply(f"This cannot be computed: {error}.", "There is no such number.")
        if isinstance(result, Fraction):
            asked_again = position < len(messages) - 1 and messages[-1].get("role") == "user"
            answer = rng.choice(_ANSWERS).format(value=result)
            return Reply(f"As before: {answer}" if asked_again else answer, rng.choice(_ENDINGS))
        if tool is not None and known.failures[result] < 2:
            return _ask(tool, result, known, rng)
        # No tool, or one that failed twice: this step is worked out without it.
        try:
            known.values[result] = task.evaluate(result)
        except ExpressionError as error:
            return Reply(f"This cannot be computed: {error}.", known.reasons.get(result, "There is no such number."))


def _ask(tool: str, expression: str, known: _Known, rng: random.Random) -> Reply:
    if known.failures[expression]:
        thought = f"That failed: {known.reasons[expression]}. I try {expression} once more."
    else:
        thought = f"{rng.choice(_OPENINGS)} {expression}. {rng.choice(_CALLS)}"
    content = rng.choice(_STEPS).format(expression=expression)
    return Reply(content, thought, (Call(tool, {"expression": expression}),))


def _reduce(node: Operation | Fraction, values: Mapping[str, Fraction]) -> Fraction | str:
    """The value of the tree where `values` has all its steps; else the first step that it lacks."""
    if isinstance(node, Fraction):
        return node
    left = _reduce(node.left, values)
    if isinstance(left, str):
        return left
    right = _reduce(node.right, values)
    if isinstance(right, str):
        return right
    step = f"{task.operand(left)}{node.symbol}{task.operand(right)}"
    return values.get(step, step)


def _find_task(messages: Sequence[Mapping[str, Any]]) -> tuple[int, Operation | Fraction] | None:
    """The last user message with an expression (else any other but a tool's: a compaction may have moved the task)."""
    positions = range(len(messages) - 1, -1, -1)
    users = [at for at in positions if messages[at].get("role") == "user"]
    others = [at for at in positions if messages[at].get("role") not in ("user", "tool")]
    for at in users + others:
        tree = _longest_expression(_text(messages[at]))
        if tree is not None:
            return at, tree
    return None


def _longest_expression(text: str) -> Operation | None:
    # What is followed by its result is a statement, not a task.
    found = _CANDIDATE.findall(_FACT.sub(" ", text))
    candidates = [candidate for candidate in found if not candidate.isdigit()]
    for candidate in sorted(candidates, key=len, reverse=True):
        for spelling in (candidate, candidate.strip("() "), candidate.rstrip(") "), candidate.lstrip("( ")):
            try:
                tree = task.parse(spelling)
            except ExpressionError:
                continue
            if isinstance(tree, Operation):
                return tree
            break
    return None


def _read(messages: Sequence[Mapping[str, Any]]) -> _Known:
    """Partial results: tool results by their calls, and true statements such as `3+4 = 7` in anybody's text."""
    known = _Known()
    waiting: dict[Any, str] = {}
    for message in messages:
        if message.get("role") == "tool":
            identity = message.get("tool_call_id")
            known_call = isinstance(identity, str) and identity in waiting
            expression = waiting.pop(identity if known_call else next(iter(waiting), None), None)
            if expression is not None:
                _note_result(known, expression, _text(message))
            continue
        if message.get("role") == "assistant":
            waiting = dict(_asked(message))
        for expression, value in _FACT.findall(_text(message)):
            _note_fact(known, expression, value)
    return known


def _note_result(known: _Known, expression: str, text: str) -> None:
    number = None if text.lstrip().lower().startswith("error") else _NUMBER.search(text)
    if number is None:
        known.failures[expression] += 1
        known.reasons[expression] = " ".join(text.split())[:80].removeprefix("error:").strip(" .") or "no answer"
        return
    try:
        known.values[expression] = Fraction(number.group())
    except (ValueError, ZeroDivisionError):
        known.failures[expression] += 1
        known.reasons[expression] = "the result is no number"


def _note_fact(known: _Known, expression: str, value: str) -> None:
    try:
        number = Fraction(value)
        if task.evaluate(expression) == number:
            known.values.setdefault(_squeeze(expression), number)
    except (ValueError, ZeroDivisionError):
        return


def _asked(message: Mapping[str, Any]) -> Iterable[tuple[Any, str]]:
    """Call id and expression of the message's calculator calls; calls of another form are passed over."""
    calls = message.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                continue
        expression = arguments.get("expression") if isinstance(arguments, Mapping) else None
        identity = call.get("id") if isinstance(call, Mapping) else None
        if isinstance(expression, str):
            yield (identity if isinstance(identity, str) else index), _squeeze(expression)


def _calculator(tools: Iterable[Mapping[str, Any]] | None) -> str | None:
    """The name of the tool that takes an `expression`; None where there is none."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if function["name"] == task.TOOL_NAME or (isinstance(properties, Mapping) and "expression" in properties):
            return str(function["name"])
    return None


def _squeeze(expression: str) -> str:
    return expression.replace(" ", "")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
