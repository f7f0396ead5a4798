"""Turns as a client sees them: what is forwarded, recorded and answered (session-http.md, A turn)."""

import asyncio
import base64
import json
import threading
from typing import Any

import pytest

from miles_ref.server import turns
from miles_ref.testing.backend import ScriptedReply, chat_reply
from miles_ref.trajectory.turn import Turn, TurnPlanner
from tests.e2e.server.harness import Json, Session, reply, user


async def test_a_conversation_is_recorded_and_collected(session: Session) -> None:
    for turn in range(4):
        await session.say(f"u{turn}", reply(f"a{turn}", response_id=f"r{turn}"))
    dump = await session.get()
    assert dump["session_id"] == session.id
    assert [record["response"]["id"] for record in dump["records"]] == ["r0", "r1", "r2", "r3"]
    for at, record in enumerate(dump["records"]):
        assert record["request"] == session.server.backend.seen[at].json()
        assert record["request"]["messages"] == session.messages[: 2 * at + 1]
        assert (record["method"], record["path"], record["status_code"]) == ("POST", "/v1/chat/completions", 200)
        assert record["request_timestamp"] < record["timestamp"]
    assert dump["metadata"]["tito_session_mismatch"] != []  # the scripted ids are no render of "a0"
    assert dump["metadata"]["max_trim_tokens"] == 0
    assert "tree" not in dump["metadata"]
    sample = await session.check_v1()
    assert sum(sample.loss_mask) == 12


async def test_what_the_server_sets(session: Session) -> None:
    await session.say(
        "u",
        input_ids=[1],
        logprobs=False,
        return_meta_info=False,
        no_stop_trim=True,
        stream_options={"include_usage": True},
        temperature=0.5,
    )
    sent = session.server.backend.seen[0].json()
    assert sent["logprobs"] is True
    assert sent["return_meta_info"] is True
    assert sent["no_stop_trim"] is False
    assert sent["temperature"] == 0.5
    assert len(sent["input_ids"]) > 5
    assert sent["chat_template_kwargs"] == {"clear_thinking": False}
    assert not {"stream", "stream_options", "return_routed_experts", "return_indexer_topk", "lora_path"} & sent.keys()


async def test_settings_add_to_the_request(start_server: Any) -> None:
    server = await start_server(
        lora_path="adapter",
        use_rollout_routing_replay=True,
        num_layers=1,
        use_rollout_indexer_replay=True,
        apply_chat_template_kwargs={"enable_thinking": False},
    )
    session = await server.create()
    await session.say("u", chat_template_kwargs={"x": 123456789012345678901234567890})
    sent = server.backend.seen[0].json()
    assert sent["lora_path"] == "adapter"
    assert sent["return_routed_experts"] is True
    assert sent["return_indexer_topk"] is True
    assert sent["chat_template_kwargs"] == {
        "enable_thinking": False,
        "clear_thinking": False,
        "x": 123456789012345678901234567890,
    }
    assert "routed_experts_start_len" not in sent


async def test_no_kwargs_at_all_are_left_out(start_server: Any) -> None:
    session = await (await start_server(tito_model="default")).create()
    await session.say("u", chat_template_kwargs={})
    assert "chat_template_kwargs" not in session.server.backend.seen[0].json()


async def test_what_a_client_sends_stays_as_it_is(session: Session) -> None:
    body = (
        b'{ "seed":123456789012345678901234567890, "temperature" :1.50, "x":{"b":1,"a":[1e2 ]},'
        b'"messages" : [ {"content":"\\u00fc", "role":"user","extra":1E-7} ] }'
    )
    answer = await session.raw_chat(body)
    assert answer.status == 200
    sent = session.server.backend.seen[0].raw
    for text in (b"123456789012345678901234567890", b"1.50", b'{"b":1,"a":[1e2 ]}', b'"extra":1E-7'):
        assert text in sent
    assert (await session.get())["records"][0]["request"]["seed"] == 123456789012345678901234567890


async def test_a_reply_goes_on_byte_for_byte(session: Session) -> None:
    body = json.dumps(chat_reply("ü"), ensure_ascii=False, indent=1).encode()
    session.server.backend.will(ScriptedReply(body))
    answer = await session.chat([user("u")])
    assert answer.body == body


