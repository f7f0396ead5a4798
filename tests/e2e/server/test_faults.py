"""What goes wrong around a turn, and that nothing is lost by it (session-http.md; no answer here is a 500)."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from miles_ref.testing.backend import ScriptedReply
from miles_ref.tokens.families import BoundFamily
from tests.e2e.server.harness import Session, reply, user


async def test_a_backend_that_is_gone_before_a_turn(session: Session) -> None:
    await session.say("u0", reply("a0"))
    backend = session.server.backend
    port = backend.port
    await backend.stop()
    answer = await session.chat([*session.messages, user("u1")])
    assert answer.status == 502
    assert backend.url in answer.error
    assert (await session.server.call("GET", f"{session.path}/v1/models")).status == 502
    await backend.start(port)
    await session.say("u1", reply("a1"))
    await session.check_v1()


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_backend_that_breaks_off(session: Session, when: str) -> None:
    await session.say("u0", reply("a0"))
    broken = reply("a1")
    broken.fail = when
    session.server.backend.will(broken)
    answer = await session.chat([*session.messages, user("u1")])
    assert answer.status == 502
    assert answer.error
    # Nothing is sent twice: the backend may have been at work.
    assert len(session.server.backend.seen) == 2
    await session.say("u1", reply("a1"))
    await session.check_v1()


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "POST", "PATCH"])
@pytest.mark.parametrize("used", [False, True], ids=["new connection", "kept connection"])
async def test_nothing_that_is_proxied_is_sent_twice(session: Session, method: str, used: bool) -> None:
    if used:
        await session.say("u0", reply("a0"))
    session.server.backend.seen.clear()
    session.server.backend.will(ScriptedReply(fail="before"), ScriptedReply(b"{}"))
    answer = await session.server.call(method, f"{session.path}/v1/thing")
    assert answer.status == 502
    assert [request.method for request in session.server.backend.seen] == [method]


async def test_a_kept_connection_that_the_backend_closed_is_not_used(session: Session) -> None:
    await session.say("u0", reply("a0"))
    backend = session.server.backend
    assert backend.close_connections() == 1
    await session.server.call("GET", "/health")  # by then the server's end has seen it, too
    await session.say("u1", reply("a1"))
    assert len(backend.seen) == 2
    assert (await session.server.call("GET", f"{session.path}/v1/models")).status == 200


async def test_an_error_beyond_exceptions_is_a_500_and_ends_no_server(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as SystemExit of a third party's family, and the panics of tokenizers."""
    await session.say("u0", reply("a0"))

    def leaves(*args: Any) -> Any:
        raise SystemExit("this family wants to leave")

    with monkeypatch.context() as patched:
        patched.setattr(BoundFamily, "join", leaves)
        answer = await session.chat([*session.messages, user("u1")])
    assert answer.status == 500
    assert "this family wants to leave" in answer.error
    await session.say("u1", reply("a1"))
    await session.check_v1()


async def test_a_proxied_reply_that_breaks_off_is_cut_off(session: Session) -> None:
    broken = ScriptedReply(b"x" * 100)
    broken.fail = "during"
    session.server.backend.will(broken)
    with pytest.raises(aiohttp.ClientError):
        await session.server.call("GET", f"{session.path}/v1/models")
    assert (await session.server.call("GET", f"{session.path}/v1/models")).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b'{"messages": [',
        b"[]",
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": []}',
        b'{"messages": [{"role": "user"}], "n": 2}',
        b'{"messages": [{"role": "user"}], "tools": "x"}',
        b'{"messages": [{"role": "user"}], "tools": ["x"]}',
        b'{"messages": [{"role": "user"}], "chat_template_kwargs": "x"}',
        b'{"messages": [{"role": "user"}], "chat_template_kwargs": {"clear_thinking": true}}',
        b"[" * 1_000_000,
    ],
    ids=lambda body: body[:60].decode("latin-1") or "empty",
)
async def test_a_body_that_is_no_request(session: Session, body: bytes) -> None:
    await session.say("u0", reply("a0"))
    answer = await session.raw_chat(body)
    assert answer.status == 400
    assert answer.error
    assert len(session.server.backend.seen) == 1
    await session.say("u1", reply("a1"))
    await session.check_v1()


@pytest.mark.parametrize("pause", [0, 20])
async def test_a_body_that_does_not_arrive_whole(session: Session, pause: int) -> None:
    await session.say("u0", reply("a0"))
    _, writer = await asyncio.open_connection("127.0.0.1", session.server.runner.addresses[0][1])
    head = f"POST {session.path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    writer.write(head.encode() + b'{"messages": [')
    await writer.drain()
    for _ in range(pause):
        await asyncio.sleep(0)
    writer.transport.abort()
    await session.say("u1", reply("a1"))
    await session.check_v1()


async def test_a_body_of_300_mib(session: Session) -> None:
    filler = b'"' + b"x" * (300 << 20) + b'"'
    messages = json.dumps([user("u0")]).encode()
    answer = await session.raw_chat(b'{"messages": %s, "filler": %s}' % (messages, filler))
    assert answer.status == 200
    assert len(session.server.backend.seen[0].raw) > 300 << 20
    session.server.backend.seen.clear()
    session.messages = [user("u0"), answer.json()["choices"][0]["message"]]
    await session.say("u1", reply("a1"))
    assert len(await session.collect()) == 1


async def test_a_body_over_the_limit(start_server: Any) -> None:
    server = await start_server(max_body_bytes=1000)
    session = await server.create()
    for path in ("v1/chat/completions", "samples", "v1/other"):
        answer = await server.call("POST", f"{session.path}/{path}", data=b"x" * 1001)
        assert answer.status == 413
        assert answer.error
    await session.say("u", reply("a"))


async def test_whatever_a_template_raises_is_a_400(session: Session) -> None:
    answer = await session.chat([{"role": "assistant", "content": "x", "tool_calls": 5}])
    assert answer.status == 400, answer.text
    assert session.server.backend.seen == []


async def test_a_report_that_cannot_be_computed_fails_nothing(session: Session) -> None:
    await session.say("u0", reply("a0", message={"tool_calls": [5]}))
    dump = await session.get()
    assert "tito_session_mismatch" not in dump["metadata"]
    assert len(await session.collect()) == 1
