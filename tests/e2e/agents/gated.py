"""Agents that wait at a gate of the test in each moment of a call; they report how they begin and clean up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

from miles_ref.agents import report_to_caller


def pass_gate() -> None:
    """Wait, blocking, until the gate at AGENT_GATE_PORT is open."""
    with socket.create_connection(("127.0.0.1", int(os.environ["AGENT_GATE_PORT"]))) as connection:
        connection.recv(1)


async def pass_gate_async() -> None:
    """Wait until the gate is open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["AGENT_GATE_PORT"]))
    try:
        await reader.read(1)
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def cleaning() -> AsyncIterator[None]:
    """Report that it begins; when cancelled, report two steps of cleanup, with awaits in between."""
    report_to_caller("started")
    try:
        yield
    except asyncio.CancelledError:
        for step in ("cleanup 1", "cleanup 2"):
            await asyncio.sleep(0)
            report_to_caller(step)
        raise


async def waits() -> str:
    """Wait on the event loop."""
    async with cleaning():
        await pass_gate_async()
    return "done"


async def blocks() -> str:
    """Block in a thread that the coroutine awaits."""
    async with cleaning():
        await asyncio.get_running_loop().run_in_executor(None, pass_gate)
    return "done"


async def reports() -> str:
    """Report without end until the gate is open."""
    async with cleaning():
        passing = asyncio.ensure_future(pass_gate_async())
        index = 0
        while not passing.done():
            report_to_caller(index)
            index += 1
            await asyncio.sleep(0.002)
    return "done"


async def cleans_slowly() -> str:
    """Wait for ever; when cancelled, wait at the gate before the cleanup is reported."""
    report_to_caller("started")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await pass_gate_async()
        report_to_caller("cleanup 1")
        report_to_caller("cleanup 2")
        raise
    return "done"


async def answers() -> str:
    """Give back what comes through the gate until it is closed."""
    async with cleaning():
        reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["AGENT_GATE_PORT"]))
        try:
            while question := await reader.read(1):
                writer.write(question)
        finally:
            writer.close()
    return "done"


async def returns() -> str:
    """Return at once."""
    report_to_caller("started")
    return "done"
