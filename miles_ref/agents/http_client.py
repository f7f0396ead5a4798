"""Single requests to a worker, and what their failures prove (agents.md, The caller's side)."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp

from miles_ref.http_once import client_session

_Raw = tuple[int, Any, bytes]
"""Status, headers and body."""

THREAD_PARSE_BYTES = 256 << 10
"""Replies over this size are parsed in a thread, so that other calls of the process go on."""

MAX_RETRY_AFTER = 60.0
"""Seconds after which a worker is asked again, whatever longer time it asked for."""


class Reply(NamedTuple):
    """A reply of a worker: `body` is its JSON object, which holds a boot id."""

    status: int
    body: dict[str, Any]
    retry_after: float | None

    @property
    def boot_id(self) -> str:
        return str(self.body["boot_id"])

    @property
    def code(self) -> str:
        return str(self.body.get("code", ""))


class Unanswered(Exception):
    """No worker answered: a connection error, a time-out, or a reply without a boot id (a proxy's own).

    `sent` is False if the request surely never left: there was no connection.
    """

    def __init__(self, what: str, *, sent: bool) -> None:
        super().__init__(what)
        self.sent = sent


class WorkerClient:
    """A session with any number of workers. An async context manager; closes its connections."""

    def __init__(self, token: str | None, connect_timeout: float) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connect_timeout = connect_timeout
        self._session = client_session(headers=headers, connector=aiohttp.TCPConnector(limit=0))

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def ask(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        silence: float,
        first_byte: float | None = None,
        within: Callable[[Awaitable[_Raw]], Awaitable[_Raw]] | None = None,
    ) -> Reply:
        """Make one request, once. Raises Unanswered.

        `silence` bounds each wait for bytes, in seconds, `first_byte` the whole time until the reply's head is here.
        `within` awaits the exchange and may end it, by an exception of its own; a reply that is here is read all the
        same.
        """
        exchange = self._exchange(method, url, body, silence, first_byte)
        try:
            status, headers, raw = await (exchange if within is None else within(exchange))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            raise Unanswered(f"no connection: {type(exc).__name__}", sent=False) from exc
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise Unanswered(f"no answer: {type(exc).__name__}", sent=True) from exc
        return Reply(status, await _parse(status, raw), _seconds(headers.get("Retry-After")))

    async def _exchange(
        self, method: str, url: str, body: bytes | None, silence: float, first_byte: float | None
    ) -> _Raw:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout, sock_read=silence)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        async with asyncio.timeout(first_byte) as clock:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=limits, allow_redirects=False
            ) as response:
                clock.reschedule(None)
                return response.status, response.headers, await response.read()


async def _parse(status: int, raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw) if len(raw) <= THREAD_PARSE_BYTES else await asyncio.to_thread(json.loads, raw)
    except (ValueError, RecursionError) as exc:
        raise Unanswered(f"a reply {status} that cannot be read as JSON is not a worker's", sent=True) from exc
    if not isinstance(body, dict) or not isinstance(body.get("boot_id"), str):
        raise Unanswered(f"a reply {status} without a boot_id is not a worker's", sent=True)
    return body


def _seconds(text: str | None) -> float | None:
    """What Retry-After asks for, at most MAX_RETRY_AFTER; None for what is no number of seconds."""
    try:
        seconds = float(text) if text is not None else -1.0
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER) if math.isfinite(seconds) and seconds >= 0 else None
