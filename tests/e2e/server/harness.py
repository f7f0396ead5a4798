"""A session server in the test's own event loop, in front of a scripted backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from miles_ref.sample import Sample
from miles_ref.server.app import SessionServer
from miles_ref.server.settings import ServerSettings
from miles_ref.testing.backend import ScriptedBackend, ScriptedReply, chat_reply
from miles_ref.wire import SAMPLES_VALUE_SPEC, SAMPLES_VALUE_SPEC_V2, decode_samples_and_merge_input_sample
from tests.golden.oracle.assemble import assemble

Json = dict[str, Any]

END = 2  # <|im_end|> of tiny-chatml


def user(content: str) -> Json:
    return {"role": "user", "content": content}


def reply(content: str, **more: Any) -> ScriptedReply:
    """A turn that says `content`; `more` as in `chat_reply`."""
    return ScriptedReply(chat_reply(content, **more))


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Server:
    """A running server, and a client of it."""

    def __init__(self, backend: ScriptedBackend, clock: Clock, **settings: Any) -> None:
        settings = {
            "backend_url": backend.url,
            "hf_checkpoint": "tiny-chatml",
            "tito_model": "qwen3",
            "shutdown_grace": 5,
            **settings,
        }
        self.backend = backend
        self.clock = clock
        self.version = settings.get("version", "v1")
        self.settings = ServerSettings(**settings)
        self.server = SessionServer(self.settings, clock=clock, monotonic=clock)
        self.runner: web.AppRunner = self.server.runner()
        self.url = ""
        self.http = aiohttp.ClientSession(skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"))

    async def start(self) -> None:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self.http.close()
        await self.runner.cleanup()

    async def call(self, method: str, path: str, **more: Any) -> Answer:
        async with self.http.request(method, URL(self.url + path, encoded=True), **more) as response:
            return Answer(response.status, response.headers, await response.read())

    async def create(self) -> Session:
        answer = await self.call("POST", "/sessions")
        assert answer.status == 200, answer.text
        return Session(self, answer.json()["session_id"])


class Answer:
    """What the server answered."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert self.headers["content-type"].startswith("application/json")
        text = self.json()["error"]
        assert isinstance(text, str)
        return text


class Session:
    """A session as an agent uses it: `say` appends a user message and keeps the reply."""

    def __init__(self, server: Server, session_id: str) -> None:
        self.server = server
        self.id = session_id
        self.path = f"/sessions/{session_id}"
        self.messages: list[Json] = []

    async def chat(self, messages: list[Json] | None = None, **members: Any) -> Answer:
        body = {"model": "m", "messages": self.messages if messages is None else messages, **members}
        return await self.server.call("POST", f"{self.path}/v1/chat/completions", json=body)

    async def raw_chat(self, body: Any, **more: Any) -> Answer:
        return await self.server.call("POST", f"{self.path}/v1/chat/completions", data=body, **more)

    async def say(self, content: str, scripted: ScriptedReply | None = None, **members: Any) -> Answer:
        if scripted is not None:
            self.server.backend.will(scripted)
        self.messages.append(user(content))
        answer = await self.chat(**members)
        assert answer.status == 200, answer.text
        self.messages.append(answer.json()["choices"][0]["message"])
        return answer

    def start(self, content: str, scripted: ScriptedReply, **members: Any) -> asyncio.Task[Answer]:
        """A turn that goes on while the test does other things; the session's own messages stay as they are."""
        self.server.backend.will(scripted)
        return asyncio.create_task(self.chat([*self.messages, user(content)], **members))

    async def get(self) -> Json:
        answer = await self.server.call("GET", self.path)
        assert answer.status == 200, answer.text
        return dict(answer.json())

    async def delete(self) -> int:
        return (await self.server.call("DELETE", self.path)).status

    async def samples(self, **body: Any) -> Answer:
        return await self.server.call("POST", f"{self.path}/samples", json=body)

    async def collect(self, **body: Any) -> list[Sample]:
        answer = await self.samples(**body)
        assert answer.status == 200, answer.text
        fields = SAMPLES_VALUE_SPEC_V2 if self.server.version == "v2" else SAMPLES_VALUE_SPEC
        return list(decode_samples_and_merge_input_sample(answer.body, Sample(), fields=fields).samples)

    async def check_v1(self, config: Mapping[str, Any] | None = None) -> Sample:
        """Collect, and compare with what the oracle makes of the dumped records; the sample."""
        dump = await self.get()
        case = {
            "version": "v1",
            "config": config or {},
            "input": {
                "records": dump["records"],
                "accumulated_token_ids": dump["metadata"]["accumulated_token_ids"],
                "max_seq_len": None,
            },
        }
        expected = assemble(case)["samples"]
        samples = await self.collect()
        assert len(samples) == len(expected) == 1
        (sample,), (wanted,) = samples, expected
        assert sample.tokens == wanted["tokens"]
        assert sample.loss_mask == wanted["loss_mask"]
        assert [word(value) for value in sample.rollout_log_probs] == wanted["rollout_log_probs"]
        assert sample.response_length == wanted["response_length"]
        assert sample.status == wanted["status"]
        assert sample.weight_versions == wanted["weight_versions"]
        assert sample.metadata == wanted["metadata"]
        for name in ("rollout_routed_experts", "rollout_indexer_topk"):
            have, want = getattr(sample, name), wanted[name]
            assert (have is None) == (want is None), name
            if want is not None:
                assert list(have.shape) == want["shape"]
                assert have.ravel().tolist() == want["data"]
        return sample


def word(value: float) -> Any:
    return "-inf" if value == float("-inf") else value
