"""Scripted session servers on free ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from tests.e2e.driver.scripted import ScriptedSessionServer


@pytest.fixture
async def start_server() -> AsyncIterator[Callable[[], Awaitable[ScriptedSessionServer]]]:
    runners: list[tuple[ScriptedSessionServer, web.AppRunner]] = []

    async def start() -> ScriptedSessionServer:
        server = ScriptedSessionServer()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append((server, runner))
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        return server

    yield start
    for server, runner in runners:
        server.gone.set()
        await runner.cleanup()


@pytest.fixture
async def server(start_server: Callable[[], Awaitable[ScriptedSessionServer]]) -> ScriptedSessionServer:
    return await start_server()