async def test_a_stream_is_one_event(session: Session) -> None:
    calls = [{"id": "c", "type": "function", "index": 7, "function": {"name": "f", "arguments": "{}"}}]
    scripted = reply(
        "text", message={"tool_calls": calls, "reasoning_content": "why", "audio": None}, finish_reason="tool_calls"
    )
    scripted.headers = {"content-type": "application/json", "x-backend": "1"}
    session.server.backend.will(scripted)
    answer = await session.chat([user("u")], stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "x-backend" not in answer.headers
    first, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    assert json.loads(first.removeprefix("data: ")) == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "delta": {
                    "role": "assistant",
                    "content": "text",
                    "reasoning_content": "why",
                    "tool_calls": [{**calls[0], "index": 0}],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"total_tokens": 3},
    }


async def test_a_stream_leaves_out_what_the_reply_lacks(session: Session) -> None:
    body = chat_reply("text", message={"tool_calls": None, "reasoning_content": None})
    del body["usage"]
    session.server.backend.will(ScriptedReply(body))
    event = json.loads((await session.chat([user("u")], stream=True)).text.split("\n\n")[0].removeprefix("data: "))
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": "text"}
    assert "usage" not in event


async def test_errors_of_a_stream_are_json(session: Session) -> None:
    session.server.backend.will(ScriptedReply({"error": "busy"}, status=429))
    answer = await session.chat([user("u")], stream=True)
    assert (answer.status, answer.json()) == (429, {"error": "busy"})
    assert (await session.chat([], stream=True)).status == 400


@pytest.mark.parametrize("status", [201, 204, 400, 404, 429, 500, 503])
async def test_another_status_is_passed_through(session: Session, status: int) -> None:
    session.server.backend.will(ScriptedReply(b"" if status == 204 else b"not json", status, {"x-backend": "1"}))
    answer = await session.chat([user("u")])
    assert answer.status == status
    assert answer.body == (b"" if status == 204 else b"not json")
    assert answer.headers["x-backend"] == "1"
    assert (await session.get())["records"] == []


async def test_an_abort_is_no_turn(session: Session) -> None:
    scripted = chat_reply(finish_reason="abort")
    scripted["choices"][0]["meta_info"] = {}
    session.server.backend.will(ScriptedReply(scripted))
    answer = await session.chat([user("u")])
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "abort" in answer.error
    assert (await session.get())["records"] == []
    await session.say("u")


def broken(**changes: Any) -> ScriptedReply:
    """A reply with members of its choice replaced; None takes one out."""
    body = chat_reply()
    choice = body["choices"][0]
    for path, value in changes.items():
        holder: Json = choice
        *way, last = path.split("__")
        for step in way:
            holder = holder[step]
        if value is None:
            del holder[last]
        else:
            holder[last] = value
    return ScriptedReply(body)


def logprobs(*entries: Any) -> ScriptedReply:
    return broken(meta_info__output_token_logprobs=list(entries), meta_info__completion_tokens=len(entries))


