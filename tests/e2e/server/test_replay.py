"""Replay payloads through the server: whole, additional, refused (session-http.md, A turn; pipeline.md)."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from miles_ref.testing.backend import ScriptedReply, SeenRequest, chat_reply
from tests.e2e.server.harness import Session, user

LAYERS, TOPK = 2, 3


def rows(start: int, end: int, layers: int = LAYERS, topk: int = TOPK) -> str:
    """Rows start to end, the same numbers for the same row in every reply."""
    table = np.arange(start * layers * topk, end * layers * topk, dtype="<i4")
    return base64.b64encode(table.tobytes()).decode()


def routed(request: SeenRequest, output: int = 3, **meta: Any) -> ScriptedReply:
    body = request.json()
    end = len(body["input_ids"]) + output - 1
    start = body.get("routed_experts_start_len", 0)
    return ScriptedReply(chat_reply("a", meta={"routed_experts": rows(start, end), **meta}))


async def replaying(start_server: Any, **settings: Any) -> Session:
    server = await start_server(use_rollout_routing_replay=True, num_layers=LAYERS, **settings)
    session: Session = await server.create()
    return session


CONFIG = {"routed_experts": True, "num_layers": LAYERS}


@pytest.mark.parametrize("topk", [0, TOPK])
async def test_whole_rows(start_server: Any, topk: int) -> None:
    session = await replaying(start_server, moe_router_topk=topk)
    session.server.backend.answer = routed
    for turn in range(4):
        await session.say(f"u{turn}")
    sample = await session.check_v1({**CONFIG, "moe_router_topk": topk})
    assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, LAYERS, TOPK)
    # Each row is kept once.
    kept = sum(len(node.record.routed_experts.tail) for node in _nodes(session))
    assert kept == sample.rollout_routed_experts.nbytes


async def test_rows_whose_beginning_changed_are_kept_whole(start_server: Any) -> None:
    session = await replaying(start_server)
    session.server.backend.answer = routed
    await session.say("u0")
    end = len((await session.get())["records"][0]["request"]["input_ids"])
    changed = np.full((end + 200, LAYERS, TOPK), 7, dtype="<i4")

    def answer(request: SeenRequest) -> ScriptedReply:
        table = changed[: len(request.json()["input_ids"]) + 2]
        text = base64.b64encode(table.tobytes()).decode()
        return ScriptedReply(chat_reply("a", meta={"routed_experts": text}))

    session.server.backend.answer = answer
    await session.say("u1")
    sample = await session.check_v1(CONFIG)
    assert set(sample.rollout_routed_experts.ravel().tolist()) == {7}
    records = (await session.get())["records"]
    first = base64.b64decode(records[0]["response"]["choices"][0]["meta_info"]["routed_experts"])
    assert first == base64.b64decode(rows(0, end + 2))


async def test_additional_rows(start_server: Any) -> None:
    session = await replaying(start_server, pause_generation_mode="in_place")
    session.server.backend.answer = routed
    for turn in range(4):
        await session.say(f"u{turn}")
    sent = [seen.json() for seen in session.server.backend.seen]
    ends = [len(body["input_ids"]) + 3 for body in sent]
    assert [body["routed_experts_start_len"] for body in sent] == [0, *(end - 1 for end in ends[:-1])]
    sample = await session.check_v1({**CONFIG, "additional_r3": True})
    assert sample.rollout_routed_experts.ravel().tolist() == list(range((len(sample.tokens) - 1) * LAYERS * TOPK))


async def test_additional_rows_may_be_absent_throughout(start_server: Any) -> None:
    session = await replaying(start_server, pause_generation_mode="in_place")
    await session.say("u0")
    await session.say("u1")
    assert (await session.check_v1({**CONFIG, "additional_r3": True})).rollout_routed_experts is None


async def test_a_turn_may_lack_its_rows(start_server: Any) -> None:
    session = await replaying(start_server)
    await session.say("u0")
    session.server.backend.answer = routed
    await session.say("u1")
    await session.check_v1(CONFIG)


def _nodes(session: Session) -> list[Any]:
    return session.server.server.sessions.get(session.id).trajectory.nodes()


def total(request: SeenRequest) -> int:
    return len(request.json()["input_ids"]) + 2


WRONG_ROWS = {
    "not base64": lambda request: "???",
    "not a text": lambda request: 5,
    "stray bits": lambda request: rows(0, total(request))[:-4] + "AAB=",
    "a row too few": lambda request: rows(0, total(request) - 1),
    "a row too many": lambda request: rows(0, total(request) + 1),
    "another topk": lambda request: rows(0, total(request), topk=TOPK + 1),
    "int64": lambda request: rows(0, total(request), topk=2 * TOPK),
    "empty": lambda request: "",
}


@pytest.mark.parametrize("name", WRONG_ROWS)
async def test_rows_that_do_not_fit_are_refused(start_server: Any, name: str) -> None:
    session = await replaying(start_server)
    session.server.backend.answer = routed
    await session.say("u0")
    before = await session.get()

    def answer(request: SeenRequest) -> ScriptedReply:
        return ScriptedReply(chat_reply("a", meta={"routed_experts": WRONG_ROWS[name](request)}))

    session.server.backend.answer = answer
    refused = await session.chat([*session.messages, user("u1")])
    assert refused.status == 502
    assert "routed_experts" in refused.error
    assert await session.get() == before
    session.server.backend.answer = routed
    await session.say("u1")
    await session.check_v1(CONFIG)


async def test_the_configured_topk_binds_the_first_turn(start_server: Any) -> None:
    session = await replaying(start_server, moe_router_topk=TOPK + 1)
    session.server.backend.answer = routed
    assert (await session.chat([user("u")])).status == 502


@pytest.mark.parametrize("lacking", [False, True])
async def test_additional_rows_must_come_where_they_came_before(start_server: Any, lacking: bool) -> None:
    session = await replaying(start_server, pause_generation_mode="in_place")
    answers = [routed, lambda request: ScriptedReply(chat_reply("a"))]
    session.server.backend.answer = answers[not lacking]
    await session.say("u0")
    session.server.backend.answer = answers[lacking]
    answer = await session.chat([*session.messages, user("u1")])
    assert answer.status == 502
    assert "routed_experts" in answer.error
    await session.check_v1({**CONFIG, "additional_r3": True})


def indexed(request: SeenRequest, **meta: Any) -> ScriptedReply:
    text = rows(0, total(request), layers=1)
    return ScriptedReply(chat_reply("a", meta={"indexer_topk": text, "indexer_topk_num_layers": 1, **meta}))


async def test_indexer_rows(start_server: Any) -> None:
    session = await (await start_server(use_rollout_indexer_replay=True)).create()
    session.server.backend.answer = indexed
    await session.say("u0")
    await session.say("u1")
    sample = await session.check_v1({"indexer_topk": True})
    assert sample.rollout_indexer_topk.shape == (len(sample.tokens) - 1, 1, TOPK)
    for layers in (None, 0, "1", True):
        session.server.backend.answer = lambda request, layers=layers: indexed(request, indexer_topk_num_layers=layers)
        answer = await session.chat([*session.messages, user("u2")])
        assert answer.status == 502
        assert "indexer_topk" in answer.error


async def test_the_name_of_a_payload_elsewhere_is_only_a_name(start_server: Any) -> None:
    session = await replaying(start_server)
    text = '"routed_experts": "AAAA", \\"routed_experts\\": \\"BBBB\\"'

    def answer(request: SeenRequest) -> ScriptedReply:
        scripted = routed(request)
        scripted.body["choices"][0]["message"] |= {"content": text, "extra": {"routed_experts": "CCCC"}}
        scripted.body = {"routed_experts": "DDDD", **scripted.body}
        return scripted

    session.server.backend.answer = answer
    said = await session.say("u0")
    assert said.json()["routed_experts"] == "DDDD"
    message = said.json()["choices"][0]["message"]
    assert (message["content"], message["extra"]) == (text, {"routed_experts": "CCCC"})
    assert "routed_experts" not in said.json()["choices"][0]["meta_info"]
    recorded = (await session.get())["records"][0]["response"]
    assert recorded["choices"][0]["message"] == message
    assert json.dumps(recorded["choices"][0]["meta_info"]["routed_experts"]) != '"CCCC"'
    await session.say("u1")
    await session.check_v1(CONFIG)
