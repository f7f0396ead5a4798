"""The steps of http and worker cases: each has its closed set of keys, found wrong when the case is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from miles_ref.errors import CaseError
from miles_ref.testing.cases import Case, parse_case
from miles_ref.testing.command import case as case_group

HEALTH = {"do": "health", "expect": {"status": 200}}
CREATE = {"do": "create", "as": "s", "expect": {"status": 200}}


def raw(kind: str, *steps: Any, **given: Any) -> dict[str, Any]:
    return {"id": "a/b", "kind": kind, "input": {"steps": list(steps), **given}, "expect": {}}


def http(*steps: Any) -> Case:
    return parse_case(raw("http", *steps), "f.json: ")


def worker(*steps: Any, **given: Any) -> Case:
    return parse_case(raw("worker", *steps, **given), "f.json: ")


@pytest.mark.parametrize(
    ("kind", "step", "said"),
    [
        (
            "http",
            {"do": "health", "expct": {"status": 200}},
            r" \(health\): unknown key 'expct'; did you mean 'expect'",
        ),
        (
            "http",
            {"do": "health", "expect": {"statuss": 500}},
            r"\(health\).expect: .*'statuss'; did you mean 'status'",
        ),
        ("http", {"do": "health", "expect": {"bodyy": {}}}, "unknown key 'bodyy'; did you mean 'body'"),
        ("http", {"do": "helth", "expect": {}}, ".do is 'helth'; did you mean 'health'"),
        ("http", {"expect": {"status": 200}}, " has no do; known are chat, create"),
        ("http", 3, " is 3, not an object"),
        ("http", {"do": ["chat"]}, ".do is "),
        ("http", {"do": "chat", "expect": {"status": 200}}, r" \(chat\) has no session"),
        ("http", {"do": "start", "step": HEALTH}, r" \(start\) has no as"),
        ("http", {"do": "release", "job": "j", "expect": {"status": 200}}, r"\(release\).expect: .*gets no reply"),
        ("http", {"do": "health", "expect": {"status": "200"}}, "expect.status is '200', not a whole number"),
        ("http", {"do": "health", "expect": {"text_mentions": "ab"}}, "text_mentions is 'ab', not a list"),
        ("http", {"do": "health", "expect": {"samples": {"empty_reason": None}}}, "samples has no samples"),
        ("http", {"do": "health", "expect": {"samples": {"error": "422"}}}, "samples.error is '422', not a whole"),
        ("http", {"do": "health", "expect": {"samples": {"eror": 422}}}, "key 'eror'; did you mean 'error'"),
        ("http", {"do": "health", "expect": {"samples": "x"}}, "samples is 'x', not an object or a list"),
        ("http", {"do": "health", "expect": {"status": {"$rf": "a.b"}}}, r"key '\$rf'; did you mean '\$ref'"),
        ("http", {"do": "health", "expect": {"status": {"$ref": 3}}}, r"status.\$ref is 3, not a text"),
        ("http", {"do": "request", "method": "GET", "path": {"x": "a"}}, "path: unknown key 'x'"),
        ("http", {**HEALTH, "backend": "x"}, "backend is 'x', not null or an object or a list"),
        ("http", {**HEALTH, "backend": {"stat": 1}}, "backend: unknown key 'stat'; did you mean 'status'"),
        ("http", {**HEALTH, "backend": [{"fail": "conect"}]}, r"backend\[0\].fail is 'conect'; did you mean 'connect'"),
        ("http", {"do": "until"}, r" \(until\) has no step"),
        ("http", {"do": "until", "step": {"do": "health"}}, r" \(until\) expects nothing"),
        ("http", {"do": "until", "step": {"do": "health", "x": 1}}, r" \(until\).step \(health\): unknown key 'x'"),
        ("http", {"do": "start", "step": {"do": "release", "job": "j"}, "as": "j"}, ".step.do is 'release'"),
        ("http", {"do": "join", "job": "j"}, r"\(join\).job is 'j', which no step before it started; none is known"),
        ("worker", {"do": "sigterm", "expect": {"status": 999}}, r"\(sigterm\).expect: .*'status'.*gets no reply"),
        (
            "worker",
            {"do": "submit", "call": "c", "kwarg": {}},
            r" \(submit\): unknown key 'kwarg'; did you mean 'kwargs'",
        ),
        ("worker", {"do": "health", "expect": {"exit": 0}}, "unknown key 'exit'"),
        ("worker", {"do": "exited", "expect": {"status": 200}}, "unknown key 'status'; known are exit"),
        ("worker", {"do": "poll", "expect": {}}, r" \(poll\) has no call"),
        ("worker", {"do": "until", "step": {"do": "calls"}}, r" \(until\) expects nothing"),
        ("worker", {"do": "until", "call": "c"}, r" \(until\) has no expect"),
        ("worker", {"do": "until", "expect": {}}, r" \(until\) expects nothing"),
        ("worker", {"do": "until", "stepp": {"do": "calls"}}, "unknown key 'stepp'; did you mean 'step'"),
        ("worker", {"do": "start", "step": {"do": "sigterm"}, "as": "j"}, ".step.do is 'sigterm'"),
        ("worker", {"do": "poll", "call": "a", "cancel": 2}, r"\(poll\).cancel is 2; known are"),
    ],
)
def test_a_step_that_is_misspelt_is_an_error_that_names_it(kind: str, step: Any, said: str) -> None:
    with pytest.raises(CaseError, match=rf"^f\.json: a/b: input\.steps\[1\].*{said}"):
        parse_case(raw(kind, HEALTH, step), "f.json: ")


@pytest.mark.parametrize("kind", ["http", "worker"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "input has no steps"),
        ({"steps": []}, "input.steps is a list of 0, and needs at least 1"),
        ({"steps": "ab"}, "input.steps is 'ab', not a list"),
        ({"step": HEALTH}, "input: unknown key 'step'; did you mean 'steps'"),
    ],
)
def test_a_case_that_judges_nothing_is_an_error(kind: str, given: Any, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        parse_case({"id": "a/b", "kind": kind, "input": given, "expect": {}})


@pytest.mark.parametrize("kind", ["http", "worker"])
def test_a_job_that_is_never_joined_is_an_error(kind: str) -> None:
    start = {"do": "start", "step": {"do": "health", "expect": {"status": 999}}, "as": "j"}
    join = {"do": "join", "job": "j"}
    for steps in ([start], [start, join, HEALTH, start]):
        with pytest.raises(CaseError, match="the job 'j' is never joined"):
            parse_case(raw(kind, *steps))
    parse_case(raw(kind, start, join))


def test_a_job_that_is_hung_up_needs_no_join() -> None:
    start = {"do": "start", "step": {"do": "health", "expect": {"status": 200}}, "as": "j"}
    http(start, {"do": "hang_up", "job": "j"}, HEALTH)
    with pytest.raises(CaseError, match="judges nothing"):
        http(start, {"do": "hang_up", "job": "j"})
    with pytest.raises(CaseError, match="the job 'k' is never joined"):
        http(start, {**start, "as": "k"}, {"do": "hang_up", "job": "j"})


@pytest.mark.parametrize("step", [{"do": "health"}, {"do": "health", "expect": {}}])
def test_an_http_case_expects_something_and_a_worker_case_always_does(step: dict[str, Any]) -> None:
    with pytest.raises(CaseError, match="no step expects anything"):
        http(step)
    assert worker(step).input["steps"] == [step]


@pytest.mark.parametrize("kind", ["http", "worker"])
def test_what_is_expected_of_all_steps_at_once_is_an_error(kind: str) -> None:
    with pytest.raises(CaseError, match=r"expect: unknown key 'status'.*each step has its own expect"):
        parse_case({**raw(kind, HEALTH), "expect": {"status": 200}})
    without = raw(kind, HEALTH)
    del without["expect"]
    assert parse_case(without).expect == {}


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ({"a": {"$anyy": True}}, r"expect.body.a: unknown marker '\$anyy'; did you mean '\$any'"),
        ([{"$unordered": "ab"}], r"expect.body\[0\]: \$unordered takes a list, not 'ab'"),
        ({"a": {"$exact": {"b": {"$ref": 3}}}}, r"\$ref takes a text"),
        ({"a": {"$absent": False}}, r"\$absent takes true, not False"),
        ({"a": {"$ids": 3}}, r"\$ids takes a text or a list"),
    ],
)
def test_markers_are_read_before_anything_runs(expected: Any, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        http({"do": "health", "expect": {"body": expected}})
    with pytest.raises(CaseError, match=said):
        worker({"do": "until", "step": {"do": "calls", "expect": {"body": expected}}})


def test_what_is_nested_too_deeply_is_an_error_that_names_the_case() -> None:
    body: Any = 1
    for _ in range(5000):
        body = [body]
    with pytest.raises(CaseError, match="a/b: what a step expects is nested too deeply"):
        http({"do": "health", "expect": {"body": body}})


def test_jobs_are_started_before_they_are_named_and_joined_once() -> None:
    start = {"do": "start", "step": HEALTH, "as": "job"}
    join = {"do": "join", "job": "job"}
    http(start, {"do": "release", "job": "job"}, join, start, {"do": "hang_up", "job": "job"})
    worker(start, join)
    with pytest.raises(CaseError, match=r"steps\[1\] \(join\).job is 'jop'.*did you mean 'job'"):
        http(start, {**join, "job": "jop"})
    with pytest.raises(CaseError, match=r"steps\[2\] \(join\).job is 'job'"):
        http(start, join, join)
    with pytest.raises(CaseError, match=r"steps\[1\] \(start\).as is 'job', a job that is not joined yet"):
        worker(start, start)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (3, "input.config is 3, not an object"),
        ({"allow_functions": []}, "'allow_functions'; did you mean 'allow_function'"),
        ({"keep_env": 3}, "keep_env is 3, not a text or a list"),
        ({"keep_env": ["A", 3]}, r"keep_env\[1\] is 3, not a text"),
        ({"max_calls": "3"}, "max_calls is '3', not a whole number"),
        ({"clean_env": "no"}, "clean_env is 'no', not true or false"),
        ({"env": {"A": 1}}, "env.A is 1, not a text"),
        ({"token": ["a"]}, "not a text"),
    ],
)
def test_a_worker_is_configured_by_known_flags(config: Any, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        worker(HEALTH, config=config)


def test_a_misspelt_step_fails_its_own_case_only(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text(
        json.dumps([raw("http", CREATE), {**raw("http", {**HEALTH, "expect": {"statuss": 500}}), "id": "b"}])
    )
    done = CliRunner().invoke(case_group, ["run", str(file)])
    assert done.exit_code == 1
    assert "steps.json: b: input.steps[0] (health).expect: unknown key 'statuss'" in done.output
    assert "1 passed, 1 failed" in done.output
