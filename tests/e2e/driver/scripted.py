"""A session server whose answers are scripted, for the driver's failure semantics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from miles_ref.driver.settings import DriverSettings
from miles_ref.sample import Sample, Status
from miles_ref.wire import SAMPLES_VALUE_SPEC, SAMPLES_VALUE_SPEC_V2, encode_samples

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def payload(
    *samples: Sample,
    version: str = "v1",
    session_metadata: dict[str, Any] | None = None,
    empty_reason: str | None = None,
) -> bytes:
    fields = SAMPLES_VALUE_SPEC_V2 if version == "v2" else SAMPLES_VALUE_SPEC
    return encode_samples(list(samples), session_metadata or {}, empty_reason, fields=fields)


def assembled(**more: Any) -> Sample:
    """A sample as the server would send it."""
    return Sample(
        **{
            "tokens": [1, 2, 3],
            "response": "ab",
            "response_length": 2,
            "loss_mask": [1, 1],
            "rollout_log_probs": [-0.5, -0.25],
            "status": Status.COMPLETED,
        }
        | more
    )


def answer(body: bytes = b"", status: int = 200, **headers: str) -> Answer:
    async def reply(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers=headers)

    return reply


async def reset(request: web.Request) -> web.StreamResponse:
    """Cut the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def half(request: web.Request) -> web.StreamResponse:
    """Promise more bytes than are sent, then cut the connection."""
    response = web.StreamResponse(headers={"content-length": "1000"})
    await response.prepare(request)
    await response.write(b"x" * 10)
    assert request.transport is not None
    request.transport.close()
    return response


@dataclass
class ScriptedSessionServer:
    """Answers create, samples and DELETE as told, and keeps what it was asked, in order."""

    samples: Answer = field(default_factory=lambda: answer(payload(assembled())))
    create: Answer = field(default_factory=lambda: answer(b'{"session_id": "abc"}'))
    delete: Answer = field(default_factory=lambda: answer(status=204))
    calls: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    async def never(self, request: web.Request) -> web.StreamResponse:
        """No answer as long as the test runs."""
        self.asked.set()
        await self.gone.wait()
        return web.Response(status=503)

    async def drip(self, request: web.Request) -> web.StreamResponse:
        """Headers and a first byte at once, the rest never."""
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        await self.never(request)
        return response

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(f"{request.method} {request.path}")
        self.bodies.append(await request.read())
        if request.method == "DELETE":
            return await self.delete(request)
        return await (self.create if request.path == "/sessions" else self.samples)(request)

    def settings(self, **more: Any) -> DriverSettings:
        return DriverSettings(**{"session_servers": (f"127.0.0.1:{self.port}",)} | more)
