"""A backend that answers at once: fixed output tokens, and replay rows that repeat at the same positions.

`python -m bench.backend --out-tokens 200 [--layers 8 --topk 32]` prints one JSON line with `url` and `pid`. What it
costs is not measured: it is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os

import numpy as np
import orjson
import pybase64
from aiohttp import web

END_OF_MESSAGE = 2
"""<|im_end|> of the shipped tokenizer tiny-chatml."""


def make_app(out_tokens: int, layers: int, topk: int) -> web.Application:
    """The chat endpoint. Row i of a reply's replay rows depends on i alone, as with a prefix that is kept."""
    ids = [*range(300, 300 + out_tokens - 1), END_OF_MESSAGE]
    entries = [[-0.5 - (k % 16) / 16, token, None] for k, token in enumerate(ids)]
    text = "word " * out_tokens
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 128, size=(1 << 17, max(layers * topk, 1)), dtype=np.int32) if layers else None

    async def chat(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        prompt = len(body["input_ids"])
        meta: dict[str, object] = {
            "output_token_logprobs": entries,
            "completion_tokens": out_tokens,
            "prompt_tokens": prompt,
            "cached_tokens": 0,
            "weight_version": "1",
            "e2e_latency": 0.5,
        }
        if rows is not None:
            start = body.get("routed_experts_start_len") or 0
            meta["routed_experts"] = pybase64.b64encode(rows[start : prompt + out_tokens - 1].tobytes()).decode()
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "meta_info": meta}
        reply = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.Response(body=orjson.dumps(reply), content_type="application/json")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", chat)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-tokens", type=int, default=200)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--topk", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(serve(make_app(args.out_tokens, args.layers, args.topk)))


async def serve(app: web.Application) -> None:
    """Serve on a free loopback port until the process is ended."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    print(json.dumps({"url": f"http://{host}:{port}", "pid": os.getpid()}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
