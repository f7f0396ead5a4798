"""The engine as an HTTP server: requests in, generations by the worker, replies out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

import msgspec
from aiohttp import web

from miles_ref.engine import policy, protocol
from miles_ref.engine.generation import Job, Output, Work, Worker
from miles_ref.engine.model import LanguageModel
from miles_ref.engine.prefix_cache import PrefixCache
from miles_ref.engine.protocol import ChatRequest, Result
from miles_ref.engine.settings import EngineSettings, Limits, Sampling
from miles_ref.engine.speech import Speech, Spoken, call_id, parse
from miles_ref.errors import MessageValidationError, MilesRefError
from miles_ref.process import say_ready, url_of
from miles_ref.tokens.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_BODY = 1 << 30  # bytes
SHUTDOWN_SECONDS = 2.0  # for replies that are being written when the engine is told to end


class Engine:
    """A model, its tokenizer and the worker that runs it. `chat` may be called by many tasks at once."""

    def __init__(self, settings: EngineSettings, model: LanguageModel, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.model = model
        self.speech = Speech.of(tokenizer)
        self.stop_ids = self.speech.stop_ids | model.stop_ids
        self.context_length = min(model.context_length, settings.context_length or model.context_length)
        self.worker = Worker(model, PrefixCache(settings.cache_tokens), tokenizer.decode)
        self._numbers = count()

    @classmethod
    def load(cls, settings: EngineSettings) -> Engine:
        """Raises UsageError for a model or tokenizer that cannot be used."""
        return cls(settings, *LanguageModel.load(settings))

    async def chat(self, request: ChatRequest) -> dict[str, Any]:
        """The chat.completion object. Raises MessageValidationError (400), EngineClosedError (503)."""
        begun = time.perf_counter()
        number = next(self._numbers)
        job = Job(request.rid or uuid.uuid4().hex, lambda: self._work(request, number))
        future = self.worker.submit(job)
        try:
            work, output = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            job.aborted = True  # the client went away
            raise
        return self._reply(request, job.rid, work, output, time.perf_counter() - begun)

    def _work(self, request: ChatRequest, number: int) -> Work:
        kwargs = request.chat_template_kwargs or {}
        tools = request.tools if request.uses_tools else None
        prompt = request.input_ids or self.speech.prompt(request.messages, request.tools, kwargs)
        script = None
        if self.settings.policy == "calculator":
            seed = self.settings.seed if request.seed is None else (self.settings.seed << 64) ^ request.seed
            script = self.speech.completion(policy.reply(request.messages, tools, seed), kwargs)
        limits = Limits(
            max_tokens=self._room(request, prompt),
            min_tokens=request.min_tokens or 0,
            stop_ids=self.stop_ids.union(request.stop_token_ids or ()),
            stop_texts=request.stop_texts,
        )
        sampling = Sampling(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=-1 if request.top_k is None else request.top_k,
            # Without a seed, requests that are equal still differ, and a run of the engine can be repeated.
            seed=self.settings.seed * 1_000_003 + number if request.seed is None else request.seed,
        )
        return Work(prompt, limits, sampling, script)

    def _room(self, request: ChatRequest, prompt: list[int]) -> int:
        """How many tokens may be generated. Raises MessageValidationError for a prompt that cannot be used."""
        wrong = next((at for at, token in enumerate(prompt) if not 0 <= token < self.model.vocabulary), None)
        if wrong is not None:
            raise MessageValidationError(
                f"input_ids[{wrong}] is {prompt[wrong]}, but the model's vocabulary has {self.model.vocabulary} ids"
            )
        room = self.context_length - len(prompt)
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        if room < 1 or (asked or 0) > room:
            raise MessageValidationError(
                f"the context is too long: {len(prompt)} prompt tokens and {asked or 1} to generate are more than "
                f"the model's {self.context_length}; shorten the messages or lower max_tokens"
            )
        if (request.routed_experts_start_len or 0) > len(prompt):
            raise MessageValidationError(
                f"routed_experts_start_len is {request.routed_experts_start_len}; the prompt has {len(prompt)} tokens"
            )
        return room if asked is None else asked

    def _reply(self, request: ChatRequest, rid: str, work: Work, output: Output, latency: float) -> dict[str, Any]:
        result = Result(
            rid=rid,
            model=request.model or self.model.name,
            created=int(time.time()),
            spoken=(spoken := self._spoken(request, work, output)),
            call_ids=[call_id(work.prompt, at) for at in range(len(spoken.calls))],
            finish=output.finish,
            matched=output.matched,
            prompt_tokens=len(work.prompt),
            cached_tokens=output.cached_tokens,
            output_ids=output.ids,
            log_probs=output.log_probs,
            routes=output.routes,
            latency=latency,
            weight_version=self.settings.weight_version,
        )
        texts = [self.speech.tokenizer.decode([token]) for token in output.ids] if request.logprobs else []
        return protocol.chat_reply(result, request, texts)

    def _spoken(self, request: ChatRequest, work: Work, output: Output) -> Spoken:
        """The message in the output, without what ended it unless `no_stop_trim` is set."""
        trim = output.finish == "stop" and not request.no_stop_trim
        ids = output.ids[:-1] if trim and isinstance(output.matched, int) else output.ids
        text = self.speech.text(ids, skip_special=request.skip_special_tokens is not False)
        if trim and isinstance(output.matched, str):
            text = text.partition(output.matched)[0]
        reasoning = request.separate_reasoning is not False
        opened = reasoning and self.speech.opens_reasoning(work.prompt)
        return parse(text, reasoning=reasoning, tools=request.uses_tools, opened=opened)


def make_app(engine: Engine) -> web.Application:
    """The HTTP application; its worker starts and ends with it."""

    async def chat(request: web.Request) -> web.StreamResponse:
        asked = protocol.read_chat_request(await request.read())
        reply = await engine.chat(asked)
        if not asked.stream:
            return _json(reply)
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
        return web.Response(body=b"".join(protocol.stream_events(reply, asked)), headers=headers)

    async def abort(request: web.Request) -> web.Response:
        asked = protocol.read_abort_request(await request.read())
        return _json({"aborted": engine.worker.abort(None if asked.abort_all else asked.rid)})

    async def health(_: web.Request) -> web.Response:
        return _json({"status": "ok", "running": engine.worker.running})

    async def models(_: web.Request) -> web.Response:
        return _json(protocol.model_list(engine.model.name, engine.context_length))

    async def start(_: web.Application) -> None:
        engine.worker.start()

    async def stop(_: web.Application) -> None:
        await asyncio.to_thread(engine.worker.close)

    app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/abort_request", abort)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.on_startup.append(start)
    app.on_shutdown.append(stop)  # before open replies are waited for: it ends them
    return app


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except MilesRefError as error:
        return _json(protocol.error_reply(str(error), error.status_code), error.status_code)
    except web.HTTPException as error:
        return _json(protocol.error_reply(error.text or error.reason, error.status), error.status)
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return _json(protocol.error_reply(f"the engine failed: {type(error).__name__}: {error}", 500), 500)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def serve(engine: Engine, host: str, port: int, *, until_eof: bool = False) -> None:
    """Serve until SIGTERM or SIGINT; with `until_eof` also until standard input closes, as when the parent dies.

    Prints one JSON line with `url` and `pid` on standard output when it can serve.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if until_eof and sys.stdin is None:
        ended.set()  # it was closed before Python started; descriptor 0 is something else by now
    elif until_eof:
        call_at_eof(0, ended.set)
    async with listening(engine, host, port) as url:
        say_ready(url)
        await ended.wait()


@contextlib.asynccontextmanager
async def listening(engine: Engine, host: str, port: int) -> AsyncIterator[str]:
    """Serve within the block, which gets the URL; port 0 takes a free one. Raises OSError where it cannot listen."""
    runner = web.AppRunner(
        make_app(engine), handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS, access_log=None
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield url_of(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


def call_at_eof(descriptor: int, then: Callable[[], object]) -> None:
    """Read the descriptor to its end beside the running loop, which then calls `then`."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            then()

    def read_all() -> None:
        with contextlib.suppress(OSError):  # what is open for writing only gives nothing either
            while os.read(descriptor, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(then)

    try:
        loop.add_reader(descriptor, read)
    except PermissionError:  # epoll takes no files and no /dev/null
        threading.Thread(target=read_all, daemon=True).start()
