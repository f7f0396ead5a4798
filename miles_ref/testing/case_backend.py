"""The backend that a case's steps script: it answers what a step says, and keeps what it received (cases.md, http).

It runs on a thread's event loop, so that the runner can stay plain blocking code, and so that one implementation serves
a server in this process, one that we start, and one that was started against our address (`--backend-listen`).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from miles_ref.testing.loop_thread import LoopThread

EXHAUSTED = {"error": "the case scripts no further backend reply for this step"}
"""Body of the 599 that an unexpected call gets."""

SPECIAL_LOG_PROBS = {"-inf": float("-inf"), "inf": float("inf"), "nan": float("nan")}


@dataclass
class Exchange:
    """The backend's part in one step: replies to give, in order, and the requests that came."""

    replies: list[Mapping[str, Any]]
    held: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


class CaseBackend:
    """An HTTP server whose replies come from the exchanges that are open, the oldest unanswered one first."""

    def __init__(self, thread: LoopThread, host: str = "127.0.0.1", port: int = 0) -> None:
        self._thread = thread
        self._open: list[Exchange] = []
        self._lock = threading.Lock()
        self._runner: web.AppRunner
        self.url = thread.run(self._start(host, port))

    async def _start(self, host: str, port: int) -> str:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound = self._runner.addresses[0]
        return f"http://{host}:{bound[1]}"

    def close(self) -> None:
        self._thread.run(self._runner.cleanup())

    def begin(self, replies: Sequence[Mapping[str, Any]], *, held: bool = False) -> Exchange:
        """Open an exchange; the next requests get its replies. `held`: not before `release`."""
        exchange = Exchange(list(replies), held)
        with self._lock:
            self._open.append(exchange)
        return exchange

    def release(self, exchange: Exchange) -> None:
        """Let a held reply go."""
        self._thread.loop.call_soon_threadsafe(exchange.released.set)

    def end(self, exchange: Exchange) -> None:
        """Close an exchange: its unused replies are forgotten, what it holds is released."""
        with self._lock:
            if exchange in self._open:
                self._open.remove(exchange)
        self.release(exchange)

    def _take(self, request: dict[str, Any]) -> tuple[Mapping[str, Any], Exchange | None]:
        with self._lock:
            waiting = next((exchange for exchange in self._open if exchange.replies), None)
            exchange = waiting or (self._open[-1] if self._open else None)
            if exchange is not None:
                exchange.requests.append(request)
            if waiting is None:
                return {"status": 599, "body": EXHAUSTED}, exchange
            # A failing connection fails for the whole step, however often it is tried.
            failing = "fail" in waiting.replies[0]
            return (waiting.replies[0] if failing else waiting.replies.pop(0)), waiting

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        seen = {
            "method": request.method,
            "path": request.raw_path,
            "headers": {name.lower(): value for name, value in request.headers.items()},
            "body": _parse(raw),
        }
        reply, exchange = self._take(seen)
        if exchange is not None:
            exchange.arrived.set()
            if exchange.held:
                await exchange.released.wait()
        if reply.get("fail"):
            return await _fail(request, str(reply["fail"]))
        headers = reply.get("headers") or {"content-type": "application/json"}
        return web.Response(status=reply.get("status", 200), body=reply_bytes(reply.get("body")), headers=headers)


async def _fail(request: web.Request, how: str) -> web.StreamResponse:
    """Break the connection: "connect" before a byte of the reply, "cut" in the middle of its body."""
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
    if how == "cut":
        await response.prepare(request)
        await response.write(b'{"id": "cut')
    if request.transport is not None:
        request.transport.abort()
    return response


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return raw.decode("utf-8", "replace")


def reply_bytes(body: Any) -> bytes:
    """A reply's body: a string as it is, anything else as JSON, with log probs "-inf", "inf", "nan" as Python does."""
    if isinstance(body, str):
        return body.encode("utf-8", "surrogatepass")
    return json.dumps(_with_special_log_probs(body)).encode()


def _with_special_log_probs(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: [_special(entry) for entry in item]
            if key == "output_token_logprobs" and isinstance(item, list)
            else _with_special_log_probs(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_with_special_log_probs(item) for item in value]
    return value


def _special(entry: Any) -> Any:
    if isinstance(entry, list) and entry and isinstance(entry[0], str):
        return [SPECIAL_LOG_PROBS.get(entry[0], entry[0]), *entry[1:]]
    return entry