UNUSABLE = {
    "no choices": ScriptedReply({"id": "x", "choices": []}),
    "choices absent": ScriptedReply({"id": "x"}),
    "choice null": ScriptedReply({"choices": [None]}),
    "no object": ScriptedReply([1]),
    "not json": ScriptedReply(b"{"),
    "empty": ScriptedReply(b""),
    "not utf-8": ScriptedReply(b'{"choices": "\xff"}'),
    "lone surrogate": ScriptedReply(b'{"choices": "\\ud800"}'),
    "nested deeply": ScriptedReply(b"[" * 100_000),
    "no meta_info": broken(meta_info=None),
    "meta_info not an object": broken(meta_info=[1]),
    "no log probs": broken(meta_info__output_token_logprobs=None),
    "log probs not a list": broken(meta_info__output_token_logprobs={"a": 1}),
    "no completion_tokens": broken(meta_info__completion_tokens=None),
    "other completion_tokens": broken(meta_info__completion_tokens=4),
    "completion_tokens a text": broken(meta_info__completion_tokens="3"),
    "no message": broken(message=None),
    "message a text": broken(message="hi"),
    "no content": broken(message__content=None),
    "content a number": broken(message__content=5),
    "tool_calls a text": broken(message__tool_calls="x"),
    "no finish_reason": broken(finish_reason=None),
    "finish_reason unknown": broken(finish_reason="content_filter"),
    "finish_reason an object": broken(finish_reason={"type": "stop"}),
    "prompt_tokens wrong": broken(meta_info__prompt_tokens=1),
    "cached_tokens a text": broken(meta_info__cached_tokens="1"),
    "weight_version a list": broken(meta_info__weight_version=["1"]),
    "latency a text": broken(meta_info__e2e_latency="fast"),
    "log prob null": logprobs([None, 300, None]),
    "log prob nan": logprobs([float("nan"), 300, None]),
    "log prob inf": logprobs([float("inf"), 300, None]),
    "log prob a text": logprobs(["0", 300, None]),
    "log prob true": logprobs([True, 300, None]),
    "entry too short": logprobs([-0.5]),
    "entry not a list": logprobs(-0.5),
    "token id negative": logprobs([-0.5, -1, None]),
    "token id a float": logprobs([-0.5, 1.0, None]),
    "token id a text": logprobs([-0.5, "1", None]),
    "token id huge": logprobs([-0.5, 2**70, None]),
    "token id beyond 32 bits": logprobs([-0.5, 2**40, None]),
}


@pytest.mark.parametrize("name", UNUSABLE)
async def test_a_reply_that_cannot_be_used(session: Session, name: str) -> None:
    await session.say("u0", reply("a0"))
    before = await session.get()
    session.server.backend.will(UNUSABLE[name])
    answer = await session.chat([*session.messages, user("u1")])
    assert answer.status == 502, answer.text
    assert answer.error
    assert await session.get() == before
    await session.say("u1", reply("a1"))
    await session.check_v1()


