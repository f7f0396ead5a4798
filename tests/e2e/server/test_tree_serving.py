"""v2 over HTTP: branches, concurrent turns, limits (session-http.md, v2: tree)."""

import asyncio
from typing import Any

import pytest

from miles_ref.tokens.tokenizer import load_tokenizer
from tests.e2e.server.harness import Session, reply, user

MATCHERS = "tests.e2e.server.matchers"


async def test_64_concurrent_turns_become_64_siblings(tree: Session) -> None:
    await tree.say("u", reply("root"))
    held = [reply(f"a{at}", response_id=f"r{at}") for at in range(64)]
    for one in held:
        one.hold = True
    tasks = [tree.start("v", one) for one in held]
    for one in held:
        await one.arrived.wait()
    for one in held:
        one.release()
    assert {answer.status for answer in await asyncio.gather(*tasks)} == {200}
    forest = (await tree.get())["metadata"]["tree"]
    assert len(forest["nodes"]) == 65
    assert {node["parent"] for node in forest["nodes"][1:]} == {0}
    assert {node["response_id"] for node in forest["nodes"][1:]} == {f"r{at}" for at in range(64)}
    assert len(forest["leaves"]) == 64


async def test_a_delete_meanwhile_ends_the_session(tree: Session) -> None:
    held = [reply(f"a{at}") for at in range(64)]
    for one in held:
        one.hold = True
    tasks = [tree.start("v", one) for one in held]
    for one in held:
        await one.arrived.wait()
    for one in held[:32]:
        one.release()
    assert {answer.status for answer in await asyncio.gather(*tasks[:32])} == {200}
    assert await tree.delete() == 204
    for one in held[32:]:
        one.release()
    assert {answer.status for answer in await asyncio.gather(*tasks[32:])} == {200}
    assert (await tree.chat([user("v")])).status == 404
    assert len(tree.server.server.sessions) == 0


async def test_the_dump_is_the_last_committed_path(tree: Session) -> None:
    await tree.say("u", reply("root", response_id="r0"))
    root = list(tree.messages)
    await tree.say("v", reply("a", response_id="r1"))
    tree.messages = root
    await tree.say("w", reply("b", response_id="r2"))
    dump = await tree.get()
    assert [record["response"]["id"] for record in dump["records"]] == ["r0", "r2"]
    assert dump["metadata"]["tree"]["leaves"] == [
        {"node_id": 1, "path_node_ids": [0, 1]},
        {"node_id": 2, "path_node_ids": [0, 2]},
    ]
    node = dump["metadata"]["tree"]["nodes"][2]
    start = len(dump["records"][1]["request"]["input_ids"])
    assert node["completion_span"] == [start, start + 3]
    assert node["num_tokens"] == len(dump["metadata"]["accumulated_token_ids"]) == start + 3
    assert node["committed_at"] == dump["records"][1]["timestamp"]
    # "a" was given up by the retry "b"; it has not more tokens than what is below its later sibling.
    (sample,) = await tree.collect(metadata={"task": 1, "rewards": {"r2": 0.5, "r1": 0.25}})
    assert sample.reward == 0.5
    assert sample.metadata["task"] == 1
    assert "rewards" not in sample.metadata
    assert sample.metadata["leaf"] == {"node_id": 2, "parent": 0, "path_node_ids": [0, 2], "response_id": "r2"}


async def test_a_truncated_turn_cannot_be_extended(tree: Session) -> None:
    await tree.say("u", reply("cut", finish_reason="length"))
    answer = await tree.chat([*tree.messages, user("v")])
    assert answer.status == 409
    assert answer.error
    assert len(tree.server.backend.seen) == 1


async def test_the_node_limit_is_told_before_the_backend_is_called(start_server: Any) -> None:
    tree = await (await start_server(version="v2", session_max_nodes=3)).create()
    for turn in range(3):
        await tree.say(f"u{turn}", reply(f"a{turn}"))
    answer = await tree.chat([*tree.messages, user("more")])
    assert answer.status == 400
    assert "verbatim" in answer.error
    assert len(tree.server.backend.seen) == 3
    assert len((await tree.get())["records"]) == 3


async def test_strict_append_only(start_server: Any) -> None:
    tree = await (await start_server(version="v2", session_strict_append_only=True)).create()
    failing = reply("a")
    failing.status = 500
    tree.server.backend.will(failing)
    assert (await tree.chat([user("failed first")])).status == 500
    await tree.say("u0", reply("a0"))
    await tree.say("u1", reply("a1"))
    for messages in ([user("root")], [*tree.messages[:2], user("sibling")]):
        answer = await tree.chat(messages)
        assert answer.status == 400
        assert f"request length {len(messages)}" in answer.error
    held = reply("late")
    held.hold = True
    late = tree.start("x", held)
    await held.arrived.wait()
    await tree.say("u2", reply("a2"))
    held.release()
    assert (await late).status == 200
    assert [record["response"]["choices"][0]["message"]["content"] for record in (await tree.get())["records"]] == [
        "a0",
        "a1",
        "a2",
    ]


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(
    "matcher",
    [
        "miles_ref.testing.doubles.raising_matcher",
        f"{MATCHERS}.exiting",
        f"{MATCHERS}.interrupting",
        f"{MATCHERS}.cancelling",
    ],
)
async def test_a_custom_matcher_that_fails_is_a_500(start_server: Any, version: str, matcher: str) -> None:
    server = await start_server(version=version, session_message_matcher=matcher)
    session = await server.create()
    await session.say("u", reply("a"))
    answer = await session.chat([*session.messages, user("v")])
    assert answer.status == 500
    assert matcher in answer.error
    assert len((await session.get())["records"]) == 1
    assert (await server.call("GET", "/health")).status == 200


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_a_custom_matcher_cannot_write_into_the_session(start_server: Any, version: str) -> None:
    server = await start_server(version=version, session_message_matcher=f"{MATCHERS}.writing")
    session = await server.create()
    await session.say("u0", reply("a0"))
    await session.say("u1", reply("a1"))
    await session.say("u2", reply("a2"))
    assert len((await session.get())["records"]) == 3  # Had it written into the stored messages, they would not match.
    answer = await session.chat([*session.messages[:-2], user("other")])
    assert answer.status == 200
    ids = server.backend.seen[-1].json()["input_ids"]
    assert "other" in load_tokenizer("tiny-chatml").decode(ids)  # The message that did not match is rendered as sent.
