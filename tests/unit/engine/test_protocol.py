from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from miles_ref.engine import protocol
from miles_ref.engine.policy import Call
from miles_ref.engine.protocol import Result
from miles_ref.engine.speech import Spoken
from miles_ref.errors import MessageValidationError

MESSAGES = [{"role": "user", "content": "hi"}]


def read(**fields: Any) -> protocol.ChatRequest:
    return protocol.read_chat_request(json.dumps({"messages": MESSAGES, **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": 1}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls"),
        ({"input_ids": "1 2"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, "2"]}, "input_ids[1]"),
        ({"input_ids": [1, 2.5]}, "input_ids[1]"),
        ({"input_ids": [True]}, "input_ids[0]"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": "x"}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"return_routed_experts": "yes"}, "return_routed_experts"),
        ({"routed_experts_start_len": -1}, "routed_experts_start_len"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream": "no"}, "stream"),
        ({"n": 2}, "n is 2"),
        ({"n": 0}, "n is 0"),
        ({"n": "1"}, "`$.n`"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"rid": 5}, "rid"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(MessageValidationError) as refused:
        read(**fields)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"messages": [{"role": "\xff"}]}', b"[" * 100_000, b"\0" * 10],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(MessageValidationError):
        protocol.read_chat_request(body)
    with pytest.raises(MessageValidationError):
        protocol.read_abort_request(body)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(MessageValidationError):
        protocol.read_chat_request(b'{"messages": [{"role": "user", "content": "\\ud800"}]}')


def test_unknown_fields_are_ignored_and_null_is_absent() -> None:
    request = read(
        frequency_penalty=0.5, n=None, max_tokens=None, stop=None, messages=[{"role": "user", "content": None}]
    )
    assert request.n is None
    assert read(n=1, temperature=1).temperature == 1
    assert read(stop="").stop_texts == ()
    assert read(stop=["a", ""]).stop_texts == ("a",)


def test_tools_are_used_unless_forbidden() -> None:
    assert read(tools=[{}]).uses_tools
    assert not read(tools=[{}], tool_choice="none").uses_tools
    assert not read(tools=[]).uses_tools
    assert not read().uses_tools


def test_an_abort_says_what() -> None:
    assert protocol.read_abort_request(b'{"rid": "a"}').rid == "a"
    assert protocol.read_abort_request(b'{"abort_all": true}').abort_all
    for body in (b"{}", b'{"rid": 1}', b'{"abort_all": "yes"}'):
        with pytest.raises(MessageValidationError):
            protocol.read_abort_request(body)


def result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "rid": "r1",
        "model": "m",
        "created": 17,
        "spoken": Spoken("hello", None, ()),
        "call_ids": [],
        "finish": "stop",
        "matched": 2,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "output_ids": [5, 2],
        "log_probs": [-0.5, -1.5],
        "routes": np.arange(32, dtype=np.int32).reshape(4, 4, 2),
        "latency": 0.25,
        "weight_version": "7",
    }
    return Result(**{**values, **changes})


def test_the_reply_has_what_a_session_server_reads() -> None:
    reply = protocol.chat_reply(result(), read(return_meta_info=True), [])
    assert reply == {
        "id": "r1",
        "object": "chat.completion",
        "created": 17,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello"},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": 2,
                "meta_info": {
                    "id": "r1",
                    "finish_reason": {"type": "stop", "matched": 2},
                    "prompt_tokens": 3,
                    "cached_tokens": 2,
                    "completion_tokens": 2,
                    "output_token_logprobs": [[-0.5, 5, None], [-1.5, 2, None]],
                    "e2e_latency": 0.25,
                    "weight_version": "7",
                },
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "metadata": {"weight_version": "7"},
    }


def test_routed_experts_come_when_asked_for_from_where_asked_for() -> None:
    def rows(**fields: Any) -> Any:
        info = protocol.chat_reply(result(), read(**fields), [])["choices"][0]["meta_info"]
        payload = info.get("routed_experts")
        return None if payload is None else np.frombuffer(base64.b64decode(payload), "<i4").tolist()

    assert rows() is None
    assert rows(return_routed_experts=False) is None
    assert rows(return_routed_experts=True) == list(range(32))
    assert rows(return_routed_experts=True, routed_experts_start_len=3) == list(range(24, 32))
    assert rows(return_routed_experts=True, routed_experts_start_len=4) is None
    unrouted = protocol.chat_reply(result(routes=None), read(return_routed_experts=True), [])
    assert "routed_experts" not in unrouted["choices"][0]["meta_info"]


def test_tool_calls_are_in_openais_form() -> None:
    spoken = Spoken("", "hm", (Call("f", {"a": "é", "b": 1}), Call("g", {})))
    choice = protocol.chat_reply(result(spoken=spoken, call_ids=["c0", "c1"]), read(), [])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["meta_info"]["finish_reason"]["type"] == "stop"
    assert choice["message"] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c0", "index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a": "é", "b": 1}'}},
            {"id": "c1", "index": 1, "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    for finish in ("length", "abort"):
        cut = protocol.chat_reply(result(spoken=spoken, call_ids=["c0", "c1"], finish=finish), read(), [])
        assert cut["choices"][0]["finish_reason"] == finish
        assert cut["choices"][0]["meta_info"]["finish_reason"]["type"] == finish


def test_log_probs_by_text_and_no_meta_info_on_request() -> None:
    choice = protocol.chat_reply(result(), read(logprobs=True, return_meta_info=False), ["é", "<end>"])["choices"][0]
    assert "meta_info" not in choice
    assert choice["logprobs"]["content"][0] == {"token": "é", "bytes": [195, 169], "logprob": -0.5, "top_logprobs": []}


def test_stream_events() -> None:
    request = read(stream=True, stream_options={"include_usage": True})
    events = protocol.stream_events(protocol.chat_reply(result(), request, []), request)
    assert events[-1] == b"data: [DONE]\n\n"
    said, ended, usage = (json.loads(event.removeprefix(b"data: ")) for event in events[:-1])
    assert said["object"] == "chat.completion.chunk"
    assert said["choices"][0]["delta"] == {"role": "assistant", "content": "hello"}
    assert ended["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert usage["usage"]["total_tokens"] == 5
    assert len(protocol.stream_events(protocol.chat_reply(result(), request, []), read(stream=True))) == 3


def test_errors_can_be_read_as_openais_and_as_sglangs() -> None:
    reply = protocol.error_reply("too long", 400)
    assert reply["error"] == {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    assert reply["object"] == "error"
    assert {**reply["error"]}.items() <= reply.items()
