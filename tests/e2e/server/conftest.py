"""Servers and backends of the tests, each on a free port of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from miles_ref.testing.backend import ScriptedBackend
from tests.e2e.server.harness import Clock, Server, Session

Start = Callable[..., Awaitable[Server]]


@pytest.fixture
async def backend() -> AsyncIterator[ScriptedBackend]:
    async with ScriptedBackend() as running:
        yield running


@pytest.fixture
async def start_server(backend: ScriptedBackend) -> AsyncIterator[Start]:
    servers: list[Server] = []

    async def start(**settings: object) -> Server:
        server = Server(backend, Clock(), **settings)
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def server(start_server: Start) -> Server:
    return await start_server()


@pytest.fixture
async def session(server: Server) -> Session:
    return await server.create()


@pytest.fixture
async def tree(start_server: Start) -> Session:
    return await (await start_server(version="v2")).create()
