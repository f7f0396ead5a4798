"""Rendering and token reuse: tokens.md, Rendering; the kwargs, roles and splice of session-http.md."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles_ref.errors import MessageValidationError, UsageError
from miles_ref.tokens.families import Family, get_family
from miles_ref.tokens.rendering import Renderer, normalize_messages, normalize_tools
from miles_ref.tokens.tokenizer import HFTokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 1+2?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"e": "1+2"}'}}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"role": "tool", "content": "3", "tool_call_id": "c1"}
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]


@pytest.fixture
def qwen(chatml: HFTokenizer) -> Renderer:
    return Renderer(chatml, get_family("qwen3"))


@pytest.fixture
def glm47(glm: HFTokenizer) -> Renderer:
    return Renderer(glm, get_family("glm47"))


def ids_of(renderer: Renderer, text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(renderer.tokenizer.encode(text), dtype=np.int64)


def extended(renderer: Renderer, snapshot: str, last: Any, appended: list[Any], tools: Any = None) -> str:
    ids = ids_of(renderer, snapshot)
    extension = renderer.extend(ids, last, appended, tools, renderer.merge_kwargs(None))
    assert extension.tail.dtype == np.int64
    return renderer.tokenizer.decode(np.concatenate([ids[: extension.kept], extension.tail]))


def test_a_first_turn_is_the_whole_render(qwen: Renderer) -> None:
    ids = qwen.first([SYSTEM, USER], None, {})
    assert ids.dtype == np.int64
    assert qwen.tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_only_the_suffix_is_encoded(qwen: Renderer, glm47: Renderer) -> None:
    assert extended(qwen, "XYZ<|im_end|>", ASSISTANT, [TOOL], TOOLS) == (
        "XYZ<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )
    assert extended(glm47, "XYZ<|observation|>", ASSISTANT, [TOOL, USER]) == (
        "XYZ<|observation|>\n3<|user|>\nWhat is 1+2?<|assistant|>\n"
    )


def test_the_prefix_is_reused_token_for_token(qwen: Renderer) -> None:
    odd = np.array([5, 5, 5, 900, 2], dtype=np.int64)  # not what encoding its text would give
    extension = qwen.extend(odd, ASSISTANT, [TOOL], None, {})
    assert extension.kept == 5
    assert extension.tail.tolist() == ids_of(qwen, "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n").tolist()


def test_an_empty_suffix_appends_the_generation_prompt(qwen: Renderer) -> None:
    assert extended(qwen, "XYZ<|im_end|>", {"role": "assistant"}, []) == "XYZ<|im_end|>\n<|im_start|>assistant\n"


def test_the_dummy_conversation_is_what_the_contract_says(variant: Callable[..., HFTokenizer]) -> None:
    # The template writes its first two messages after the new ones, where the difference shows them.
    template = "{% if add_generation_prompt %}{{ messages[:2] | tojson }}{% endif %}"
    renderer = Renderer(variant(template=template), Family())
    with_calls = json.loads(extended(renderer, "", {**ASSISTANT, "content": "said", "reasoning_content": "r"}, [TOOL]))
    assert [message["role"] for message in with_calls] == ["system", "assistant"]
    assert with_calls[0]["content"] == "dummy system"
    assert with_calls[1]["content"] == ""
    assert with_calls[1]["reasoning_content"] == " "
    assert with_calls[1]["tool_calls"][0]["function"]["arguments"] == {"e": "1+2"}
    for empty in (
        {"role": "assistant"},
        {"role": "assistant", "tool_calls": None},
        {"role": "assistant", "tool_calls": []},
    ):
        assert "tool_calls" not in json.loads(extended(renderer, "", empty, [TOOL]))[1]


@pytest.mark.parametrize("count", ["messages | length", "9 - messages | length"])
def test_a_template_that_rewrites_earlier_messages_is_refused(variant: Callable[..., HFTokenizer], count: str) -> None:
    renderer = Renderer(variant(template=f"{{{{ {count} }}}} messages"), Family())
    with pytest.raises(MessageValidationError, match=r"does not append.*character 0 of 10"):
        renderer.extend(np.array([1]), ASSISTANT, [TOOL], None, {})


def test_what_a_template_raises_is_the_clients_error(variant: Callable[..., HFTokenizer]) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    )
    renderer = Renderer(variant(template=template), Family())
    for render in (
        lambda: renderer.first([TOOL], None, {}),
        lambda: renderer.extend(np.array([1]), USER, [TOOL], None, {}),
        lambda: renderer.splice(np.array([1]), [USER], [USER, TOOL], None, {}),
    ):
        with pytest.raises(MessageValidationError, match="no tools here"):
            render()


def test_kwargs_reach_the_template(variant: Callable[..., HFTokenizer]) -> None:
    renderer = Renderer(variant(template="{{ a }}{{ b }}"), Family(), template_kwargs={"a": "x", "b": "y"})
    assert renderer.tokenizer.decode(renderer.first([USER], None, renderer.merge_kwargs({"b": "z"}))) == "xz"


# Normalisation


def test_an_assistants_null_content_becomes_empty() -> None:
    messages = [
        ASSISTANT,
        {"role": "user", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": []},
    ]
    before = copy.deepcopy(messages)
    shown = normalize_messages(messages)
    assert messages == before
    assert [message.get("content", "absent") for message in shown] == ["", None, "absent", []]


def test_what_needs_no_change_is_not_copied() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    plain = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    assert [one is other for one, other in zip(normalize_messages([parts, plain]), [parts, plain], strict=True)] == [
        True
    ] * 2


def arguments_shown(arguments: Any) -> Any:
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"arguments": arguments}}]}
    before = copy.deepcopy(message) if not isinstance(arguments, str) else None
    shown = normalize_messages([message])[0]
    assert before is None or message == before
    assert shown["tool_calls"][0]["id"] == "c"
    return shown["tool_calls"][0]["function"]["arguments"]


def test_arguments_that_spell_an_object_become_one() -> None:
    assert arguments_shown(' {"a": [1, 2.5, null], "b": {}}\n') == {"a": [1, 2.5, None], "b": {}}
    assert arguments_shown(f'{{"a": {2**80}}}') == {"a": 2**80}
    assert arguments_shown('{"a": "\\ud83d\\ude00"}') == {"a": "😀"}
    assert arguments_shown({"a": 1}) == {"a": 1}
    assert arguments_shown(None) is None


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "x", "[1]", "1", '"{}"', "null", '{"a": 1} x', '{"a": 1, "a": 1}', '{"a": NaN}', '{"a": -Infinity}',
        '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": ' + "1" * 5000 + "}", '{"a":' * 150 + "1" + "}" * 150,
        '{"a":[' * 60 + "]}" * 60, '{"a":' * 50_000 + "1" + "}" * 50_000,
    ],
    ids=range(17),
)  # fmt: skip
def test_other_arguments_are_kept_as_text_and_render(qwen: Renderer, text: str) -> None:
    assert arguments_shown(text) == text
    broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    assert text in qwen.tokenizer.decode(qwen.first([USER, broken, TOOL], TOOLS, {}))
    assert extended(qwen, "X", broken, [TOOL], TOOLS).startswith("X<|im_start|>tool\n3")


def test_wide_arguments_are_not_deep() -> None:
    assert arguments_shown(json.dumps({"a": [{}] * 150, "b": [[]] * 150})) == {"a": [{}] * 150, "b": [[]] * 150}


def test_deep_arguments_that_still_render_become_objects(qwen: Renderer) -> None:
    text = '{"a": ' * 90 + "1" + "}" * 90
    assert isinstance(arguments_shown(text), dict)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    assert text in qwen.tokenizer.decode(qwen.first([USER, call], None, {}))


@pytest.mark.parametrize("calls", ["x", 1, {"a": 1}, [None], ["x"], [{"function": None}], [{"function": "f"}], [{}]])
def test_tool_calls_of_another_shape_are_left_to_the_template(calls: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert normalize_messages([message]) == [message]


def test_tools_are_wrapped_with_four_fields_in_order() -> None:
    full = {"strict": True, "parameters": {"p": 1}, "name": "n", "description": "d", "returns": 1}
    tools = [{"type": "function", "function": full}, full, {"name": "m"}, {"function": {}}]
    before = copy.deepcopy(tools)
    wrapped = [
        '{"type": "function", "function": {"description": "d", "name": "n", "parameters": {"p": 1}, "strict": true}}',
        '{"type": "function", "function": {"description": "d", "name": "n", "parameters": {"p": 1}, "strict": true}}',
        '{"type": "function", "function": {"description": null, "name": "m", "parameters": null, "strict": false}}',
        '{"type": "function", "function": {"description": null, "name": null, "parameters": null, "strict": false}}',
    ]
    assert [json.dumps(tool) for tool in normalize_tools(tools) or []] == wrapped
    assert tools == before
    assert normalize_tools(None) is None
    assert normalize_tools([]) is None


@pytest.mark.parametrize("tools", ["x", {}, 1, ["calc"], [None], [[]], [{"function": "calc"}], [{"function": None}]])
def test_tools_that_are_no_objects_are_refused(qwen: Renderer, tools: Any) -> None:
    with pytest.raises(MessageValidationError, match="tool"):
        qwen.check_tools(tools)
    with pytest.raises(MessageValidationError, match="tool"):
        qwen.first([USER], tools, {})


def test_the_tools_of_the_request_are_in_both_renders(qwen: Renderer) -> None:
    assert extended(qwen, "X", ASSISTANT, [TOOL], TOOLS) == extended(qwen, "X", ASSISTANT, [TOOL], None)


# Template kwargs


def test_the_requests_kwargs_go_over_the_servers(chatml: HFTokenizer) -> None:
    renderer = Renderer(chatml, get_family("qwen3"), template_kwargs={"a": 1, "b": 2})
    assert renderer.template_kwargs == {"a": 1, "b": 2, "clear_thinking": False}
    assert renderer.merge_kwargs(None) == renderer.merge_kwargs({}) == renderer.template_kwargs
    assert renderer.merge_kwargs({"b": 3, "c": None, "clear_thinking": False}) == {
        "a": 1, "b": 3, "c": None, "clear_thinking": False,
    }  # fmt: skip
    assert Renderer(chatml, Family()).merge_kwargs(None) == {}


@pytest.mark.parametrize(
    "kwargs", ["no", 1, [], False, {"clear_thinking": True}, {"clear_thinking": 0}, {"clear_thinking": None}]
)
def test_kwargs_that_cannot_be_merged_are_refused(qwen: Renderer, kwargs: Any) -> None:
    with pytest.raises(MessageValidationError, match="chat_template_kwargs"):
        qwen.merge_kwargs(kwargs)


@pytest.mark.parametrize("key", ["tools", "messages", "chat_template", "add_generation_prompt", "tokenize"])
def test_kwargs_cannot_change_how_the_template_is_applied(chatml: HFTokenizer, key: str) -> None:
    with pytest.raises(MessageValidationError, match=key):
        Renderer(chatml, Family()).merge_kwargs({key: "x"})
    with pytest.raises(UsageError, match=key):
        Renderer(chatml, Family(), template_kwargs={key: "x"})


def test_a_server_that_contradicts_its_family_does_not_start(chatml: HFTokenizer) -> None:
    with pytest.raises(UsageError, match="clear_thinking"):
        Renderer(chatml, get_family("qwen3"), template_kwargs={"clear_thinking": True})


# Roles


def test_roles_that_the_family_does_not_append(chatml: HFTokenizer) -> None:
    renderer = Renderer(chatml, get_family("qwen35"))
    renderer.check_append_roles([TOOL, USER, ASSISTANT], client_assistants_allowed=False)
    for bad in (SYSTEM, {"role": "developer"}, {"role": None}, {}, {"role": ["user"]}):
        with pytest.raises(MessageValidationError, match=r"message 7 has role.*tool, user, assistant"):
            renderer.check_append_roles([USER, bad], client_assistants_allowed=True, first_index=6)


def test_narrowed_roles(chatml: HFTokenizer) -> None:
    renderer = Renderer(chatml, get_family("qwen3"), append_roles=["user", "tool"])
    assert renderer.append_roles == ("tool", "user")
    renderer.check_append_roles([ASSISTANT, USER, TOOL], client_assistants_allowed=True)
    with pytest.raises(MessageValidationError, match="assistant"):
        renderer.check_append_roles([ASSISTANT], client_assistants_allowed=False)
    with pytest.raises(MessageValidationError, match="system"):
        renderer.check_append_roles([SYSTEM], client_assistants_allowed=True)
    with pytest.raises(UsageError, match="system"):
        Renderer(chatml, get_family("qwen35"), append_roles=["system"])


# Client assistants under v2


def spliced(renderer: Renderer, snapshot: str, stored: list[Any], whole: list[Any]) -> tuple[str, bool]:
    result = renderer.splice(ids_of(renderer, snapshot), stored, whole, None, {})
    assert result.ids.dtype == np.int64
    return renderer.tokenizer.decode(result.ids), result.kept is not None


def test_a_splice_inherits_where_the_snapshot_begins_the_render(qwen: Renderer) -> None:
    said = {"role": "assistant", "content": "3."}
    stored = [USER, said]
    snapshot = "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n3.<|im_end|>"
    suffix = (
        "\n<|im_start|>assistant\nmore<|im_end|>\n<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    whole = [*stored, {"role": "assistant", "content": "more"}, USER]
    assert spliced(qwen, snapshot, stored, whole) == (snapshot + suffix, True)


def test_a_splice_that_does_not_fit_is_a_new_root(qwen: Renderer, glm47: Renderer) -> None:
    stored = [USER, {"role": "assistant", "content": "3."}]
    whole = [*stored, {"role": "assistant", "content": "more"}, USER]
    text, inherited = spliced(qwen, "something else", stored, whole)
    assert not inherited
    assert text.startswith("<|im_start|>user\nWhat")
    # The next opener, with which the snapshot of this family ends, is in no render of the stored messages.
    snapshot = "[gMASK]<sop><|user|>\nWhat is 1+2?<|assistant|>\n3.<|user|>"
    assert spliced(glm47, snapshot, stored, whole)[1]
    assert spliced(glm47, snapshot[: -len("<|user|>")], stored, whole)[1]
    assert not spliced(glm47, snapshot + "<|user|>", stored, whole)[1]


def test_a_splice_whose_whole_does_not_begin_with_the_stored_is_a_new_root(variant: Callable[..., HFTokenizer]) -> None:
    renderer = Renderer(variant(template="a{{ messages | length }}"), Family())
    assert spliced(renderer, "a", [USER], [USER, ASSISTANT]) == ("a2", False)
    assert spliced(renderer, "a1", [USER], [USER]) == ("a1", True)


def test_a_family_that_cannot_render_a_carried_assistant_again(chatml: HFTokenizer) -> None:
    class Stub(Family):
        name = "stub"
        supports_midpath_assistant_rerender = False

    renderer = Renderer(chatml, Stub())
    ids = np.array([1], dtype=np.int64)
    with pytest.raises(MessageValidationError, match=r"message 1 .*user message 3.*stub"):
        renderer.splice(ids, [USER], [USER, ASSISTANT, TOOL, USER], None, {})
    for fine in ([USER, ASSISTANT, TOOL], [USER, USER, ASSISTANT], [USER, TOOL, USER, ASSISTANT]):
        renderer.splice(ids, [USER], fine, None, {})
    renderer.splice(ids, [USER, ASSISTANT], [USER, ASSISTANT, USER], None, {})
