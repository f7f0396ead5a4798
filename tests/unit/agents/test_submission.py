"""The form of a submit, and what is refused first."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import pytest

from miles_ref.agents.submission import RefusedSubmit, content_digest, parse_submission

GOOD: dict[str, Any] = {"call_id": "a-B_9", "fn": "pkg.module:Class.run", "kwargs": {"x": [1, None]}}


def body(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


def refused(raw: bytes, *patterns: str) -> tuple[int, str, str]:
    with pytest.raises(RefusedSubmit) as caught:
        parse_submission(raw, tuple(patterns))
    answer = caught.value.answer
    return answer.status, answer.body["code"], answer.body["error"]


def test_env_scope_and_boot_id_may_be_absent() -> None:
    order = parse_submission(body())
    assert (order.env, order.submission.scope, order.submission.boot_id) == ({}, None, None)
    assert order.kwargs == {"x": [1, None]}
    same = parse_submission(body(env={}, scope=None, boot_id="other"))
    assert same.submission.digest == order.submission.digest


@pytest.mark.parametrize(
    "changes",
    [{"fn": "pkg.module:Class.other"}, {"kwargs": {"x": [1, False]}}, {"env": {"A": "1"}}, {"scope": "10.0.0.1:1"}],
)
def test_the_content_is_fn_kwargs_env_and_scope(changes: dict[str, Any]) -> None:
    assert parse_submission(body(**changes)).submission.digest != parse_submission(body()).submission.digest


def test_the_order_of_keys_is_not_content() -> None:
    assert content_digest("m:f", {"a": 1, "b": 2}, {}, None) == content_digest("m:f", {"b": 2, "a": 1}, {}, None)


def digest_of(number: str) -> bytes:
    raw = body(kwargs={"x": ["NUMBER"]}).replace(b'"NUMBER"', number.encode())
    return parse_submission(raw).submission.digest


@pytest.mark.parametrize(
    "spellings",
    [
        ["1", "1.0", "1e0", "10e-1"],
        ["0", "-0", "0.0", "-0.0", "1e-999"],
        ["0.1", "1e-1", "0.10"],
        ["100000000000000000000", "1e20", "1E+20"],
        ["9007199254740992", "9007199254740992.0"],
        ["-9007199254740994", "-9007199254740994.0", "-9.007199254740994e15"],
        [str(int(1e300)), "1e300"],
        ["1e400", "1e999"],
    ],
)
def test_the_spelling_of_a_number_is_not_content(spellings: list[str]) -> None:
    assert len({digest_of(spelling) for spelling in spellings}) == 1


def test_other_numbers_are_other_content_beyond_doubles_too() -> None:
    beyond = ["9007199254740992", "9007199254740993", "9007199254740994", str(10**400), str(10**400 + 1), "1e400"]
    beyond += ["-1e400", str(10**300), "1e300", str(int(1e300) + 1)]
    others = ["1", "true", '"1"', "1.5", "null", "-1", "0", "false", *beyond]
    assert len({digest_of(other) for other in others}) == len(others)


def test_integers_of_a_prompt_are_not_read_one_by_one() -> None:
    def calls(count: int) -> int:
        seen: list[str] = []
        gc.disable()  # what it would finalize here are others' objects
        sys.setprofile(lambda frame, event, arg: seen.append(event) if event == "call" else None)
        try:
            content_digest("m:f", {"prompt": list(range(count))}, {}, None)
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(seen)

    assert calls(1000) == calls(1)


def test_arguments_too_deep_for_this_worker_are_400() -> None:
    deep = body(kwargs={"x": "DEEP"}).replace(b'"DEEP"', b"[" * 900 + b"]" * 900)
    assert refused_or_taken(deep) in (None, (400, "form"))
    deeper = body(kwargs={"x": "DEEP"}).replace(b'"DEEP"', b"[" * 5000 + b"]" * 5000)
    assert refused_or_taken(deeper) == (400, "form")


def refused_or_taken(raw: bytes) -> tuple[int, str] | None:
    try:
        parse_submission(raw)
    except RefusedSubmit as refusal:
        return refusal.answer.status, refusal.answer.body["code"]
    return None


@pytest.mark.parametrize(
    ("raw", "mentions"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "object"),
        (b'"text"', "object"),
        (b'{"call_id": "a", "fn": "m:f", "kwargs": {"x": NaN}}', "NaN"),
        (b'{"call_id": "a", "fn": "m:f", "kwargs": {"x": -Infinity}}', "Infinity"),
        (b'{"call_id": "a\xff"}', "UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"call_id": "a", "call_id": "a", "fn": "m:f", "kwargs": {}}', "'call_id' stands twice"),
        (b'{"call_id": "a", "fn": "m:f", "kwargs": {"x": {"deep": 1, "deep": 1}}}', "'deep' stands twice"),
        (body(call_id=None), "call_id is missing"),
        (body(call_id=7), "call_id must be a string"),
        (body(call_id=""), "call_id must match"),
        (body(call_id="a b"), "call_id must match"),
        (body(call_id="ä"), "call_id must match"),
        (body(call_id="a\n"), "call_id must match"),
        (body(call_id="x" * 129), "call_id must match"),
        (body(fn="module"), "module:qualname"),
        (body(fn="module:"), "module:qualname"),
        (body(fn="a:b:c"), "module:qualname"),
        (body(fn=":function"), "module:qualname"),
        (body(fn=":"), "module:qualname"),
        (body(fn=""), "module:qualname"),
        (body(fn=["a:b"]), "fn must be a string"),
        (body(kwargs=[]), "kwargs must be an object"),
        (body(kwargs=None), "kwargs is missing"),
        (body(env=[]), "env must be an object"),
        (body(env={"A": 1}), "'A' must be a string"),
        (body(env={"A": None}), "'A' must be a string"),
        (body(env={"": "x"}), "no name of a variable"),
        (body(env={"A=B": "x"}), "no name of a variable"),
        (body(env={"A": "x\0y"}), "NUL"),
        (body(env={"A": "\ud800"}), "no environment can hold"),
        (body(scope=""), "scope must not be an empty string"),
        (body(scope=1), "scope must be a string"),
        (body(boot_id=1), "boot_id must be a string"),
    ],
)
def test_what_is_malformed_is_400(raw: bytes, mentions: str) -> None:
    status, code, message = refused(raw)
    assert (status, code) == (400, "form")
    assert mentions in message


@pytest.mark.parametrize(
    "fn", ["no-module:f", "1m:f", "m:f.<locals>.g", "a b:c", "a/b:c", ".m:f", "m:f..g", "m\n:\ud800"]
)
def test_whether_a_name_names_something_is_not_looked_at(fn: str) -> None:
    assert parse_submission(body(fn=fn)).submission.fn == fn


@pytest.mark.parametrize("fn", ["evil:x:pkg.module:run", "evil.pkg.module:run", "pkg.module", "pkg.modules:run"])
def test_no_name_passes_for_an_allowed_one(fn: str) -> None:
    assert refused(body(fn=fn), "pkg.module:*")[0] == 403
    assert refused(body(fn="evil:x:run"), "*:run")[0] == 400


def test_errors_name_variables_and_hold_no_values() -> None:
    _, _, message = refused(body(env={"NAME": "canary-value\0"}))
    assert "NAME" in message
    assert "canary" not in message


def test_a_function_that_is_not_allowed_goes_before_the_form() -> None:
    assert refused(body(call_id="not good!"), "other.*:*")[:2] == (403, "function")
    assert refused(body(call_id="not good!"), "pkg.*:*")[:2] == (400, "form")
    assert parse_submission(body(), ("nothing", "pkg.module:*")).submission.fn == "pkg.module:Class.run"


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "PATH"])
def test_variables_that_could_run_another_function_are_403_with_allowed_functions_only(name: str) -> None:
    raw = body(env={name: "/evil"})
    assert refused(raw, "pkg.*")[:2] == (403, "variable")
    assert parse_submission(raw).env == {name: "/evil"}


def test_case_counts_in_patterns() -> None:
    assert refused(body(), "PKG.*")[:2] == (403, "function")
    assert parse_submission(body(env={"path": "x", "MY_PATH": "y"}), ("pkg.*",)).env == {"path": "x", "MY_PATH": "y"}
