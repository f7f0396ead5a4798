"""Calls that the cells of the abort matrix must not touch. They go on from cell to cell: each costs a process."""

from __future__ import annotations

import asyncio

from miles_ref.agents import AgentSettings, InfraAbort, call_agent_function
from tests.e2e.agents.matrix import AbortScope, Cell

ANSWERS = "tests.e2e.agents.gated:answers"
SCOPE = "10.0.0.1:300000"
"""The scopes of the cells begin like it: scopes are matched whole."""

Key = tuple[str, str | None]
"""A call's mode and scope."""


class Witness:
    """One call, whose agent answers questions until it is told to return."""

    def __init__(self, key: Key, url: str) -> None:
        self._key = key
        self._url = url
        self._call: asyncio.Task[str] | None = None
        self._line: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def start(self) -> None:
        """Make the call; returns when its agent is there."""
        server = await asyncio.start_server(lambda *streams: self._line.put_nowait(streams), "127.0.0.1", 0)
        try:
            self._call = asyncio.create_task(self._made(server.sockets[0].getsockname()[1]))
            arrival = asyncio.create_task(self._line.get())
            await asyncio.wait({self._call, arrival}, return_when=asyncio.FIRST_COMPLETED)
            assert arrival.done(), f"the witness {self._key} did not begin: {await self._call}"
            self._reader, self._writer = arrival.result()
        finally:
            server.close()

    async def _made(self, port: int) -> str:
        mode, scope = self._key
        try:
            value = await call_agent_function(
                ANSWERS,
                mode=mode,
                scope=scope,
                env={"AGENT_GATE_PORT": str(port)},
                settings=AgentSettings(worker_urls=(self._url,)),
            )
        except InfraAbort as exc:
            return exc.reason
        return "ok" if value == "done" else "another value"

    async def says(self) -> str:
        """ "ok" if nobody has touched the call, or what it ended with.

        Asked twice: an agent that was cancelled may still answer a question that came with the cancel, and no other.
        """
        assert self._call is not None
        for question in (b"1", b"2"):
            if not await self._answers(question):
                return f"touched: {await self._call}"
        return f"ended: {await self._call}" if self._call.done() else "ok"

    async def _answers(self, question: bytes) -> bool:
        try:
            self._writer.write(question)
            await self._writer.drain()
            return await self._reader.read(1) == question
        except ConnectionError:
            return False

    async def end(self) -> str:
        """Let the agent return. What the caller got: "ok", or what it ended with."""
        assert self._call is not None
        self._writer.close()
        return await self._call


class Witnesses:
    """The witnesses of the cells that run one after the other in one event loop, on the worker `url`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._living: dict[Key, Witness] = {}

    async def gather_for(self, cell: Cell) -> None:
        """See that those of the cell live, and, before an abort of every scope, no call on a worker but the cell's."""
        keys = keys_of(cell)
        if cell.abort is AbortScope.EVERY:
            await self._end([key for key in self._living if key not in keys])
        for key in keys:
            if key not in self._living:
                witness = Witness(key, self._url)
                await witness.start()
                self._living[key] = witness

    async def say(self, cell: Cell) -> list[str]:
        """What those of the cell say after it: "ok" each, if it has not touched them."""
        said = []
        for key in keys_of(cell):
            said.append(await self._living[key].says())
            if said[-1] != "ok":
                del self._living[key]
        return said

    async def end(self) -> None:
        """End all. Raises AssertionError if one was touched."""
        await self._end(list(self._living))

    async def _end(self, keys: list[Key]) -> None:
        said = {key: await self._living.pop(key).end() for key in keys}
        assert set(said.values()) <= {"ok"}, said


def keys_of(cell: Cell) -> list[Key]:
    """Calls of other scopes, or, where every scope is meant, one that is not on a worker."""
    if cell.abort is AbortScope.EVERY:
        return [("subproc", None)]
    return [("worker", SCOPE), ("worker", None)]
