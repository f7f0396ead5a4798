from __future__ import annotations

from fractions import Fraction

import pytest

from miles_ref.engine import task


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("((3+4)*5-6)/7", Fraction(29, 7)),
        ("2-3-4", Fraction(-5)),
        ("2/3/4", Fraction(1, 6)),
        ("-(3-5)*2", Fraction(4)),
        ("+7", Fraction(7)),
        ("0.1+0.2", Fraction(3, 10)),
        ("10000000000000000000001*3", Fraction(30000000000000000000003)),
        (" 6 ÷ 4 × 2 − 1 ", Fraction(2)),
    ],
)
def test_values_are_exact(expression: str, value: Fraction) -> None:
    assert task.evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "x+1",
        "2**9999999",
        "7//2",
        "1e5",
        "1_000",
        "(1",
        "1,2",
        "__import__('os')",
        "[1]",
        "(" * 300 + "1",
        "1+" * 400,
    ],
)
def test_what_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(task.ExpressionError):
        task.evaluate(expression)


def test_division_by_zero_is_named() -> None:
    with pytest.raises(task.ExpressionError, match="division by zero"):
        task.evaluate("3/(2-2)")


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("calculator", '{"expression": "(29/7)*7"}', "29"),
        ("calculator", {"expression": "1/3"}, "1/3"),
        ("calculator", '{"expression": "1/0"}', "error: division by zero"),
        ("calculator", '{"expr": "1"}', 'error: the arguments must be an object with a text "expression"'),
        ("calculator", "{", 'error: the arguments must be an object with a text "expression"'),
        ("calculator", '{"expression": 5}', 'error: the arguments must be an object with a text "expression"'),
        ("calculator", "[]", 'error: the arguments must be an object with a text "expression"'),
        ("search", "{}", "error: no tool 'search', there is 'calculator'"),
    ],
)
def test_the_tool_answers_whatever_it_is_asked(name: str, arguments: object, answer: str) -> None:
    assert task.run_tool(name, arguments) == answer


@pytest.mark.parametrize("steps", [1, 2, 8, 30])
def test_a_task_has_its_steps_and_its_answer(steps: int) -> None:
    for seed in range(20):
        messages, tools, run_tool, answer = task.make_task(seed, steps)
        expression = messages[-1]["content"].removeprefix("Compute ").split(" ")[0]
        assert sum(expression.count(symbol) for symbol in "+-*/") == steps
        assert run_tool(tools[0]["function"]["name"], {"expression": expression}) == answer
    assert task.make_task(3, steps)[0] == task.make_task(3, steps)[0]
    assert len({task.make_task(seed, steps).messages[-1]["content"] for seed in range(20)}) > 10


def test_a_task_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 step"):
        task.make_task(0, 0)
