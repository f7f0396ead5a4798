"""Life of a session: idle ones, budgets, samples again and again (session-http.md)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.e2e.server.harness import Server, Session, reply, user


async def in_use(server: Server) -> None:
    """Until a request is under way in the server's only session."""
    (session,) = server.server.sessions
    async with asyncio.timeout(30):
        while not session.users:  # noqa: ASYNC110 - the server knows no event for it
            await asyncio.sleep(0)


async def body_in_two(go_on: asyncio.Event) -> AsyncIterator[bytes]:
    yield b'{"messages": [{"role": "user", '
    await go_on.wait()
    yield b'"content": "u"}]}'


async def test_an_idle_session_is_dropped_and_answered_with_410(start_server: Any) -> None:
    server = await start_server(session_ttl=100)
    idle, used = await server.create(), await server.create()
    await idle.say("u", reply("a"))
    server.clock.now += 60
    await used.say("u", reply("a"))
    server.clock.now += 60
    await used.get()
    for method, path in [("GET", ""), ("POST", "/samples"), ("POST", "/v1/chat/completions"), ("DELETE", "")]:
        answer = await server.call(method, idle.path + path)
        assert answer.status == 410
        assert "100" in answer.error
    assert 'miles_ref_sessions_total{event="expired"} 1.0' in (await server.call("GET", "/metrics")).text


async def test_a_session_with_a_turn_in_flight_is_not_idle(start_server: Any) -> None:
    server = await start_server(session_ttl=100)
    session = await server.create()
    held = reply("a")
    held.hold = True
    task = session.start("u", held)
    await held.arrived.wait()
    server.clock.now += 1000
    assert server.server.sessions.sweep() == 0
    held.release()
    assert (await task).status == 200
    assert len((await session.get())["records"]) == 1


async def test_a_session_with_a_proxied_call_under_way_is_not_idle(start_server: Any) -> None:
    server = await start_server(session_ttl=100)
    session = await server.create()
    held = reply("tokenized")
    held.hold = True
    server.backend.will(held)
    task = asyncio.create_task(server.call("POST", f"{session.path}/tokenize", data=b"{}"))
    await held.arrived.wait()
    server.clock.now += 1000
    assert server.server.sessions.sweep() == 0
    held.release()
    assert (await task).status == 200
    server.clock.now += 60
    assert (await session.get())["records"] == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/samples"])
async def test_a_session_whose_body_is_on_its_way_is_not_idle(start_server: Any, path: str) -> None:
    server = await start_server(session_ttl=100)
    session = await server.create()
    go_on = asyncio.Event()
    server.backend.will(reply("a"))
    task = asyncio.create_task(server.call("POST", session.path + path, data=body_in_two(go_on)))
    await in_use(server)
    server.clock.now += 1000
    assert server.server.sessions.sweep() == 0
    go_on.set()
    assert (await task).status == 200
    await session.get()


async def test_a_session_deleted_while_its_body_is_on_its_way_is_not_found(start_server: Any) -> None:
    # Also where its budget is used up: the session is not there any more, so neither is its budget.
    server = await start_server(max_session_bytes=10)
    session = await server.create()
    await session.say("u" * 100, reply("a"))
    go_on = asyncio.Event()
    path = f"{session.path}/v1/chat/completions"
    task = asyncio.create_task(server.call("POST", path, data=body_in_two(go_on)))
    await in_use(server)
    assert await session.delete() == 204
    go_on.set()
    assert (await task).status == 404


async def test_sessions_have_a_budget(start_server: Any) -> None:
    server = await start_server(max_sessions=2)
    first, _ = await server.create(), await server.create()
    answer = await server.call("POST", "/sessions")
    assert answer.status == 429
    assert "2" in answer.error
    assert await first.delete() == 204
    await server.create()


async def test_stored_bytes_have_a_budget(start_server: Any) -> None:
    server = await start_server(max_session_bytes=10_000)
    session = await server.create()
    await session.say("u" * 10_000, reply("a"))
    answer = await session.chat([*session.messages, user("more")])
    assert answer.status == 413
    assert "10000" in answer.error
    assert len(server.backend.seen) == 1
    await session.check_v1()


async def test_the_same_session_can_be_collected_again(session: Session) -> None:
    for turn in range(3):
        await session.say(f"u{turn}", reply(f"a{turn}"))
    first = await session.samples(max_seq_len=None)
    (whole,) = await session.collect()
    (cut,) = await session.collect(max_seq_len=len(whole.tokens) - 1)
    assert len(cut.tokens) == len(whole.tokens) - 1
    assert cut.status == "truncated"
    assert await session.collect(max_seq_len=1) == []
    assert (await session.samples(max_seq_len=None)).body == first.body


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"max_seq_len": null}', b'{"max_seq_len": 5, "metadata": 7}', b' {"x":1}']
)
async def test_bodies_of_samples(session: Session, body: bytes) -> None:
    answer = await session.server.call("POST", f"{session.path}/samples", data=body)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"[]",
        b"null",
        b'{"max_seq_len": 0}',
        b'{"max_seq_len": -1}',
        b'{"max_seq_len": true}',
        b'{"max_seq_len": 5.0}',
        b'{"max_seq_len": "5"}',
        b'{"max_seq_len": NaN}',
        b'{"max_seq_len": 5',
        b"\xff",
    ],
)
async def test_bodies_that_are_no_samples_request(session: Session, body: bytes) -> None:
    answer = await session.server.call("POST", f"{session.path}/samples", data=body)
    assert answer.status == 400
    assert answer.error


@pytest.mark.parametrize(
    ("metadata", "status"), [(None, 200), ({}, 200), ({"a": 1}, 200), ([], 400), ("x", 400), (1, 400)]
)
async def test_metadata_is_read_under_v2(tree: Session, session: Session, metadata: Any, status: int) -> None:
    assert (await tree.samples(metadata=metadata)).status == status
    assert (await session.samples(metadata=metadata)).status == 200


async def test_no_records_is_an_empty_reply(session: Session, tree: Session) -> None:
    assert (await session.get())["metadata"] == {"accumulated_token_ids": [], "max_trim_tokens": 0}
    assert (await tree.get())["metadata"]["tree"] == {"nodes": [], "leaves": []}
    for empty in (session, tree):
        assert b'"empty_reason":"no_records"' in (await empty.samples()).body


async def test_a_failed_assembly_is_a_422_in_plain_text(start_server: Any) -> None:
    server = await start_server(version="v2", session_sample_picker_path="miles_ref.testing.doubles.raising_picker")
    session = await server.create()
    await session.say("u", reply("a"))
    answer = await session.samples()
    assert answer.status == 422
    assert answer.headers["content-type"].startswith("text/plain")
    assert "raising_picker" in answer.text
