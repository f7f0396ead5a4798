"""A gate that agents of another process wait at until the test opens it, and that says who waits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self


class Gate:
    """A server on loopback: agents connect to `port` and get one byte when it is open. An async context manager."""

    def __init__(self) -> None:
        self.port = 0
        self._open = asyncio.Event()
        self._arrivals = asyncio.Condition()
        self._count = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._wait, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._open.set()
        self._server.close()
        await self._server.wait_closed()

    def open(self) -> None:
        """Let everybody pass, now and later."""
        self._open.set()

    async def reached(self, count: int = 1) -> None:
        """Wait until `count` agents have come."""
        async with self._arrivals:
            await self._arrivals.wait_for(lambda: self._count >= count)

    async def _wait(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._arrivals:
            self._count += 1
            self._arrivals.notify_all()
        opened = asyncio.ensure_future(self._open.wait())
        left = asyncio.ensure_future(reader.read())
        await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        left.cancel()
        with contextlib.suppress(ConnectionError):
            writer.write(b"!")
            await writer.drain()
        writer.close()
