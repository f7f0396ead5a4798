from __future__ import annotations

from typing import Any

import pytest

from miles_ref.engine.policy import Call, Reply
from miles_ref.engine.speech import Speech, Spoken, call_id, parse
from miles_ref.errors import MessageValidationError, UsageError
from miles_ref.tokens.rendering import normalize_messages
from miles_ref.tokens.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer

ENDS = {"tiny-chatml": ("<|im_end|>", "<|im_end|>"), "tiny-glm": ("<|user|>", "<|observation|>")}
CALL = Call("calculator", {"expression": "(3+4)*5", "note": 'é " \\ </tool_call>'})
REPLIES = [
    Reply("Plain."),
    Reply("The answer is 29/7.", "All is known."),
    Reply("", "I ask.", (CALL,)),
    Reply("Step 1.", "", (CALL,)),
    Reply("Step 1.", "I ask.\n\nTwice.", (CALL, Call("other", {}))),
    Reply("", "", (CALL,)),
]


@pytest.fixture(params=sorted(ENDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(request.param)


def message(spoken: Spoken) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in spoken.calls]
    return {
        "role": "assistant",
        "content": spoken.content,
        "reasoning_content": spoken.reasoning,
        "tool_calls": calls,
    }


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_said_parsed_and_rendered_is_the_same_text(tokenizer: Tokenizer, reply: Reply) -> None:
    speech = Speech.of(tokenizer)
    ids = speech.completion(reply, {})
    assert ids[-1] in speech.stop_ids
    assert tokenizer.decode(ids[-1:]) == ENDS[tokenizer.name][bool(reply.calls)]

    spoken = parse(speech.text(ids, skip_special=True))
    assert spoken == Spoken(reply.content, reply.reasoning or None, reply.calls)

    question = {"role": "user", "content": "1+1?"}
    follower = {"role": "tool" if reply.calls else "user", "content": "."}
    rendered = tokenizer.render(
        normalize_messages([question, message(spoken), follower]),
        tools=None,
        add_generation_prompt=False,
        template_kwargs={},
    )
    assert rendered.startswith(tokenizer.decode(speech.prompt([question], None, {})) + tokenizer.decode(ids))


def test_turns_end_where_the_template_ends_them(tokenizer: Tokenizer) -> None:
    stop_ids = Speech.of(tokenizer).stop_ids
    assert {tokenizer.decode([token]) for token in stop_ids} == set(ENDS[tokenizer.name])


def test_without_a_template_there_is_no_speech() -> None:
    with pytest.raises(UsageError, match="no usable chat template"):
        Speech.of(BytesTokenizer())


class Scripted:
    """A tokenizer of whole texts: what `render` gives is fixed by whether a generation prompt is asked for."""

    name = "scripted"
    special_ids = frozenset({0})
    pieces = None

    def __init__(self, prompt: str, rest: str) -> None:
        self.prompt, self.rest = prompt, rest

    def encode(self, text: str) -> list[int]:
        return [0 if letter == "$" else ord(letter) for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join("$" if token == 0 else chr(token) for token in ids)

    def render(self, messages: Any, *, add_generation_prompt: bool, **_: Any) -> str:
        return self.prompt if add_generation_prompt else self.rest


@pytest.mark.parametrize(
    ("prompt", "rest", "what"),
    [("Q: A: <think>", "Q: A: no$", "generation prompt"), ("Q: A: ", "Q: A: no end", "no special token")],
)
def test_a_template_that_cannot_be_scripted_is_named(prompt: str, rest: str, what: str) -> None:
    with pytest.raises(MessageValidationError, match=what):
        Speech(Scripted(prompt, rest), frozenset()).completion(Reply("."), {})


def test_a_generation_prompt_may_open_the_reasoning() -> None:
    tokenizer = Scripted("", "")
    speech = Speech(tokenizer, frozenset())
    assert speech.opens_reasoning(tokenizer.encode("Q: A: <think>\n"))
    assert not speech.opens_reasoning(tokenizer.encode("Q: <think> A:"))


@pytest.mark.parametrize(
    ("text", "options", "spoken"),
    [
        ("<think>\na\n</think>\n\nb", {}, Spoken("b", "a", ())),
        ("<think>a</think>b", {}, Spoken("b", "a", ())),
        ("\n<think>a</think>b", {}, Spoken("b", "a", ())),
        ("<think>never closed", {}, Spoken("", "never closed", ())),
        ("a</think>b", {"opened": True}, Spoken("b", "a", ())),
        ("a</think>b", {}, Spoken("a</think>b", None, ())),
        ("b <think>a</think>", {}, Spoken("b <think>a</think>", None, ())),
        ("<think>a</think>b", {"reasoning": False}, Spoken("<think>a</think>b", None, ())),
        ('x<tool_call>{"name": "f"}</tool_call>', {}, Spoken("x", None, (Call("f", {}),))),
        ('x\n<tool_call>\n{"name": "f"}\n</tool_call>', {}, Spoken("x", None, (Call("f", {}),))),
        (
            '<tool_call>{"name": "f"}</tool_call> and <tool_call>{"name": "g"}</tool_call>.',
            {},
            Spoken(" and .", None, (Call("f", {}), Call("g", {}))),
        ),
        (
            '<tool_call>{"name": "f"}</tool_call>',
            {"tools": False},
            Spoken('<tool_call>{"name": "f"}</tool_call>', None, ()),
        ),
        ('<tool_call>{"name": "f"', {}, Spoken('<tool_call>{"name": "f"', None, ())),
        ('<tool_call>{"name": 1}</tool_call>', {}, Spoken('<tool_call>{"name": 1}</tool_call>', None, ())),
        ("<tool_call>[]</tool_call>", {}, Spoken("<tool_call>[]</tool_call>", None, ())),
        (
            '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
            {},
            Spoken('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, ()),
        ),
        (
            '<tool_call>{bad}</tool_call><tool_call>{"name": "f"}</tool_call>',
            {},
            Spoken("<tool_call>{bad}</tool_call>", None, (Call("f", {}),)),
        ),
        ("<tool_call>" + "[" * 100_000, {}, Spoken("<tool_call>" + "[" * 100_000, None, ())),
        ("  kept as it is \n", {}, Spoken("  kept as it is \n", None, ())),
        ("", {}, Spoken("", None, ())),
    ],
)
def test_parse(text: str, options: dict[str, bool], spoken: Spoken) -> None:
    assert parse(text, **options) == spoken


def test_call_ids_differ_by_prompt_and_index() -> None:
    assert call_id([1, 2], 0) == call_id([1, 2], 0)
    assert len({call_id([1, 2], 0), call_id([1, 2], 1), call_id([1, 3], 0)}) == 3
