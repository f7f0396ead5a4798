"""A model that knows the answers of tasks.json, so that the example runs without one. A server on loopback."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from aiohttp import web


class ScriptedModel:
    """Answers chat completions: the task's solution, command by command, then that it is done."""

    def __init__(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        self._solutions = {task["prompt"]: task["solution"] for task in tasks}
        self.base_url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        messages = json.loads(await request.read())["messages"]
        solution = self._solutions[messages[1]["content"]]
        step = sum(message["role"] == "assistant" for message in messages)
        content = f"```sh\n{solution[step]}\n```" if step < len(solution) else "Done."
        message = {"role": "assistant", "content": content}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
