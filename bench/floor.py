"""The floor of a turn: a bare aiohttp proxy that parses and emits the JSON of both directions, and nothing else.

`python -m bench.floor --backend URL` prints one JSON line with `url` and `pid`. With `--rows` it also decodes the
replay rows of a reply, which is the floor where the rows must be understood.
"""

from __future__ import annotations

import argparse
import asyncio

import aiohttp
import orjson
import pybase64
from aiohttp import web

from bench.backend import serve

OBSERVED, GENERATED = 400, 200
"""Tokens of a turn, about as many as a session server would send."""
IDS = list(range(1 << 18))


async def run(backend: str, rows: bool) -> None:
    """Serve `POST /sessions/{id}/v1/chat/completions`, with input_ids that grow as a session's would."""
    async with aiohttp.ClientSession(auto_decompress=False) as client:

        async def chat(request: web.Request) -> web.Response:
            body = orjson.loads(await request.read())
            body["input_ids"] = IDS[: (len(body["messages"]) + 1) // 2 * (OBSERVED + GENERATED) - GENERATED]
            url = f"{backend}/v1/chat/completions"
            async with client.post(url, data=orjson.dumps(body), headers={"content-type": "application/json"}) as got:
                reply = orjson.loads(await got.read())
            meta = reply["choices"][0]["meta_info"]
            if rows and "routed_experts" in meta:
                pybase64.b64decode(meta.pop("routed_experts"))
            return web.Response(body=orjson.dumps(reply), content_type="application/json")

        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/sessions/{id}/v1/chat/completions", chat)
        await serve(app)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--rows", action="store_true")
    args = parser.parse_args()
    asyncio.run(run(args.backend, args.rows))


if __name__ == "__main__":
    main()
