"""What an http case may say in several ways, judged at this package's own server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from miles_ref.errors import CaseError
from miles_ref.testing.case_backend import CaseBackend
from miles_ref.testing.cases import parse_case
from miles_ref.testing.kinds.http import Reply, RunningServer, _backend_request, _sse, run_http_case
from miles_ref.testing.loop_thread import LoopThread
from miles_ref.testing.programs import ProgramError
from miles_ref.testing.references import References
from miles_ref.testing.targets import ReferenceTarget

CONFIG = {"tokenizer": "tiny-chatml", "family": "qwen3"}
CREATE = {"do": "create", "as": "s", "expect": {"status": 200}}
GET = {"do": "get", "session": "s"}
SAMPLES = {"do": "samples", "session": "s", "body": {}}
TOO_SHORT = {**SAMPLES, "body": {"max_seq_len": "x"}}


def chat(meta: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    meta = {"$tokens": "ok<|im_end|>", "completion_tokens": 2} if meta is None else meta
    choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop", "meta_info": meta}
    body = {"id": "r0", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    step = {"do": "chat", "session": "s", "body": asked, "backend": {"body": body}, "expect": {"status": 200}}
    return {**step, **more}


@pytest.fixture(scope="module")
def reference() -> Iterator[ReferenceTarget]:
    target = ReferenceTarget()
    yield target
    target.close()


@contextmanager
def a_backend() -> Iterator[CaseBackend]:
    thread = LoopThread()
    backend = CaseBackend(thread)
    try:
        yield backend
    finally:
        backend.close()
        thread.close()


def run(reference: ReferenceTarget, *steps: dict[str, Any], **config: Any) -> list[str]:
    case = {"id": "a/b", "kind": "http", "config": {**CONFIG, **config}, "input": {"steps": list(steps)}}
    return reference.run(parse_case(case))


def test_a_started_step_and_a_release_may_expect_nothing(reference: ReferenceTarget) -> None:
    job = {"job": "j", "expect": {}}
    start = {"do": "start", "step": chat(), "as": "j", "expect": {}}
    join = {"do": "join", "job": "j"}
    assert run(reference, CREATE, start, {"do": "release", **job}, {**join, "expect": {"status": 200}}) == []
    assert run(reference, CREATE, start, {"do": "release", **job}, {**join, "expect": {"status": 201}})


def test_a_session_needs_no_name(reference: ReferenceTarget) -> None:
    create = {"do": "create", "save": "made", "expect": {"status": 200}}
    get = {"do": "get", "session": {"$ref": "made.session_id"}}
    assert run(reference, create, {**get, "expect": {"status": 200}}) == []
    (found,) = run(reference, create, {**get, "expect": {"status": 404}})
    assert found.startswith("step 1 (get) status: got 200")


def test_an_until_saves_the_reply_that_held(reference: ReferenceTarget) -> None:
    until = {"do": "until", "step": {**GET, "expect": {"status": 200}}, "save": "held"}
    same = {"session_id": {"$ref": "held.session_id"}}
    assert run(reference, CREATE, until, {**GET, "expect": {"body": same}}) == []
    other = {"session_id": {"$not": {"$ref": "held.session_id"}}}
    assert run(reference, CREATE, until, {**GET, "expect": {"body": other}})


def test_an_until_that_never_holds_shows_the_last_reply(
    reference: ReferenceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_ref.testing.kinds.http.UNTIL_TIMEOUT", 0.0)
    until = {"do": "until", "step": {**GET, "expect": {"body": {"records": [{}]}}}}
    found = run(reference, CREATE, until)
    assert "still: body.records: got 0 items" in found[0]
    assert found[-1].startswith("step 1 (until) the last reply was 200 ")
    assert "session_id" in found[-1]


def test_samples_are_a_list_an_object_or_a_refusal(reference: ReferenceTarget) -> None:
    begun = [CREATE, chat(), {**SAMPLES, "save": "first", "expect": {"status": 200}}]
    for samples in ({"$ref": "first"}, {"$ref": "first.samples"}):
        assert run(reference, *begun, {**SAMPLES, "expect": {"samples": samples}}) == []
    assert "samples: got 1 items" in run(reference, *begun, {**SAMPLES, "expect": {"samples": []}})[0]
    nothing = {**SAMPLES, "expect": {"samples": []}}
    assert run(reference, CREATE, nothing) == []
    (found,) = run(reference, CREATE, {**SAMPLES, "expect": {"samples": {"samples": []}}})
    assert found == 'step 1 (samples) empty_reason: got "no_records", expected null'
    for refusal, said in (
        ({"error": 400, "mentions": ["max_seq_len"]}, []),
        ({"error": 400}, []),
        ({"error": 422}, ["samples: got status 400"]),
        ({"error": 400, "mentions": ["never said"]}, ['body: "never said" is not in']),
    ):
        found_all = run(reference, CREATE, {**TOO_SHORT, "expect": {"samples": refusal}})
        assert [part in line for part, line in zip(said, found_all, strict=True)] == [True] * len(said)
    with pytest.raises(CaseError, match=r"expect\.samples: the \$ref leads to"):
        run(reference, *begun, {**SAMPLES, "expect": {"samples": {"$ref": "first.empty_reason"}}})


def test_references_stand_in_status_mentions_and_path(reference: ReferenceTarget) -> None:
    health = {"do": "health", "expect": {"status": 200}}
    backend = {"body": {"status": 404, "path": "/health", "words": ["session"]}}
    saved = {"do": "request", "method": "GET", "path": "/sessions/{s}/v1/models", "backend": backend, "save": "told"}
    missing = {"do": "get", "session": "none"}
    assert run(reference, CREATE, saved, {**missing, "expect": {"status": {"$ref": "told.status"}}}) == []
    assert run(reference, CREATE, saved, {**health, "expect": {"status": {"$ref": "told.status"}}})
    asked = {"do": "request", "method": "GET", "path": {"$ref": "told.path"}, "expect": {"status": 200}}
    assert run(reference, CREATE, saved, asked) == []
    for mentions in ({"$ref": "told.words"}, [{"$ref": "s.session_id"}], {"$ref": "s.session_id"}):
        assert run(reference, CREATE, saved, {**GET, "expect": {"text_mentions": mentions}}) == []
        assert run(reference, CREATE, saved, {**health, "expect": {"text_mentions": mentions}})
    with pytest.raises(CaseError, match=r"path: the \$ref leads to 404, not to a text"):
        run(reference, CREATE, saved, {**asked, "path": {"$ref": "told.status"}})


@pytest.mark.parametrize("path", ["/sessions/$s", "/sessions/{s}"])
def test_a_path_names_a_session(path: str, reference: ReferenceTarget) -> None:
    step = {"do": "request", "method": "GET", "path": path, "expect": {"status": 200, "text_mentions": ["session_id"]}}
    assert run(reference, CREATE, step) == []


def test_tokens_stand_in_place_of_the_log_probs() -> None:
    references = References(lambda text: list(text.encode()))
    pairs = {"output_token_logprobs": [[0.0, 97], [-1 / 128, 98]]}
    assert references.resolve({"$tokens": "ab"}) == pairs
    assert references.resolve({"output_token_logprobs": {"$tokens": "ab"}}) == pairs
    assert references.resolve({"a": [{"n": 1, "output_token_logprobs": {"$tokens": "ab"}}]}) == {
        "a": [{"n": 1, **pairs}]
    }


@pytest.mark.parametrize("given", [0, 0.0])
def test_the_familys_own_trim_may_be_said(given: float, reference: ReferenceTarget) -> None:
    told = {**GET, "expect": {"body": {"metadata": {"max_trim_tokens": 0}}}}
    assert run(reference, CREATE, told, max_trim_tokens=given) == []


STREAM = Reply(
    200, [("content-type", "text/event-stream; charset=utf-8")], b'data: {"a": 1, "b": 2}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize(
    ("expected", "holds"),
    [
        ([{"a": 1}, "[DONE]"], True),
        (['{"b": 2,  "a": 1.0}', "[DONE]"], True),
        ({"$exact": ['{"b": 2, "a": 1}', "[DONE]"]}, True),
        (['{"a": 1}', "[DONE]"], False),
        (['{"b": 2, "a": 3}', "[DONE]"], False),
        (["[DONE]"], False),
        ([], False),
    ],
)
def test_an_event_may_be_given_as_its_raw_payload(expected: Any, holds: bool) -> None:
    assert (_sse(expected, STREAM) == []) == holds


def test_a_reply_that_is_no_event_stream_has_no_events_not_even_none() -> None:
    reply = Reply(200, [("content-type", "application/json")], b"{}")
    assert _sse([], reply) == ['sse: the reply is no event stream, its content type is "application/json"']
    assert _sse([], Reply(200, [("content-type", "text/event-stream")], b"")) == []


def test_a_proxied_request_without_a_body_is_told_so(reference: ReferenceTarget) -> None:
    request = {"do": "request", "method": "POST", "path": "/sessions/{s}/v1/other", "backend": {"body": {}}}
    assert run(reference, CREATE, {**request, "body": {"a": 1, "b": 2}, "expect": {"backend_request": {"a": 1}}}) == []
    (found,) = run(reference, CREATE, {**request, "expect": {"backend_request": {"a": 1}}})
    assert found.endswith('/v1/other came with an empty body, expected {"a": 1}')
    empty: list[dict[str, Any]] = [{"method": "GET", "path": "/v1/models", "headers": {}, "body": None}]
    assert _backend_request({"$any": True}, empty) == []
    assert _backend_request(json.loads('{"method": "GET"}'), empty) == []


def test_a_body_that_is_not_there_is_null(reference: ReferenceTarget) -> None:
    gone = {"do": "delete", "session": "s", "expect": {"status": 204, "body": None}}
    assert run(reference, CREATE, gone) == []
    assert run(reference, {**CREATE, "expect": {"body": None}})


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_server_without_a_reply_is_told_with_the_step(hangs_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_ref.testing.kinds.http.TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening, a_backend() as backend:
        server = RunningServer(f"http://127.0.0.1:{listening.getsockname()[1]}", backend)
        if hangs_up:
            hang_up = threading.Thread(target=lambda: listening.accept()[0].close())
            hang_up.start()
        case = parse_case({"id": "a/b", "kind": "http", "config": CONFIG, "input": {"steps": [CREATE]}})
        said = "broke the connection" if hangs_up else "gave no answer within 0.2 s"
        with pytest.raises(ProgramError, match=rf"step 0 \(create\): the server at http://.* {said}"):
            run_http_case(case, server)
        if hangs_up:
            hang_up.join(10)
