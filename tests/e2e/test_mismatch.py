"""Many embedded episodes of an agent that replays verbatim: no session's tokens differ from its canonical render.

What a report says of a difference is pinned by cases (tests/golden/tokens); that nothing differs where nothing should,
over many conversations on a real engine, is what data cannot say (tokens.md, Mismatch report).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from miles_ref.engine.task import Task, make_task
from miles_ref.process import ReadyProcess
from miles_ref.server.app import SessionServer
from miles_ref.server.settings import ServerSettings

pytestmark = pytest.mark.xdist_group("mismatch")  # they share two engines
EPISODES = 50
TOKENIZERS = {"qwen3": "tiny-chatml", "qwen35": "tiny-chatml", "nemotron3": "tiny-chatml", "glm47": "tiny-glm"}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, str]]:
    """An engine for each tokenizer: its URL."""
    with ExitStack() as running:
        yield {
            name: running.enter_context(
                ReadyProcess(
                    [sys.executable, "-m", "miles_ref", "engine", "--port", "0", "--tokenizer", name, "--seed", "3"],
                    timeout=100,
                )
            ).url
            for name in sorted(set(TOKENIZERS.values()))
        }


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("family", sorted(TOKENIZERS))
async def test_a_verbatim_agent_has_no_mismatch(engines: dict[str, str], family: str, version: str) -> None:
    tokenizer = TOKENIZERS[family]
    settings = ServerSettings(
        backend_url=engines[tokenizer], hf_checkpoint=tokenizer, tito_model=family, version=version
    )
    runner = SessionServer(settings).runner()
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    turns = 0
    try:
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            for seed in range(EPISODES // 2):
                messages, dump = await episode(client, make_task(seed, steps=1 + seed % 3))
                replies = sum(message["role"] == "assistant" for message in messages)
                assert len(dump["records"]) == replies
                assert dump["metadata"]["tito_session_mismatch"] == [], f"task {seed}"
                turns += replies
    finally:
        await runner.cleanup()
    assert turns > EPISODES


async def episode(client: aiohttp.ClientSession, task: Task) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Work through a task, every message sent back as it came; the messages, and the session's dump."""
    session = f"/sessions/{(await call(client, 'POST', '/sessions', {}))['session_id']}"
    messages = list(task.messages)
    for _ in range(20):
        body = {"model": "m", "messages": messages, "tools": task.tools}
        message = (await call(client, "POST", f"{session}/v1/chat/completions", body))["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for tool_call in message["tool_calls"]:
            result = task.run_tool(tool_call["function"]["name"], tool_call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": tool_call["id"], "content": result})
    assert task.answer in messages[-1]["content"]
    return messages, await call(client, "GET", session)


async def call(client: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
    async with client.request(method, path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()
