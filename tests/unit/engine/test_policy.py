from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ref.demo import MOST_TURNS
from miles_ref.engine import policy, task

TOOLS = [task.CALCULATOR]
QUESTION = {"role": "user", "content": "Compute ((3+4)*5-6)/7 step by step with the calculator."}


def called(expression: str, identity: str = "c0") -> dict[str, Any]:
    arguments = json.dumps({"expression": expression})
    function = {"name": "calculator", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": identity, "type": "function", "function": function}],
    }


def answered(text: str, identity: str = "c0") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": text}


def asked(reply: policy.Reply) -> str | None:
    return reply.calls[0].arguments["expression"] if reply.calls else None


def run(messages: list[dict[str, Any]], run_tool: Any = task.run_tool, seed: int = 0) -> tuple[list[str], policy.Reply]:
    """The calls that an agent is asked to make, and the reply that ends the episode."""
    messages, calls = list(messages), []
    for turn in range(60):
        reply = policy.reply(messages, TOOLS, seed)
        if not reply.calls:
            return calls, reply
        calls.append(asked(reply))
        messages += [
            called(calls[-1], f"c{turn}"),
            answered(run_tool("calculator", reply.calls[0].arguments), f"c{turn}"),
        ]
    raise AssertionError(f"no end after {len(calls)} calls")


def test_one_operation_a_turn_then_the_answer() -> None:
    calls, last = run([QUESTION])
    assert calls == ["3+4", "7*5", "35-6", "29/7"]
    assert "29/7" in last.content
    assert last.reasoning


@pytest.mark.parametrize("steps", [12, MOST_TURNS - 1])
@pytest.mark.parametrize("seed", range(10))
def test_tasks_are_solved(seed: int, steps: int) -> None:
    messages, _, run_tool, answer = task.make_task(seed, steps)
    calls, last = run(messages, run_tool, seed)
    assert 1 <= len(calls) <= steps
    assert f" {answer}." in last.content


def test_the_seed_chooses_the_words_and_nothing_else() -> None:
    replies = [policy.reply([QUESTION], TOOLS, seed) for seed in range(30)]
    assert len(set(map(str, replies))) > 3
    assert {asked(reply) for reply in replies} == {"3+4"}
    assert replies == [policy.reply([QUESTION], TOOLS, seed) for seed in range(30)]


def test_a_failed_call_is_repeated_once_then_done_without_the_tool() -> None:
    failed = [QUESTION, called("3+4"), answered("error: out of order")]
    again = policy.reply(failed, TOOLS, 0)
    assert asked(again) == "3+4"
    assert "out of order" in again.reasoning
    assert asked(policy.reply([*failed, called("3+4"), answered("error: out of order")], TOOLS, 0)) == "7*5"


def test_a_division_by_zero_ends_the_episode() -> None:
    calls, last = run([{"role": "user", "content": "compute 3/(2-2)"}])
    assert calls == ["2-2", "3/0", "3/0"]
    assert "division by zero" in last.content


def test_without_the_tool_the_answer_comes_at_once() -> None:
    for tools in (None, [], [{"type": "function", "function": {"name": "search"}}]):
        reply = policy.reply([QUESTION], tools, 0)
        assert not reply.calls
        assert "29/7" in reply.content


def test_a_tool_that_takes_an_expression_will_do() -> None:
    other = {"name": "calc", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}
    for tool in (other, {"type": "function", "function": other}):
        assert policy.reply([QUESTION], [tool], 0).calls == (policy.Call("calc", {"expression": "3+4"}),)


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_summary_carries_what_is_known(role: str) -> None:
    summary = {"role": role, "content": "So far: 3+4 = 7 and 7 * 5 = 35."}
    assert asked(policy.reply([QUESTION, summary], TOOLS, 0)) == "35-6"


def test_a_summary_that_is_wrong_is_not_believed() -> None:
    assert asked(policy.reply([QUESTION, {"role": "assistant", "content": "3+4 = 8"}], TOOLS, 0)) == "3+4"


def test_the_task_may_stand_in_a_summary_only() -> None:
    messages = [{"role": "assistant", "content": "I am computing (3+4)*5."}, {"role": "user", "content": "Go on."}]
    assert asked(policy.reply(messages, TOOLS, 0)) == "3+4"


def test_the_last_task_counts() -> None:
    messages = [
        QUESTION,
        {"role": "assistant", "content": "The answer is 29/7."},
        {"role": "user", "content": "And 1+1?"},
    ]
    assert asked(policy.reply(messages, TOOLS, 0)) == "1+1"


def test_asked_again_the_answer_is_repeated() -> None:
    messages = [
        {"role": "user", "content": "1+1?"},
        called("1+1"),
        answered("2"),
        {"role": "assistant", "content": "2."},
    ]
    reply = policy.reply([*messages, {"role": "user", "content": "Sure?"}], TOOLS, 0)
    assert reply.content.startswith("As before: ")
    assert "2" in reply.content


def test_the_tools_word_is_taken() -> None:
    assert asked(policy.reply([QUESTION, called("3+4"), answered("= 8")], TOOLS, 0)) == "8*5"


def test_parts_of_a_content_are_read() -> None:
    parts = [{"type": "text", "text": "compute"}, {"type": "text", "text": "2*3"}, {"type": "image_url"}]
    assert asked(policy.reply([{"role": "user", "content": parts}], TOOLS, 0)) == "2*3"


def test_results_without_ids_belong_to_the_calls_in_order() -> None:
    calls = [*called("1+2", "a")["tool_calls"], *called("3*4", "b")["tool_calls"]]
    messages = [
        {"role": "user", "content": "(1+2)-(3*4)"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "12"},
    ]
    assert asked(policy.reply(messages, TOOLS, 0)) == "3-12"


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(),
    st.sampled_from(["1+2", "(3+4)*5", "error: no", "9" * 5000, "1/0", '{"expression": "1+2"}', "c0"]),
    st.lists(
        st.dictionaries(st.sampled_from(["text", "id", "function"]), st.text() | st.none(), max_size=2), max_size=2
    ),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "critic"])},
    optional={
        "content": ODD,
        "tool_call_id": ODD,
        "tool_calls": ODD
        | st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "id": ODD,
                    "function": ODD | st.fixed_dictionaries({"arguments": ODD | st.just({"expression": "1+2"})}),
                },
            ),
            max_size=3,
        ),
    },
)


@settings(deadline=None, max_examples=200)
@given(st.lists(MESSAGE, max_size=6), st.none() | st.lists(st.dictionaries(st.just("function"), ODD, max_size=1)))
def test_any_history_gets_a_reply(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
    reply = policy.reply(messages, tools, 0)
    assert reply == policy.reply(messages, tools, 0)
    assert reply.content or reply.calls


def test_long_texts_cost_linear_time() -> None:
    """Quadratic matching would take hours here."""
    messages = [{"role": "user", "content": text * 200_000} for text in ("1", "(", "1+", "3 = ")]
    assert policy.reply(messages, TOOLS, 0)
