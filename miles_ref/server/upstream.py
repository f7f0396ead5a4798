"""The client of the backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict
from yarl import URL

from miles_ref.errors import UpstreamResponseError
from miles_ref.http_once import client_session

CHAT_PATH = "/v1/chat/completions"

_KEEPALIVE = 4.0
"""Seconds that an idle connection is kept: less than servers keep theirs (uvicorn: 5), so that a request does not run
into a connection that the backend is just closing."""

_CONNECT_TIMEOUT = 10.0
_READ_BUFFER = 1 << 20


class BodyPayload(aiohttp.Payload):
    """A request body that is sent as it is, of any size."""

    _value: bytes

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await writer.write(self._value)


class Upstream:
    """Calls the backend at `base_url`. Generations may take as long as they need; nothing is ever repeated.

    To be opened and closed on the event loop that uses it.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = client_session(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            read_bufsize=_READ_BUFFER,
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def call(
        self, method: str, url: URL, headers: CIMultiDict[str], body: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The backend's reply, its body not yet read. Raises UpstreamResponseError (502) if it cannot be had."""
        assert self._session is not None
        data = None if body is None else BodyPayload(body)
        try:
            async with self._session.request(
                method, url, headers=headers, data=data, allow_redirects=False
            ) as response:
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise UpstreamResponseError(f"the backend at {self.base_url} cannot be used: {reason}") from error

    async def chat(self, headers: CIMultiDict[str], body: bytes) -> tuple[int, CIMultiDict[str], bytes]:
        """Status, headers and whole body of a chat completion. Raises UpstreamResponseError (502)."""
        headers.setdefault("Content-Type", "application/json")
        async with self.call("POST", self.url(CHAT_PATH), headers, body) as response:
            return response.status, CIMultiDict(response.headers), await response.read()

    def url(self, path_and_query: str) -> URL:
        """The address of another path of the backend, spelled as the client spelled it."""
        return URL(self.base_url + path_and_query, encoded=True)
