"""Each sentence of session-http.md, Matching messages."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles_ref.errors import MatcherError, PluginLoadError
from miles_ref.tokens.matching import (
    BUILT_IN,
    first_difference,
    get_matcher,
    loose_tool_call,
    role_content_only,
    strict,
)

ALL = list(BUILT_IN.values())


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": function, **more}],
    }


def test_agreeing_messages_match_and_other_keys_are_ignored() -> None:
    stored = {"role": "user", "content": "x", "name": "n", "tool_call_id": "1"}
    for matcher in ALL:
        assert matcher(stored, {"role": "user", "content": "x", "provider_specific_fields": {"a": 1}}) is True


@pytest.mark.parametrize(
    ("field", "value", "seen_by"),
    [
        ("role", "tool", ALL),
        ("content", "y", ALL),
        ("content", ["x"], ALL),
        ("content", None, ALL),
        ("reasoning_content", "r", [strict, loose_tool_call]),
        ("tool_calls", [{"id": "c"}], [strict, loose_tool_call]),
    ],
)
def test_a_field_that_differs_is_seen(field: str, value: Any, seen_by: list[Any]) -> None:
    stored = {"role": "user", "content": "x"}
    for matcher in ALL:
        assert matcher(stored, {**stored, field: value}) is (matcher not in seen_by)
        assert matcher({**stored, field: value}, stored) is (matcher not in seen_by)


@pytest.mark.parametrize("field", ["role", "content", "reasoning_content", "tool_calls"])
def test_null_empty_and_absent_are_the_same(field: str) -> None:
    base = {"role": "user", "content": "x", "reasoning_content": "r"}
    without = {key: value for key, value in base.items() if key != field}
    forms = [without, *({**without, field: empty} for empty in (None, "", []))]
    for matcher in ALL:
        assert all(matcher(one, other) for one in forms for other in forms)


@pytest.mark.parametrize("value", [0, False, {}])
def test_what_only_python_takes_for_empty_is_not(value: Any) -> None:
    for matcher in ALL:
        assert not matcher({"role": "user", "content": value}, {"role": "user", "content": None})
        assert matcher({"role": "user", "content": value}, {"role": "user", "content": value})


def test_true_is_not_one_under_any_matcher() -> None:
    for matcher in ALL:
        assert not matcher({"role": "user", "content": [True]}, {"role": "user", "content": [1]})
    assert not strict(call({"a": True}), call({"a": 1}))
    assert not loose_tool_call(call({"a": True}), call({"a": 1}))
    assert not loose_tool_call(call({"a": True}), call('{"a": 1}'))


def test_inside_a_tool_call_everything_but_index_is_compared_as_it_is() -> None:
    for matcher in (strict, loose_tool_call):
        assert matcher(call("{}"), call("{}", index=3))
        assert matcher(call("{}", index=0), call("{}", index=3))
        assert not matcher(call("{}"), call("{}", extra=None))
        assert not matcher(call("{}", extra=""), call("{}", extra=None))
        assert not matcher(call("{}", id="c"), call("{}", id="d"))
        assert not matcher(call("{}", type="function"), call("{}", type="other"))
        assert not matcher(call("{}"), {**call("{}"), "tool_calls": call("{}")["tool_calls"] * 2})
        stored = call("{}")
        stored["tool_calls"][0]["function"]["index"] = 1
        assert not matcher(stored, call("{}"))
    assert role_content_only(call("{}"), call("{}", id="d"))


@pytest.mark.parametrize(
    ("stored", "replayed"),
    [
        ('{"a": 1, "b": [1, 2.0, "x"]}', '{"b":[1,2.0,"x"],"a":1}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 1}', {"a": 1}),
        ({"a": 0.1}, '{"a": 1e-1}'),
        ({"a": 1}, {"a": 1.0}),
        (None, "{}"),
        ("", "{ }"),
        ("", None),
        ({}, ""),
        ('{"a": "\\u0061"}', '{"a": "a"}'),
        ('{"a": 1e1999999999}', '{"a": 10e1999999998}'),
    ],
)
def test_loose_takes_the_same_object_in_another_spelling(stored: Any, replayed: Any) -> None:
    assert loose_tool_call(call(stored), call(replayed))
    assert loose_tool_call(call(replayed), call(stored))
    spelled_alike = isinstance(stored, dict) and isinstance(replayed, dict)
    assert strict(call(stored), call(replayed)) is spelled_alike


@pytest.mark.parametrize(
    ("stored", "replayed"),
    [
        ('{"a": 9007199254740993}', '{"a": 9007199254740992.0}'),
        ({"a": 2**53 + 1}, {"a": float(2**53)}),
        ('{"a": 1, "a": 1}', '{"a": 1}'),
        ('{"a": NaN}', '{"a":NaN}'),
        ("[1]", "[1.0]"),
        ("[1]", [1]),
        ("1", 1),
        (" ", "{}"),
        ("{", "{ "),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": null}', "{}"),
        ("null", "{}"),
        (False, "{}"),
        ([], "{}"),
    ],
)
def test_loose_refuses_other_objects_and_what_is_no_object(stored: Any, replayed: Any) -> None:
    assert not loose_tool_call(call(stored), call(replayed))
    assert not loose_tool_call(call(replayed), call(stored))


@pytest.mark.parametrize("text", ["{", "[1]", '{"a":1,"a":1}', "NaN", "x"])
def test_equal_text_always_matches(text: str) -> None:
    assert loose_tool_call(call(text), call(text))


def test_absent_arguments_are_not_null() -> None:
    absent = call(None)
    del absent["tool_calls"][0]["function"]["arguments"]
    assert loose_tool_call(absent, absent)
    assert not loose_tool_call(absent, call(None))


def test_loose_compares_the_function_beside_its_arguments() -> None:
    other = call("{}")
    other["tool_calls"][0]["function"]["name"] = "g"
    assert not loose_tool_call(call("{ }"), other)


def test_odd_shapes_do_not_fail() -> None:
    shapes: list[Any] = ["x", {"a": 1}, [1], [None], [{"function": 1}], [{"function": {"arguments": 1}}], [{}]]
    for at, one in enumerate(shapes):
        for place, other in enumerate(shapes):
            for matcher in (strict, loose_tool_call):
                assert matcher({"role": "a", "tool_calls": one}, {"role": "a", "tool_calls": other}) is (at == place)


def test_depth_does_not_stop_a_matcher() -> None:
    def deep(leaf: int) -> list[Any]:
        value: list[Any] = [leaf]
        for _ in range(5000):
            value = [value]
        return value

    for matcher in ALL:
        assert matcher({"role": "user", "content": deep(1)}, {"role": "user", "content": deep(1)})
        assert not matcher({"role": "user", "content": deep(1)}, {"role": "user", "content": deep(2)})
    text = '{"a":' * 5000 + "1" + "}" * 5000
    assert loose_tool_call(call(text), call(text.replace(":", ": ")))


def test_the_first_difference_names_field_and_values() -> None:
    said = first_difference({"role": "user", "content": "a"}, {"role": "user", "content": "b" * 1000})
    assert said.startswith('content is "bbb')
    assert said.endswith('stored is "a"')
    assert "(1002 characters)" in said
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert "a list" in first_difference({"role": "user", "content": deep}, {"role": "user"})
    assert "does not take it" in first_difference({"role": "user"}, {"role": "user"})


@pytest.fixture
def plugin() -> Iterator[ModuleType]:
    module = ModuleType("matchers_of_a_test")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_a_custom_matcher_by_either_path(plugin: ModuleType) -> None:
    plugin.by_role = lambda stored, replayed: stored["role"] == replayed["role"]
    for path in ("matchers_of_a_test.by_role", "matchers_of_a_test:by_role"):
        matcher = get_matcher(path)
        assert matcher({"role": "a"}, {"role": "a", "content": "x"}) is True
        assert matcher({"role": "a"}, {"role": "b"}) is False


def test_a_custom_matcher_that_raises_or_answers_no_bool_is_named(plugin: ModuleType) -> None:
    def raises(stored: Any, replayed: Any) -> bool:
        raise KeyError("role")

    async def later() -> bool:
        return True

    plugin.raises = raises
    plugin.one = lambda stored, replayed: 1
    plugin.nothing = lambda stored, replayed: None
    plugin.later = lambda stored, replayed: later()
    for name, said in (("raises", "KeyError"), ("one", "int"), ("nothing", "NoneType"), ("later", "coroutine")):
        with pytest.raises(MatcherError, match=f"matchers_of_a_test.{name} .*{said}") as caught:
            get_matcher(f"matchers_of_a_test.{name}")({}, {})
        assert caught.value.status_code == 500


class Unshowable(Exception):
    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit("leaves"), "SystemExit: leaves"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (asyncio.CancelledError("nobody did"), "CancelledError: nobody did"),
        (GeneratorExit(), "GeneratorExit: "),
        (Unshowable(), "Unshowable: an error that cannot be shown"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_custom_matcher_raises_is_its_error(plugin: ModuleType, error: BaseException, said: str) -> None:
    def raises(stored: Any, replayed: Any) -> bool:
        raise error

    plugin.raises = raises
    with pytest.raises(MatcherError, match=f"^message matcher matchers_of_a_test.raises raised {said}$") as caught:
        get_matcher("matchers_of_a_test.raises")({}, {})
    assert caught.value.status_code == 500


def test_a_custom_matcher_writes_into_copies(plugin: ModuleType) -> None:
    def writes(stored: Any, replayed: Any) -> bool:
        same = bool(stored == replayed)
        for message in (stored, replayed):
            message["content"][0]["text"] = "written"
            message["tool_calls"][0]["function"].clear()
            message["tool_calls"].append(1)
            message["more"] = True
        return same

    plugin.writes = writes
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "said"}],
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
    }
    stored, replayed = copy.deepcopy(message), copy.deepcopy(message)
    assert get_matcher("matchers_of_a_test.writes")(stored, replayed) is True
    assert stored == replayed == message


def test_a_module_of_a_matcher_that_exits_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exiting_module_of_a_test.py").write_text("raise SystemExit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginLoadError, match=r"exiting_module_of_a_test\.f: cannot import it: SystemExit: no licence"):
        get_matcher("exiting_module_of_a_test.f")


def test_a_matcher_that_cannot_work_is_refused_at_once(plugin: ModuleType) -> None:
    async def is_async(stored: Any, replayed: Any) -> bool:
        return True

    def yields(stored: Any, replayed: Any) -> Iterator[bool]:
        yield True

    class AsyncCall:
        async def __call__(self, stored: Any, replayed: Any) -> bool:
            return True

    plugin.is_async = is_async
    plugin.hidden = partial(partial(is_async, {}))
    plugin.yields = yields
    plugin.instance = AsyncCall()
    plugin.one_argument = lambda stored: True
    plugin.number = 3
    for name in ("is_async", "hidden", "yields", "instance", "one_argument", "number", "missing"):
        with pytest.raises(PluginLoadError, match=f"matchers_of_a_test.{name}"):
            get_matcher(f"matchers_of_a_test.{name}")
    for name in ("stricter", "no_such_module.f", ":f", "matchers_of_a_test:"):
        with pytest.raises(PluginLoadError):
            get_matcher(name)


def test_a_function_that_does_not_say_what_it_takes_is_called_to_see() -> None:
    with pytest.raises(MatcherError, match=r"^message matcher builtins\.dir raised TypeError: "):
        get_matcher("builtins.dir")({}, {})


def test_the_built_in_matchers_go_by_name() -> None:
    assert get_matcher("strict") is strict
    assert json.dumps(sorted(BUILT_IN)) == '["loose_tool_call", "role_content_only", "strict"]'
