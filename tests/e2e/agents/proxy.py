"""A proxy between caller and worker that holds, loses, doubles or truncates single requests, or answers itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self, TypeVar

import aiohttp
from aiohttp import web


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it arrived at the proxy."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def matches(self, method: str, part: str) -> bool:
        return self.method == method and part in self.path


@dataclass(frozen=True, slots=True)
class Answer:
    """The worker's reply."""

    status: int
    headers: dict[str, str]
    body: bytes


class Cut(Exception):
    """Close the client's connection without an answer."""


T = TypeVar("T")

Forward = Callable[[], Awaitable[Answer]]
Act = Callable[[Forward], Awaitable[Answer]]


@dataclass(slots=True)
class _Rule:
    method: str
    part: str
    act: Act
    times: float


@dataclass(slots=True)
class Proxy:
    """Forwards to `upstream`. An async context manager; `url` is where callers find it."""

    upstream: str
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    answered: list[tuple[Seen, Answer]] = field(default_factory=list)
    _rules: list[_Rule] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None
    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            auto_decompress=False, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._runner is not None
        assert self._session is not None
        await self._runner.cleanup()
        await self._session.close()

    def on(self, method: str, part: str, act: Act, times: float = float("inf")) -> None:
        """Treat the next `times` requests of `method` whose path holds `part` by `act`; later rules go first."""
        self._rules.insert(0, _Rule(method, part, act, times))

    def clear(self) -> None:
        """Forward everything again."""
        self._rules.clear()

    async def saw(self, method: str, part: str, count: int = 1) -> Seen:
        """Wait until `count` such requests have arrived; the last of them."""
        return await self._until(lambda: [s for s in self.seen if s.matches(method, part)], count)

    async def saw_answer(self, method: str, part: str, count: int = 1) -> tuple[Seen, Answer]:
        """Wait until the worker has answered `count` such requests; the last of them."""
        return await self._until(lambda: [pair for pair in self.answered if pair[0].matches(method, part)], count)

    async def _until(self, found: Callable[[], list[T]], count: int) -> T:
        while len(items := found()) < count:
            self._changed.clear()
            await self._changed.wait()
        return items[count - 1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = Seen(request.method, request.path_qs, dict(request.headers), body)
        self.seen.append(seen)
        self._changed.set()

        async def forward() -> Answer:
            return await self._forward(seen)

        try:
            answer = await self._act(seen)(forward)
        except (Cut, aiohttp.ClientError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        promised = answer.headers.get("X-Promised-Length")
        response.content_length = int(promised) if promised else len(answer.body)
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            await response.write(answer.body)
            if promised and request.transport is not None:
                request.transport.close()
        return response

    def _act(self, seen: Seen) -> Act:
        for rule in self._rules:
            if rule.times > 0 and seen.matches(rule.method, rule.part):
                rule.times -= 1
                return rule.act
        return passing

    async def _forward(self, seen: Seen) -> Answer:
        assert self._session is not None
        kept = {name: seen.headers[name] for name in ("Authorization", "Content-Type") if name in seen.headers}
        async with self._session.request(
            seen.method, self.upstream + seen.path, data=seen.body or None, headers=kept
        ) as reply:
            headers = {n: reply.headers[n] for n in ("Content-Type", "Retry-After") if n in reply.headers}
            answer = Answer(reply.status, headers, await reply.read())
        self.answered.append((seen, answer))
        self._changed.set()
        return answer


async def passing(forward: Forward) -> Answer:
    """Nothing special."""
    return await forward()


async def lose_request(forward: Forward) -> Answer:
    """It never arrives, and the connection breaks."""
    raise Cut


async def lose_reply(forward: Forward) -> Answer:
    """It arrives, but the connection breaks before the answer is here."""
    await forward()
    raise Cut


async def swallow_request(forward: Forward) -> Answer:
    """It never arrives, and nobody says so."""
    return await asyncio.Event().wait()  # type: ignore[return-value]


async def swallow_reply(forward: Forward) -> Answer:
    """It arrives, but the answer does not come back, and nobody says so: a network that is cut one way."""
    await forward()
    return await asyncio.Event().wait()  # type: ignore[return-value]


async def double(forward: Forward) -> Answer:
    """It arrives twice; the second answer comes back."""
    await forward()
    return await forward()


def hold(gate: asyncio.Event) -> Act:
    """It arrives once the gate is open, even if the client has gone."""

    async def act(forward: Forward) -> Answer:
        await gate.wait()
        return await forward()

    return act


def hold_reply(gate: asyncio.Event) -> Act:
    """It arrives, and the answer comes back once the gate is open."""

    async def act(forward: Forward) -> Answer:
        answer = await forward()
        await gate.wait()
        return answer

    return act


def truncate(length: int) -> Act:
    """The connection ends after `length` bytes of the answer's body."""

    async def act(forward: Forward) -> Answer:
        answer = await forward()
        headers = answer.headers | {"X-Promised-Length": str(len(answer.body))}
        return Answer(answer.status, headers, answer.body[:length])

    return act


def answer_itself(status: int, body: bytes = b"<html>proxy</html>") -> Act:
    """The proxy answers for the worker, as with its own 404, 502 or 503; nothing arrives."""

    async def act(forward: Forward) -> Answer:
        return Answer(status, {"Content-Type": "text/html"}, body)

    return act
