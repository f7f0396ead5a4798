"""`miles-ref serve` as a process: flags, the ready line, SIGTERM (session-http.md, Flags)."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from miles_ref.cli import main
from miles_ref.testing.backend import ScriptedBackend, ScriptedReply
from tests.e2e.server.harness import reply, user

SERVE = [sys.executable, "-m", "miles_ref", "serve"]


class Served:
    """A server process in front of a backend, and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any], http: aiohttp.ClientSession) -> None:
        self.process = process
        self.url: str = ready["url"]
        self.pid: int = ready["pid"]
        self.http = http

    async def create(self) -> str:
        async with self.http.post(f"{self.url}/sessions") as answer:
            return str((await answer.json())["session_id"])

    async def chat(self, session: str, content: str) -> int:
        body = {"messages": [user(content)]}
        async with self.http.post(f"{self.url}/sessions/{session}/v1/chat/completions", json=body) as answer:
            await answer.read()
            return answer.status


@pytest.fixture
async def served(backend: ScriptedBackend) -> AsyncIterator[Served]:
    argv = [*SERVE, "--backend-url", backend.url, "--tito-model", "qwen3", "--use-session-server", "--port", "0"]
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    try:
        ready = json.loads(await process.stdout.readline())
        async with aiohttp.ClientSession() as http:
            yield Served(process, ready, http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_the_ready_line_is_all_that_is_printed(served: Served) -> None:
    assert served.pid == served.process.pid
    async with served.http.get(f"{served.url}/health") as answer:
        assert await answer.json() == {"status": "ok"}
    served.process.send_signal(signal.SIGTERM)
    output, _ = await served.process.communicate()
    assert served.process.returncode == 0
    assert output == b""


async def test_sigterm_lets_a_turn_in_flight_finish(served: Served, backend: ScriptedBackend) -> None:
    session = await served.create()
    held = reply("late")
    held.hold = True
    backend.will(held)
    task = asyncio.create_task(served.chat(session, "u"))
    await held.arrived.wait()
    served.process.send_signal(signal.SIGTERM)
    await _refused(served.url)
    held.release()
    assert await task == 200
    assert await served.process.wait() == 0


async def _refused(url: str) -> None:
    """Until nobody is let in any more."""
    port = int(url.rpartition(":")[2])
    for _ in range(100_000):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return
        writer.close()
        await asyncio.sleep(0)
    raise AssertionError("the server still accepts connections")


async def test_the_official_client_works_unmodified(served: Served, backend: ScriptedBackend) -> None:
    import openai

    session = await served.create()
    async with openai.AsyncOpenAI(base_url=f"{served.url}/sessions/{session}/v1", api_key="k", max_retries=0) as client:
        messages: list[Any] = [user("u0")]
        backend.will(reply("a0"), reply("a1"), ScriptedReply({"data": []}))
        completion = await client.chat.completions.create(model="m", messages=messages)
        assert completion.choices[0].message.content == "a0"
        messages += [completion.choices[0].message.model_dump(exclude_none=True), user("u1")]
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["a1"]
        assert (await client.models.list()).data == []
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[user("elsewhere"), user("x")], n=2)
    async with served.http.get(f"{served.url}/sessions/{session}") as answer:
        assert len((await answer.json())["records"]) == 2


REFUSED = {
    "unknown version": (["--use-session-server", "v3"], "v3"),
    "picker under v1": (["--session-sample-picker-path", "longest"], "--use-session-server v2"),
    "merger under v1": (["--session-merge-function-path", "x"], "--use-session-server v2"),
    "append-only under v1": (["--session-strict-append-only"], "--use-session-server v2"),
    "missing picker": (["--use-session-server", "v2", "--session-sample-picker-path", "no.such.function"], "no.such"),
    "async picker": (
        ["--use-session-server", "v2", "--session-sample-picker-path", "miles_ref.driver.generate.generate"],
        "use def, not async def",
    ),
    "unknown family": (["--tito-model", "nobody"], "qwen3"),
    "family of another tokenizer": (["--tito-model", "glm47"], "<|user|>"),
    "unknown tokenizer": (["--hf-checkpoint", "/no/such/folder"], "tiny-chatml"),
    "unknown matcher": (["--session-message-matcher", "fuzzy"], "loose_tool_call"),
    "missing matcher": (["--session-message-matcher", "no.such.matcher"], "no.such.matcher"),
    "unknown role": (["--tito-model", "qwen3", "--tito-allowed-append-roles", "tool,critic"], "critic"),
    "rows without layers": (["--use-rollout-routing-replay"], "--num-layers"),
    "kwargs that are no object": (["--apply-chat-template-kwargs", "[1]"], "object"),
    "kwargs against the family": (
        ["--tito-model", "qwen3", "--apply-chat-template-kwargs", '{"clear_thinking": true}'],
        "clear_thinking",
    ),
    "negative ttl": (["--session-ttl", "-1"], "--session-ttl"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_are_refused(name: str) -> None:
    flags, mentioned = REFUSED[name]
    result = CliRunner().invoke(main, ["serve", "--backend-url", "http://127.0.0.1:9", *flags])
    assert result.exit_code in (1, 2)
    assert mentioned in result.output
    assert isinstance(result.exception, SystemExit)


async def test_the_port_is_taken(backend: ScriptedBackend) -> None:
    argv = [*SERVE, "--backend-url", backend.url, "--port", str(backend.port)]
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in errors.decode()