async def test_content_null_is_refused_beside_tool_calls(session: Session) -> None:
    body = chat_reply(message={"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]})
    body["choices"][0]["message"]["content"] = None
    session.server.backend.will(ScriptedReply(body))
    assert (await session.chat([user("u")])).status == 502


async def test_minus_infinity_is_a_value(session: Session) -> None:
    body = chat_reply(ids=[300, 301])
    body["choices"][0]["meta_info"]["output_token_logprobs"][0][0] = float("-inf")
    answer = await session.say("u", ScriptedReply(body))
    assert b"-Infinity" in answer.body
    record = (await session.get())["records"][0]
    assert record["response"]["choices"][0]["meta_info"]["output_token_logprobs"][0] == ["-inf", 300, None]
    (sample,) = await session.collect()
    assert sample.rollout_log_probs == [float("-inf"), -1 / 128]


async def test_an_empty_output_is_a_turn(session: Session) -> None:
    await session.say("u0", reply("", ids=[]))
    await session.say("u1", reply("a"))
    await session.check_v1()


@pytest.mark.parametrize(
    ("version", "text"), [("2", "2"), (7, "7"), (1.5, "1.5"), (None, None)], ids=["text", "int", "float", "null"]
)
async def test_weight_versions(session: Session, version: Any, text: str | None) -> None:
    await session.say("u", reply("a", meta={"weight_version": version}))
    assert (await session.check_v1()).weight_versions == ([] if text is None else [text])


async def test_prompt_tokens_that_agree_are_taken(session: Session) -> None:
    session.server.backend.answer = lambda request: reply("a", meta={"prompt_tokens": len(request.json()["input_ids"])})
    await session.say("u0")
    await session.say("u1")
    assert (await session.check_v1()).prefix_cache_info.total_prompt_tokens > 0


async def test_replay_payloads_are_not_the_clients(session: Session) -> None:
    rows = base64.b64encode(b"0123456789ab").decode()
    scripted = reply("a", meta={"routed_experts": rows, "indexer_topk": None, "other": [1]})
    answer = await session.say("u", scripted)
    meta = answer.json()["choices"][0]["meta_info"]
    assert not {"routed_experts", "indexer_topk"} & meta.keys()
    assert meta["other"] == [1]
    recorded = (await session.get())["records"][0]["response"]["choices"][0]["meta_info"]
    assert recorded["routed_experts"] == rows
    assert recorded["indexer_topk"] is None


@pytest.mark.parametrize("rows", ["no base64!", "QQ", "QR==", 5, {"a": 1}, "QUJD\\/w=="])
async def test_payloads_that_nobody_asked_for_are_recorded_as_they_are(session: Session, rows: Any) -> None:
    await session.say("u", reply("a", meta={"routed_experts": rows}))
    recorded = (await session.get())["records"][0]["response"]["choices"][0]["meta_info"]
    assert recorded["routed_experts"] == rows
    await session.check_v1()


async def test_two_identical_turns_at_once(session: Session) -> None:
    held = [reply("first"), reply("second")]
    for one in held:
        one.hold = True
    tasks = [session.start("u", one) for one in held]
    for one in held:
        await one.arrived.wait()
    held[1].release()
    second = await tasks[1]
    held[0].release()
    first = await tasks[0]
    assert [answer.json()["choices"][0]["message"]["content"] for answer in (first, second)] == ["first", "second"]
    # v1 moved on with the one that was there first; the other client got its reply all the same.
    records = (await session.get())["records"]
    assert [record["response"]["choices"][0]["message"]["content"] for record in records] == ["second"]


async def test_a_delete_answers_while_a_turn_is_in_flight(session: Session) -> None:
    held = reply("late")
    held.hold = True
    task = session.start("u", held)
    await held.arrived.wait()
    assert await session.delete() == 204
    assert await session.delete() == 404
    held.release()
    answer = await task
    assert answer.status == 200
    assert answer.json()["choices"][0]["message"]["content"] == "late"
    assert (await session.chat([user("u")])).status == 404


async def test_a_session_that_is_ended_while_a_turn_is_prepared_costs_no_generation(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large request is prepared in a thread."""
    loop, preparing, may_go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    plan = TurnPlanner.plan

    def slow(self: TurnPlanner, *more: Any) -> Turn:
        loop.call_soon_threadsafe(preparing.set)
        assert may_go_on.wait(30)
        return plan(self, *more)

    monkeypatch.setattr(turns, "_LARGE", 0)
    monkeypatch.setattr(TurnPlanner, "plan", slow)
    task = asyncio.create_task(session.chat([user("u")]))
    await preparing.wait()
    try:
        assert await session.delete() == 204
    finally:
        may_go_on.set()
    answer = await task
    assert answer.status == 404
    assert session.server.backend.seen == []


async def test_a_reply_that_cannot_be_used_is_none_for_a_closed_session_either(session: Session) -> None:
    held = reply("late", meta={"prompt_tokens": 1})
    held.hold = True
    task = session.start("u", held)
    await held.arrived.wait()
    assert await session.delete() == 204
    held.release()
    answer = await task
    assert answer.status == 502
    assert "did not use the tokens" in answer.error


async def test_a_collect_while_a_turn_is_in_flight(session: Session) -> None:
    await session.say("u0", reply("a0"))
    held = reply("a1")
    held.hold = True
    task = session.start("u1", held)
    await held.arrived.wait()
    before = await session.check_v1()
    held.release()
    assert (await task).status == 200
    after = await session.check_v1()
    assert len(after.tokens) > len(before.tokens)


async def test_turns_of_sessions_do_not_wait_for_each_other(session: Session) -> None:
    held = reply("slow")
    held.hold = True
    task = session.start("u", held)
    await held.arrived.wait()
    other = await session.server.create()
    await other.say("u", reply("fast"))
    held.release()
    assert (await task).status == 200


async def test_a_client_that_hangs_up_does_not_lose_the_turn(session: Session) -> None:
    held = reply("a0")
    held.hold = True
    session.server.backend.will(held)
    body = json.dumps({"model": "m", "messages": [user("u0")]}).encode()
    path = f"{session.path}/v1/chat/completions"
    _, writer = await asyncio.open_connection("127.0.0.1", session.server.runner.addresses[0][1])
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await held.arrived.wait()
    writer.transport.abort()
    held.release()
    for _ in range(1000):
        if (await session.get())["records"]:
            break
    session.messages = [user("u0"), {"role": "assistant", "content": "a0"}]
    await session.say("u1", reply("a1"))
    assert len((await session.get())["records"]) == 2
    await session.check_v1()
