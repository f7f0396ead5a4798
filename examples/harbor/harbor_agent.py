"""A small command-line agent: the model writes shell commands, a sandbox directory runs them, a verifier judges.

`run` is an agent function: it works inline, in a child process, and on a worker. It needs aiohttp and what
`report_to_caller` needs, no training framework. Anything that it must tell the caller even if it is cancelled goes into
`finally`: the sandbox is always reported as finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from verifier import verify

from miles_ref.agents import InfraAbort, report_to_caller

COMMAND = re.compile(r"```sh\n(.*?)```", re.DOTALL)
COMMAND_SECONDS = 60.0
MODEL_SECONDS = 600.0
OUTPUT_BYTES = 8000

SYSTEM = (
    "You work in a shell. Write one command in a ```sh block; its output is the next message. When the task is done, "
    "answer without a block."
)

Message = dict[str, Any]


async def run(
    *, base_url: str, prompt: str, request_kwargs: Mapping[str, Any], metadata: Mapping[str, Any], **_: Any
) -> dict[str, Any]:
    """Work on the task `prompt` until the model is done, then verify `metadata["check"]` and return the reward."""
    turns_left = int(os.environ.get("HARBOR_MAX_TURNS", "20"))
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    tool_seconds = 0.0
    async with sandbox() as folder, Model(base_url, request_kwargs) as model:
        while turns_left:
            turns_left -= 1
            reply = await model.reply(messages)
            messages.append(reply)
            command = COMMAND.search(reply["content"] or "")
            if command is None:
                break
            started = time.monotonic()
            output = await shell(command[1], folder)
            tool_seconds += time.monotonic() - started
            report_to_caller({"command": command[1].strip()})
            messages.append({"role": "user", "content": output})
        reward = await verify(metadata["check"], folder)
    return {"reward": reward, "turns": model.turns, "agent_metrics": {"total_tool_time": tool_seconds}}


@contextlib.asynccontextmanager
async def sandbox() -> AsyncIterator[Path]:
    """A directory of its own. Here a real one; with a provider, a remote sandbox would be made and ended."""
    with tempfile.TemporaryDirectory(prefix="harbor-") as folder:
        report_to_caller({"sandbox": "started"})
        try:
            yield Path(folder)
        finally:
            report_to_caller({"sandbox": "finished"})


async def shell(command: str, folder: Path) -> str:
    """Run a command in the sandbox; what it printed, and its exit status. Nothing that it started outlives it."""
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        command,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    output = b""
    try:
        async with asyncio.timeout(COMMAND_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        output = b"(the command took too long)\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return f"{output[-OUTPUT_BYTES:].decode(errors='replace')}(exit status {process.returncode})"


class Model:
    """The chat completions of one session. An async context manager."""

    def __init__(self, base_url: str, request_kwargs: Mapping[str, Any]) -> None:
        self.turns = 0
        self._url = f"{base_url}/v1/chat/completions"
        self._request_kwargs = dict(request_kwargs)

    async def __aenter__(self) -> Model:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=MODEL_SECONDS))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.close()

    async def reply(self, messages: list[Message]) -> Message:
        """The next assistant message, to be sent back as it came. Raises InfraAbort if there is no model."""
        body = {"model": "policy", "messages": messages} | self._request_kwargs
        try:
            async with self._http.post(self._url, json=body) as response:
                response.raise_for_status()
                completion = await response.json()
        except aiohttp.ClientConnectionError as exc:
            raise InfraAbort("ModelUnreachable") from exc
        self.turns += 1
        message: Message = completion["choices"][0]["message"]
        return message
