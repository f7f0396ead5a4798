"""The calculator: a tool, exact arithmetic for it, and tasks that need it several times."""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

TOOL_NAME = "calculator"
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Works out one arithmetic expression exactly.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example (3+4)*5"}},
            "required": ["expression"],
        },
    },
}
SYSTEM_PROMPT = "You are careful with numbers. Use the calculator for every single operation."

_MAX_LENGTH = 500  # characters: keeps the depth of the syntax tree far from the interpreter's recursion limit
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_ALLOWED = re.compile(r"[0-9.+\-*/() ]+")
_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}


class ExpressionError(ValueError):
    """The text is no arithmetic expression over + - * / and parentheses, or divides by zero."""


class Operation(NamedTuple):
    """A binary operation of a parsed expression; operands are operations or exact numbers."""

    symbol: str
    left: Operation | Fraction
    right: Operation | Fraction


def parse(expression: str) -> Operation | Fraction:
    """The expression as a tree. Raises ExpressionError with what is wrong."""
    text = expression.translate(_SPELLINGS).strip()
    if len(text) > _MAX_LENGTH:
        raise ExpressionError(f"the expression has {len(text)} characters, more than {_MAX_LENGTH}")
    if not _ALLOWED.fullmatch(text):
        raise ExpressionError(f"not an arithmetic expression: {text[:60]!r}")
    try:
        return _convert(ast.parse(text, mode="eval").body, text)
    except ExpressionError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"not an arithmetic expression: {text[:60]!r}") from error


def _convert(node: ast.expr, text: str) -> Operation | Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        symbol = _OPERATORS[type(node.op)][0]
        return Operation(symbol, _convert(node.left, text), _convert(node.right, text))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        inner = _convert(node.operand, text)
        if isinstance(node.op, ast.UAdd):
            return inner
        return -inner if isinstance(inner, Fraction) else Operation("-", Fraction(0), inner)
    if isinstance(node, ast.Constant):
        # From the source text: the constant of 0.1 is a binary float already.
        return Fraction(ast.get_source_segment(text, node) or "")
    raise ExpressionError(f"only + - * / and parentheses are known: {text[:60]!r}")


def apply(symbol: str, left: Fraction, right: Fraction) -> Fraction:
    """One operation, exactly. Raises ExpressionError for a division by zero."""
    if symbol == "/" and right == 0:
        raise ExpressionError("division by zero")
    return next(function for name, function in _OPERATORS.values() if name == symbol)(left, right)


def evaluate(expression: str) -> Fraction:
    """The exact value of the expression. Raises ExpressionError."""
    return _value(parse(expression))


def _value(node: Operation | Fraction) -> Fraction:
    if isinstance(node, Fraction):
        return node
    return apply(node.symbol, _value(node.left), _value(node.right))


def operand(value: Fraction) -> str:
    """The number as it stands in an expression: in parentheses where it would bind wrongly."""
    return str(value) if value >= 0 and value.denominator == 1 else f"({value})"


def run_tool(name: str, arguments: str | Mapping[str, Any]) -> str:
    """What the tool answers: the exact value (`29/7` for a fraction), or a text that starts with `error:`."""
    if name != TOOL_NAME:
        return f"error: no tool {name!r}, there is {TOOL_NAME!r}"
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(evaluate(given["expression"]))
    except ExpressionError as error:
        return f"error: {error}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return 'error: the arguments must be an object with a text "expression"'


class Task(NamedTuple):
    """A conversation's start, its tools, the function that runs them, and the answer that is expected as a text."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    run_tool: Callable[[str, str | Mapping[str, Any]], str]
    answer: str


def make_task(seed: int, steps: int = 8) -> Task:
    """A task of `steps` operations (at least 1), the same for the same arguments."""
    expression = make_expression(random.Random(seed), steps)
    question = f"Compute {expression} step by step with the calculator."
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    return Task(messages, [CALCULATOR], run_tool, str(evaluate(expression)))


def make_expression(rng: random.Random, steps: int) -> str:
    """An expression with `steps` operations that divides by no zero and whose partial values stay small."""
    if steps < 1:
        raise ValueError(f"a task needs at least 1 step, not {steps}")
    value = Fraction(rng.randint(2, 9))
    text = str(value)
    for step in range(steps):
        symbol = rng.choice("+-" if abs(value) > 100 else "+-*")
        if step == steps - 1 or (abs(value) > 1000 and step % 2):
            symbol = "/"
        number = Fraction(rng.randint(2, 9))
        wrapped = f"({text})" if step and symbol in "*/" else text
        text = f"{wrapped}{symbol}{number}"
        value = apply(symbol, value, number)
    return text
