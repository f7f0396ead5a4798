"""Headers both ways, and the paths that are proxied (session-http.md, table and A turn)."""

import asyncio
import gzip
import json
from typing import Any

import pytest

from miles_ref.testing.backend import ScriptedReply, chat_reply
from tests.e2e.server.harness import Session, reply, user

SENT = {
    "Authorization": "Bearer a",
    "X-Custom": "kept",
    "X-SMG-Routing-Key": "spoofed",
    "Keep-Alive": "timeout=5",
    "TE": "trailers",
    "Trailer": "x",
    "Upgrade": "h2c",
    "Proxy-Authorization": "secret",
    "Proxy-Connection": "keep-alive",
    "Connection": "x-named, keep-alive",
    "X-Named": "hop",
    "Accept-Encoding": "zstd;q=1, gzip;q=0.5, x-unknown",
    "Expect": "100-continue",
}
GONE = ("keep-alive", "te", "trailer", "upgrade", "proxy-authorization", "proxy-connection", "x-named", "expect")
BACK = {
    "content-type": "application/json",
    "x-request-id": "abc",
    "x-custom-back": "1",
    "server": "backend",
    "date": "Thu, 01 Jan 1970 00:00:00 GMT",
    "connection": "close",
}


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/other"])
async def test_headers(session: Session, path: str) -> None:
    session.server.backend.will(ScriptedReply(chat_reply(), headers=BACK))
    answer = await session.server.call("POST", f"{session.path}/{path}", json={"messages": [user("u")]}, headers=SENT)
    assert answer.status == 200, answer.text
    (seen,) = session.server.backend.seen
    assert seen.headers["authorization"] == "Bearer a"
    assert seen.headers["x-custom"] == "kept"
    assert seen.headers["x-smg-routing-key"] == session.id
    assert seen.headers["accept-encoding"] == "gzip;q=0.5"
    assert seen.headers["host"] == session.server.backend.url.removeprefix("http://")
    assert not set(GONE) & set(seen.headers)
    assert int(seen.headers["content-length"]) == len(seen.raw)
    assert "transfer-encoding" not in seen.headers
    assert answer.headers["x-request-id"] == "abc"
    assert answer.headers["x-custom-back"] == "1"
    for name in ("server", "date", "content-type"):
        assert len(answer.headers.getall(name)) == 1
    assert answer.headers["server"] != "backend"
    assert "1970" not in answer.headers["date"]
    assert answer.headers.get("connection", "").lower() != "close"


async def test_nothing_is_added_to_what_a_client_leaves_out(session: Session) -> None:
    await session.raw_chat(b'{"messages": [{"role": "user", "content": "u"}]}')
    seen = session.server.backend.seen[0].headers
    assert not {"user-agent", "accept", "accept-encoding"} & set(seen)


async def test_a_compressed_reply_is_undone(session: Session) -> None:
    body = json.dumps(chat_reply()).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    for path in ("v1/chat/completions", "v1/other"):
        session.server.backend.will(ScriptedReply(gzip.compress(body), headers=headers))
        answer = await session.server.call("POST", f"{session.path}/{path}", json={"messages": [user("u")]})
        assert answer.body == body
        assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
async def test_any_method_is_proxied_with_query_and_body(session: Session, method: str) -> None:
    session.server.backend.will(ScriptedReply(b"plain \xff", 202, {"content-type": "text/weird"}))
    path = f"{session.path}/v1/models?a=1&a=2&b=%2F"
    answer = await session.server.call(method, path, data=b"\x00body")
    assert (answer.status, answer.body, answer.headers["content-type"]) == (202, b"plain \xff", "text/weird")
    (seen,) = session.server.backend.seen
    assert (seen.method, seen.path, seen.raw) == (method, "/v1/models?a=1&a=2&b=%2F", b"\x00body")
    assert seen.headers["x-smg-routing-key"] == session.id
    assert (await session.get())["records"] == []


async def test_head_is_proxied(session: Session) -> None:
    session.server.backend.will(ScriptedReply(b"", 200, {"x-a": "1"}))
    answer = await session.server.call("HEAD", f"{session.path}/x")
    assert (answer.status, answer.body, answer.headers["x-a"]) == (200, b"", "1")


async def test_a_path_is_proxied_as_it_was_spelled(session: Session) -> None:
    answer = await session.server.call("GET", f"{session.path}/a%2Fb/c%20d/../e?q=%C3%BC+x")
    assert answer.status == 200
    assert session.server.backend.seen[0].path == "/a%2Fb/c%20d/../e?q=%C3%BC+x"


@pytest.mark.parametrize("path", ["v1/chat/completions", "samples"])
async def test_other_methods_of_own_paths_are_proxied(session: Session, path: str) -> None:
    await session.server.call("GET", f"{session.path}/{path}")
    assert session.server.backend.seen[0].path == f"/{path}"


async def test_redirects_and_cookies_are_the_clients_affair(session: Session) -> None:
    headers = {"location": "/elsewhere", "set-cookie": "a=1"}
    session.server.backend.will(ScriptedReply(b"", 307, headers))
    answer = await session.server.call("GET", f"{session.path}/x", allow_redirects=False)
    assert (answer.status, answer.headers["location"], answer.headers["set-cookie"]) == (307, "/elsewhere", "a=1")
    await session.server.call("GET", f"{session.path}/y", headers={"Cookie": "b=2"})
    assert session.server.backend.seen[1].headers["cookie"] == "b=2"
    await session.server.call("GET", f"{session.path}/z")
    assert session.server.backend.seen[2].headers.get("cookie", "") in ("", "a=1")


async def test_unknown_sessions_and_paths(session: Session) -> None:
    call = session.server.call
    for method, path in [
        ("GET", "/sessions/nope"),
        ("DELETE", "/sessions/nope"),
        ("POST", "/sessions/nope/v1/chat/completions"),
        ("POST", "/sessions/nope/samples"),
        ("GET", "/sessions/nope/v1/models"),
        ("GET", "/nothing"),
    ]:
        answer = await call(method, path)
        assert answer.status == 404, path
        assert answer.error
    answer = await call("PUT", session.path)
    assert answer.status == 405
    assert answer.error
    assert session.server.backend.seen == []


async def test_an_unknown_session_is_told_before_the_body_is_read(session: Session) -> None:
    port = session.server.runner.addresses[0][1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /sessions/nope/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    assert b" 404 " in await reader.readline()
    writer.transport.abort()


async def test_health_and_pages(start_server: Any) -> None:
    server = await start_server(session_server_instance_id="me")
    session = await server.create()
    await session.say("u", reply("a"))
    assert (await server.call("GET", "/health")).json() == {"status": "ok", "session_server_instance_id": "me"}
    page = await server.call("GET", "/inspect")
    assert page.headers["content-type"].startswith("text/html")
    assert session.id in page.text
    metrics = (await server.call("GET", "/metrics")).text
    assert 'miles_ref_turns_total{outcome="committed"} 1.0' in metrics
    assert "miles_ref_open_sessions 1.0" in metrics


async def test_health_of_a_server_without_an_id(session: Session) -> None:
    assert (await session.server.call("GET", "/health")).json() == {"status": "ok"}
