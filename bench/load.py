"""`python -m bench.load URL SESSIONS TURNS [--collect SESSION]`: sessions at once from a process of its own.

Prints one JSON line: latency of every chat in milliseconds, in order of completion. While it runs, `--collect N` also
collects a session of N turns again and again, whose latencies are printed apart; and a thread asks the first server for
its health again and again, which takes as long as the server's event loop is busy with others at that moment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from bench.episode import OBSERVATION


class Load:
    """Concurrent linear episodes against one or several servers, each session on the server that opened it."""

    def __init__(self, client: aiohttp.ClientSession, urls: list[str]) -> None:
        self.client, self.urls = client, urls
        self.chats: list[float] = []
        self.collects: list[float] = []

    async def post(self, url: str, body: Any) -> bytes:
        async with self.client.post(
            url, data=orjson.dumps(body), headers={"content-type": "application/json"}
        ) as reply:
            data = await reply.read()
            if reply.status >= 300:
                raise RuntimeError(f"{url}: {reply.status} {data[:200]!r}")
            return data

    async def episode(self, number: int, turns: int, note: bool = True) -> str:
        """One session of `turns` turns; its URL."""
        url = self.urls[number % len(self.urls)]
        session = f"{url}/sessions/{orjson.loads(await self.post(f'{url}/sessions', {}))['session_id']}"
        messages: list[dict[str, Any]] = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{number} {turn} {OBSERVATION * 26}"})
            begin = time.perf_counter()
            reply = orjson.loads(
                await self.post(f"{session}/v1/chat/completions", {"model": "m", "messages": messages})
            )
            if note:
                self.chats.append((time.perf_counter() - begin) * 1e3)
            messages.append(reply["choices"][0]["message"])
        return session

    async def collect(self, session: str) -> None:
        """Collect one session until cancelled."""
        while True:
            begin = time.perf_counter()
            await self.post(f"{session}/samples", {})
            self.collects.append((time.perf_counter() - begin) * 1e3)


class HealthWatch(threading.Thread):
    """How long a request that needs no work waits, milliseconds: at least as long as the event loop pauses.

    It is a thread of the process that makes the load, so that the load's own work is in it too: an upper bound.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._address = urlsplit(url).netloc
        self._ended = threading.Event()
        self.waits: list[float] = []

    def run(self) -> None:
        connection = HTTPConnection(self._address, timeout=60)
        while not self._ended.wait(0.001):
            begin = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.waits.append((time.perf_counter() - begin) * 1e3)
        connection.close()

    def stop(self) -> list[float]:
        """End it; all waits."""
        self._ended.set()
        self.join()
        return self.waits


async def run(urls: list[str], sessions: int, turns: int, collected: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        load = Load(client, urls)
        collecting = None
        if collected:
            collecting = asyncio.create_task(load.collect(await load.episode(0, collected, note=False)))
        watch = HealthWatch(urls[0])
        watch.start()
        await asyncio.gather(*(load.episode(number, turns) for number in range(sessions)))
        waits = watch.stop()
        if collecting:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
        print(json.dumps({"chats_ms": load.chats, "collects_ms": load.collects, "health_ms": waits}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls")
    parser.add_argument("sessions", type=int)
    parser.add_argument("turns", type=int)
    parser.add_argument("--collect", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(run(args.urls.split(","), args.sessions, args.turns, args.collect))


if __name__ == "__main__":
    main()
