"""session-http.md, Driver: OpenAIEndpointTracer against scripted servers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from miles_ref.driver import CollectTimeoutError, OpenAIEndpointTracer, SessionServerError
from miles_ref.errors import DecodeError
from miles_ref.sample import Sample, Status
from tests.e2e.driver.scripted import ScriptedSessionServer, answer, assembled, half, payload, reset

COLLECTED = ["POST /sessions", "POST /sessions/abc/samples", "DELETE /sessions/abc"]


async def test_create_opens_a_session_and_knows_its_addresses(server: ScriptedSessionServer) -> None:
    tracer = await OpenAIEndpointTracer.create(server.settings())
    assert tracer.session_id == "abc"
    assert tracer.session_server_id == f"127.0.0.1:{server.port}"
    assert tracer.base_url == f"http://127.0.0.1:{server.port}/sessions/abc"
    assert server.calls == ["POST /sessions"]


async def test_create_takes_plain_arguments(server: ScriptedSessionServer) -> None:
    class Arguments:
        session_server_ip = "127.0.0.1"
        session_server_port = server.port

    assert (await OpenAIEndpointTracer.create(Arguments())).session_id == "abc"


async def test_every_call_goes_to_the_instance_that_was_picked(
    start_server: Callable[[], Awaitable[ScriptedSessionServer]],
) -> None:
    servers = [await start_server(), await start_server()]
    settings = servers[0].settings(session_servers=tuple(f"127.0.0.1:{server.port}" for server in servers))
    tracers = [await OpenAIEndpointTracer.create(settings) for _ in range(2)]
    for tracer in tracers:
        await tracer.collect_samples(Sample(), max_seq_len=None)
    assert [server.calls for server in servers] == [COLLECTED, COLLECTED]


@pytest.mark.parametrize("status", [302, 404, 429, 500])
async def test_create_refused(server: ScriptedSessionServer, status: int) -> None:
    server.create = answer(b"too many", status)
    with pytest.raises(SessionServerError, match="too many") as caught:
        await OpenAIEndpointTracer.create(server.settings())
    assert caught.value.status_code == status
    assert server.calls == ["POST /sessions"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"session_id": null}', b'{"session_id": ""}'])
async def test_create_without_a_session_id(server: ScriptedSessionServer, body: bytes) -> None:
    server.create = answer(body)
    with pytest.raises(SessionServerError, match="session_id"):
        await OpenAIEndpointTracer.create(server.settings())


async def test_create_times_out(server: ScriptedSessionServer) -> None:
    server.create = server.never
    with pytest.raises(TimeoutError):
        await OpenAIEndpointTracer.create(server.settings(create_timeout=0.1))


@pytest.mark.parametrize(
    ("version", "body"),
    [("v1", {"max_seq_len": 9}), ("v2", {"max_seq_len": 9, "metadata": {"rewards": {"r": 1.5}}})],
)
async def test_collect_is_one_post_and_one_delete(
    server: ScriptedSessionServer, version: str, body: dict[str, Any]
) -> None:
    server.samples = answer(payload(assembled(), version=version, session_metadata={"k": 1}))
    tracer = await OpenAIEndpointTracer.create(server.settings(version=version))
    reply = await tracer.collect_samples(
        Sample(index=3, label="x"), max_seq_len=9, agent_metadata={"rewards": {"r": 1.5}}
    )
    assert server.calls == COLLECTED
    assert json.loads(server.bodies[1]) == body
    assert [(s.index, s.label, s.tokens, s.status) for s in reply.samples] == [(3, "x", [1, 2, 3], Status.COMPLETED)]
    assert (reply.session_metadata, reply.empty_reason) == ({"k": 1}, None)


@pytest.mark.parametrize("status", [302, 307, 400, 404, 410, 422, 500, 502, 503])
async def test_a_status_that_is_not_2xx_raises(server: ScriptedSessionServer, status: int) -> None:
    server.samples = answer(b"turn 3: no", status, location="/sessions/abc/other")
    tracer = await OpenAIEndpointTracer.create(server.settings())
    with pytest.raises(SessionServerError, match="turn 3: no") as caught:
        await tracer.collect_samples(Sample(), max_seq_len=None)
    assert (caught.value.status_code, caught.value.text) == (status, "turn 3: no")
    assert server.calls == COLLECTED


@pytest.mark.parametrize("failure", [reset, half])
async def test_a_transport_failure_raises(server: ScriptedSessionServer, failure: Any) -> None:
    server.samples = failure
    tracer = await OpenAIEndpointTracer.create(server.settings())
    with pytest.raises(aiohttp.ClientError):
        await tracer.collect_samples(Sample(), max_seq_len=None)
    assert server.calls == COLLECTED


async def test_a_server_that_is_gone_raises(
    start_server: Callable[[], Awaitable[ScriptedSessionServer]], unused_tcp_port: int
) -> None:
    server = await start_server()
    tracer = await OpenAIEndpointTracer.create(server.settings())
    tracer.session_server_id = f"127.0.0.1:{unused_tcp_port}"
    with pytest.raises(aiohttp.ClientConnectorError):
        await tracer.collect_samples(Sample(), max_seq_len=None)


@pytest.mark.parametrize("slow", ["never", "drip"])
async def test_the_timeout_is_for_the_whole_reply(server: ScriptedSessionServer, slow: str) -> None:
    server.samples = getattr(server, slow)
    tracer = await OpenAIEndpointTracer.create(server.settings(collect_timeout=0.2))
    with pytest.raises(CollectTimeoutError, match=r"0\.2 s; session_collect_timeout"):
        await tracer.collect_samples(Sample(), max_seq_len=None)
    assert server.calls == COLLECTED


@pytest.mark.parametrize("body", [b"", b"garbage", payload(assembled())[:-1]])
async def test_a_malformed_payload_raises(server: ScriptedSessionServer, body: bytes) -> None:
    server.samples = answer(body)
    tracer = await OpenAIEndpointTracer.create(server.settings())
    with pytest.raises(DecodeError):
        await tracer.collect_samples(Sample(), max_seq_len=None)
    assert server.calls == COLLECTED


def failing_deletes(server: ScriptedSessionServer) -> dict[str, Any]:
    return {"500": answer(b"boom", 500), "404": answer(b"", 404), "reset": reset, "never": server.never}


@pytest.mark.parametrize("failure", ["500", "404", "reset", "never"])
async def test_a_failing_delete_is_logged_and_hides_no_result(
    server: ScriptedSessionServer, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.delete = failing_deletes(server)[failure]
    tracer = await OpenAIEndpointTracer.create(server.settings(delete_timeout=0.2))
    with caplog.at_level(logging.WARNING, logger="miles_ref.driver"):
        reply = await tracer.collect_samples(Sample(), max_seq_len=None)
    assert len(reply.samples) == 1
    assert server.calls == COLLECTED
    [message] = caplog.messages
    assert tracer.base_url in message
    assert "DELETE" in message


@pytest.mark.parametrize("failure", ["500", "404", "reset", "never"])
async def test_a_failing_delete_hides_no_error(server: ScriptedSessionServer, failure: str) -> None:
    server.samples = answer(b"the reason", 422)
    server.delete = failing_deletes(server)[failure]
    tracer = await OpenAIEndpointTracer.create(server.settings(delete_timeout=0.2))
    with pytest.raises(SessionServerError, match="the reason"):
        await tracer.collect_samples(Sample(), max_seq_len=None)
    assert server.calls == COLLECTED


async def test_the_deletes_timeout_is_its_own(server: ScriptedSessionServer) -> None:
    server.samples, server.delete = server.never, server.never
    tracer = await OpenAIEndpointTracer.create(server.settings(collect_timeout=0.1, delete_timeout=0.1))
    with pytest.raises(CollectTimeoutError):
        await tracer.collect_samples(Sample(), max_seq_len=None)
    assert server.calls == COLLECTED


def seen_by(server: ScriptedSessionServer) -> asyncio.Event:
    """Set when the server has got a DELETE."""
    deleted = asyncio.Event()

    async def delete(request: web.Request) -> web.StreamResponse:
        deleted.set()
        return web.Response(status=204)

    server.delete = delete
    return deleted


@pytest.mark.parametrize("patience", [0.1, 30.0])
async def test_a_session_that_opens_for_nobody_is_ended(server: ScriptedSessionServer, patience: float) -> None:
    """Its caller was cancelled, or gave up."""
    opens = asyncio.Event()

    async def slowly(request: web.Request) -> web.StreamResponse:
        server.asked.set()
        await opens.wait()
        return web.json_response({"session_id": "abc"})

    server.create, deleted = slowly, seen_by(server)
    task = asyncio.create_task(OpenAIEndpointTracer.create(server.settings(create_timeout=patience)))
    await server.asked.wait()
    if patience > 1:
        task.cancel()
    with pytest.raises(asyncio.CancelledError if patience > 1 else TimeoutError):
        await task
    opens.set()
    await deleted.wait()
    assert server.calls == ["POST /sessions", "DELETE /sessions/abc"]


async def test_a_delete_goes_on_without_its_caller(server: ScriptedSessionServer) -> None:
    deleted = seen_by(server)
    tracer = await OpenAIEndpointTracer.create(server.settings())
    task = asyncio.create_task(tracer.delete())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await deleted.wait()


async def test_a_dump_is_not_asked_for_elsewhere(server: ScriptedSessionServer) -> None:
    server.samples = answer(status=307, location="/elsewhere")
    tracer = await OpenAIEndpointTracer.create(server.settings())
    with pytest.raises(SessionServerError) as error:
        await tracer.dump()
    assert error.value.status_code == 307
    assert server.calls == ["POST /sessions", "GET /sessions/abc"]


async def test_a_cancelled_collect_deletes_too(server: ScriptedSessionServer) -> None:
    server.samples = server.never
    tracer = await OpenAIEndpointTracer.create(server.settings())
    task = asyncio.create_task(tracer.collect_samples(Sample(), max_seq_len=None))
    await server.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.calls == COLLECTED


async def test_metadata_that_is_no_json_deletes_too(server: ScriptedSessionServer) -> None:
    tracer = await OpenAIEndpointTracer.create(server.settings(version="v2"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        await tracer.collect_samples(Sample(), max_seq_len=None, agent_metadata={"reward": float("nan")})
    assert server.calls == ["POST /sessions", "DELETE /sessions/abc"]


async def test_a_payload_of_many_mebibytes_arrives(server: ScriptedSessionServer) -> None:
    count = 1 << 20
    big = assembled(
        tokens=list(range(count + 1)),
        response_length=count,
        loss_mask=[1] * count,
        rollout_log_probs=[-0.5] * count,
    )
    server.samples = answer(payload(big))
    tracer = await OpenAIEndpointTracer.create(server.settings())
    reply = await tracer.collect_samples(Sample(), max_seq_len=None)
    assert reply.samples[0].tokens[-1] == count


async def test_records_are_read_from_the_dump(server: ScriptedSessionServer) -> None:
    record = {"timestamp": 2.0, "method": "POST", "path": "/v1/chat/completions", "status_code": 200}
    whole = record | {"request": {"messages": []}, "response": {"id": "r"}, "request_timestamp": 1.5, "new": 1}
    body = json.dumps({"session_id": "abc", "records": [whole], "metadata": {}}).encode()

    async def dump(request: web.Request) -> web.StreamResponse:
        assert request.method == "GET"
        return web.Response(body=body)

    server.samples = dump
    tracer = await OpenAIEndpointTracer.create(server.settings())
    [read] = await tracer.records()
    assert (read.timestamp, read.request_timestamp, read.status_code) == (2.0, 1.5, 200)
    assert (read.request, read.response) == ({"messages": []}, {"id": "r"})
