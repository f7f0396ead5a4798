"""A backend in the test's own process and event loop, which says what the test tells it to.

Replies are taken from a queue; a reply may be held until the test lets it go, or be no reply at all.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web


@dataclass
class ScriptedReply:
    """What the backend does with one request: answers `status`, `headers` and `body` (JSON unless it is bytes).

    `hold`: not before `release`. `fail` breaks the connection: "before" any byte of the reply, or "during" its body.
    `arrived` is set when the request is there.
    """

    body: Any = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    hold: bool = False
    fail: str | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Let the reply go."""
        self.released.set()

    def content(self) -> bytes:
        """The body's bytes; minus infinity and the like are written as Python writes them."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass(frozen=True)
class SeenRequest:
    """A request that the backend got; header names in lower case, `path` with the query as it was spelled."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes

    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.raw)


Answer = Callable[[SeenRequest], ScriptedReply]


class ScriptedBackend:
    """An async context manager. `seen` are the requests so far, in order of their arrival.

    Without a queued reply, `answer` is asked; without that, a chat gets the ids 300, 301, ... 2 and an "ok".
    """

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer: Answer = answer or (lambda request: ScriptedReply(chat_reply()))
        self.seen: list[SeenRequest] = []
        self.url = ""
        self._queue: deque[ScriptedReply] = deque()
        self._runner: web.AppRunner | None = None

    def will(self, *replies: ScriptedReply) -> None:
        """Queue replies, one a request."""
        self._queue.extend(replies)

    async def start(self, port: int = 0) -> None:
        """Listen, on the same port again if asked to."""
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._runner is not None
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening and break what is open."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def close_connections(self) -> int:
        """Close the connections that clients keep, and listen on; returns how many there were."""
        assert self._runner is not None
        assert self._runner.server is not None
        kept = self._runner.server.connections
        for connection in kept:
            if connection.transport is not None:
                connection.transport.close()
        return len(kept)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = SeenRequest(request.method, request.raw_path, headers, await request.read())
        self.seen.append(seen)
        reply = self._queue.popleft() if self._queue else self.answer(seen)
        reply.arrived.set()
        if reply.hold:
            await reply.released.wait()
        if reply.fail is not None:
            return await _break(request, reply)
        return web.Response(status=reply.status, body=reply.content(), headers=reply.headers)


async def _break(request: web.Request, reply: ScriptedReply) -> web.StreamResponse:
    response = web.StreamResponse(headers={**reply.headers, "content-length": "1000000"})
    if reply.fail == "during":
        await response.prepare(request)
        await response.write(reply.content()[:20] or b"{")
    if request.transport is not None:
        request.transport.abort()
    return response


def chat_reply(
    content: str = "ok",
    ids: Sequence[int] = (300, 301, 2),
    *,
    response_id: str = "chatcmpl-1",
    finish_reason: str = "stop",
    message: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A chat completion as a backend sends it; the k-th id, from 0, has log prob -k/128.

    `message` and `meta` add members to choices[0].message and its meta_info.
    """
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **(message or {})},
                "finish_reason": finish_reason,
                "meta_info": {
                    "output_token_logprobs": [[-at / 128, token, None] for at, token in enumerate(ids)],
                    "completion_tokens": len(ids),
                    "weight_version": "1",
                    **(meta or {}),
                },
            }
        ],
        "usage": {"total_tokens": len(ids)},
    }
