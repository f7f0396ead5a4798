"""The agent worker as an HTTP server: a thin shell around `core.WorkerCore` (agents.md, Worker).

Only aiohttp and the standard library. The agent's module is imported by the call's child process, never here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aiohttp import HttpVersion11, web

from miles_ref import __version__
from miles_ref.agents.child import Child, ChildSpec, request_frame
from miles_ref.agents.core import MAX_WAIT_SECONDS, Act, ActKind, Answer, CoreSettings, PollReply, WorkerCore, error
from miles_ref.agents.environment import OWN_TOKEN_VARIABLES, child_environment
from miles_ref.agents.starts import Start, starts
from miles_ref.agents.submission import Order, RefusedSubmit, parse_submission
from miles_ref.limits import MAX_LINE_BYTES
from miles_ref.process import say_ready, url_of

logger = logging.getLogger("miles_ref.worker")
_http_logger = logging.getLogger("miles_ref.worker.http")
"""For what aiohttp logs of requests that it cannot read."""

MAX_BODY_BYTES = 4 << 30
THREAD_PARSE_BYTES = 64 << 10
"""Bodies over this size are parsed in a thread, so that /health and other calls are not kept waiting."""

WRITE_BYTES = 256 << 10

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the shell needs beside `CoreSettings`. `token` None asks for none; no functions allows every function."""

    token: str | None = None
    keep_env: tuple[str, ...] = ()
    clean_env: bool = False
    pass_env: tuple[str, ...] = ()
    allow_functions: tuple[str, ...] = ()
    agent_log_dir: Path | None = None


class WorkerServer:
    """Turns requests into calls of the core, and what the core wants into child processes, signals and replies."""

    def __init__(self, core: WorkerCore, settings: ServerSettings) -> None:
        self.core = core
        self.ended = asyncio.Event()
        self._settings = settings
        self._children: dict[str, Child] = {}
        self._starts: dict[str, Start] = {}
        self._logs: dict[str, IO[bytes]] = {}
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline: float | None = None
        self._loop = asyncio.get_running_loop()

    def app(self) -> web.Application:
        """The aiohttp application; `client_max_size` lets bodies of many MiB pass."""
        app = web.Application(middlewares=[self._json_errors, self._authorize], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._get_health, expect_handler=self._expect)
        app.router.add_get("/calls", self._get_calls, expect_handler=self._expect)
        app.router.add_post("/calls", self._post_call, expect_handler=self._expect)
        app.router.add_get("/calls/{id}", self._get_call, allow_head=False, expect_handler=self._expect)
        app.router.add_delete("/calls/{id}", self._delete_call, expect_handler=self._expect)
        return app

    def drain(self) -> None:
        """SIGTERM: take no more calls, cancel those that run, and end; the second one kills the children."""
        logger.info("draining: %d calls run", self.core.running)
        self.core.drain()
        self.settle()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _get_health(self, request: web.Request) -> web.Response:
        return self._json(Answer(200, self.core.health()))

    async def _get_calls(self, request: web.Request) -> web.Response:
        answer = Answer(200, {"calls": self.core.listing()})
        self.settle()
        return self._json(answer)

    async def _post_call(self, request: web.Request) -> web.Response:
        try:
            body = await request.read()
        except web.RequestPayloadError as exc:
            return self._json(error(400, "form", f"the body cannot be read: {type(exc).__name__}"))
        try:
            order, frame = await self._parse(body)
        except RefusedSubmit as exc:
            return self._json(exc.answer)
        del body
        # From here on nothing is awaited: a submit whose client vanishes is admitted wholly or not at all.
        answer = self.core.submit(order.submission)
        self.settle(order, frame)
        return self._json(answer)

    async def _parse(self, body: bytes) -> tuple[Order, bytes]:
        def parse() -> tuple[Order, bytes]:
            order = parse_submission(body, self._settings.allow_functions)
            try:
                return order, request_frame(order.submission.fn, order.kwargs)
            except ValueError as exc:
                raise RefusedSubmit(error(400, "form", f"kwargs: {exc}")) from None

        return parse() if len(body) <= THREAD_PARSE_BYTES else await asyncio.to_thread(parse)

    async def _delete_call(self, request: web.Request) -> web.Response:
        answer = self.core.delete(request.match_info["id"])
        self.settle()
        return self._json(answer)

    async def _get_call(self, request: web.Request) -> web.StreamResponse:
        call_id = request.match_info["id"]
        try:
            after, wait, cancel = poll_query(request.query)
        except ValueError as exc:
            return self._json(error(400, "form", str(exc)))
        refusal = self.core.check_poll(call_id, after, cancel)
        self.settle()
        if refusal is not None:
            return self._json(refusal)
        self.core.begin_poll(call_id)
        try:
            answer = await self._hold(call_id, after, wait)
        finally:
            # Before the answer is written: a client that does not read it must not stop the orphan timer.
            self.core.end_poll(call_id)
            self.settle()
        if isinstance(answer, Answer):
            return self._json(answer)
        return await self._write_poll(request, call_id, answer)

    async def _hold(self, call_id: str, after: int, wait: float) -> PollReply | Answer:
        """Wait for something to answer, at most `wait` seconds."""
        deadline = self._loop.time() + wait
        with self._woken(call_id) as woken:
            while True:
                woken.clear()
                refusal = self.core.check_poll(call_id, after, cancel=False)
                if refusal is not None:
                    return refusal
                reply = self.core.poll(call_id, after)
                self.settle()
                if reply is not None:
                    return reply
                try:
                    async with asyncio.timeout_at(deadline):
                        await woken.wait()
                except TimeoutError:
                    return self.core.empty_poll(call_id, after)

    @contextlib.contextmanager
    def _woken(self, call_id: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        waiting = self._waiting.setdefault(call_id, set())
        waiting.add(event)
        try:
            yield event
        finally:
            waiting.discard(event)
            if not waiting:
                self._waiting.pop(call_id, None)

    async def _write_poll(self, request: web.Request, call_id: str, reply: PollReply) -> web.StreamResponse:
        body = poll_body(self.core.boot_id, reply)
        response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
        response.content_length = len(body)
        if request.transport is not None:
            # Written in full is what the kernel has. By default up to 64 KiB may stay in this process, which may end.
            request.transport.set_write_buffer_limits(high=0)
        await response.prepare(request)
        for chunk in _chunks(body):
            await response.write(chunk)
            self.core.polled(call_id)  # Who reads on, however slowly, is still there.
        await response.write_eof()
        await request.writer.drain()  # The two above wait for large chunks only.
        self.core.polled(call_id)
        if reply.outcome is not None and request.transport is not None and not request.transport.is_closing():
            self.core.fetched(call_id)
        self.settle()
        return response

    # --- carrying out what the core wants ----------------------------------------------------------------------------

    def settle(self, order: Order | None = None, frame: bytes = b"") -> None:
        """Carry out every act in the outbox, then set the timer for the core's next deadline.

        `order` and `frame` are of the submit that was just admitted, whose child is to be spawned.
        """
        while self.core.outbox:
            act = self.core.outbox.popleft()
            match act.kind:
                case ActKind.SPAWN:
                    assert order is not None
                    self._ask_for_start(order, frame)
                case ActKind.WAKE:
                    for event in self._waiting.get(act.call_id, ()):
                        event.set()
                case _:
                    self._signal(act)
        self._set_timer()
        if self.core.drained():
            self.ended.set()

    def _signal(self, act: Act) -> None:
        child = self._children.get(act.call_id)
        if child is None:
            start = self._starts.get(act.call_id)
            if start is not None and start.withdraw():
                del self._starts[act.call_id]
                self.core.gone(act.call_id, None)
            return
        match act.kind:
            case ActKind.TERMINATE:
                child.terminate()
            case ActKind.KILL:
                child.kill()
            case ActKind.PAUSE:
                child.pause()
            case ActKind.RESUME:
                child.resume()

    def _ask_for_start(self, order: Order, frame: bytes) -> None:
        call_id = order.submission.call_id
        start = Start(lambda: self._spawn(order, frame))
        self._starts[call_id] = start
        starts().ask(start)

    def _spawn(self, order: Order, frame: bytes) -> None:
        call_id = order.submission.call_id
        settings = self._settings
        env = child_environment(
            os.environ,
            order.env,
            keep=settings.keep_env,
            clean=settings.clean_env,
            passed=settings.pass_env,
            without=OWN_TOKEN_VARIABLES,
            own_token=settings.token,
        )
        spec = ChildSpec(frame, env, self.core.settings.report_budget_bytes)
        try:
            child = Child(spec, _CallListener(self, call_id), self._open_log(call_id))
        except OSError as exc:
            logger.error("call %s: no child process could be made: %s", call_id, exc.strerror)
            self._close_log(call_id)
            self.core.gone(call_id, None, reason="SpawnFailed")
            self._starts.pop(call_id).ready()
            self.settle()
            return
        self._children[call_id] = child
        self.core.spawned(call_id, child.pid)
        logger.info("call %s: %a runs as process %d", call_id, order.submission.fn, child.pid)

    def started(self, call_id: str) -> None:
        """The call's child has imported its function."""
        self.core.started(call_id)
        self._starts[call_id].ready()

    def gone(self, call_id: str, exit_status: int | None) -> None:
        """The call's child has ended."""
        del self._children[call_id]
        self._close_log(call_id)
        self.core.gone(call_id, exit_status)
        logger.info("call %s: ended, exit status %s", call_id, exit_status)
        self._starts.pop(call_id).ready()  # Only now: it starts other calls, and each settles.
        self.settle()

    def _set_timer(self) -> None:
        deadline = self.core.next_deadline()
        if self.core.draining and not self.core.running:
            deadline = min(deadline or math.inf, self.core.drain_deadline())
        if self._timer is not None:
            if deadline == self._timer_deadline:
                return
            self._timer.cancel()
            self._timer = None
        self._timer_deadline = deadline
        if deadline is not None:
            delay = max(0.0, deadline - self.core.clock())
            self._timer = self._loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.core.tick()
        self.settle()

    def _open_log(self, call_id: str) -> IO[bytes] | None:
        if self._settings.agent_log_dir is None:
            return None
        log = open(self._settings.agent_log_dir / f"{call_id}.log", "ab", buffering=0)  # noqa: SIM115
        self._logs[call_id] = log
        return log

    def _close_log(self, call_id: str) -> None:
        log = self._logs.pop(call_id, None)
        if log is not None:
            log.close()

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _expect(self, request: web.Request) -> web.Response | None:
        """Answer the header Expect (RFC 9110, 10.1.1); aiohttp would refuse an unknown one without a boot id."""
        if request.version < HttpVersion11:
            return None
        if request.headers["Expect"].lower() != "100-continue":
            return self._json(error(417, "http_417", "the only Expect that this worker knows is 100-continue"))
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # What was written is no part of the reply.
        return None

    def _json(self, answer: Answer) -> web.Response:
        response = web.json_response({"boot_id": self.core.boot_id, **answer.body}, status=answer.status)
        if answer.retry_after is not None:
            response.headers["Retry-After"] = str(answer.retry_after)
        if answer.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    @web.middleware
    async def _json_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as exc:
            return self._json(error(exc.status, f"http_{exc.status}", exc.reason))
        except ConnectionError:
            raise
        except Exception as exc:
            # The type only: a message could hold a value of the request.
            logger.error("%s %s failed: %s", request.method, request.path, type(exc).__name__)
            return self._json(error(500, "internal", f"the worker failed: {type(exc).__name__}"))

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = self._settings.token
        if token is not None and request.path != "/health":
            given = request.headers.get("Authorization", "")
            if not presents_token(given, token):
                return self._json(error(401, "token", "this worker wants its token: Authorization: Bearer ..."))
        return await handler(request)


class _CallListener:
    """Tells the core what the child of one call does."""

    def __init__(self, server: WorkerServer, call_id: str) -> None:
        self._server = server
        self._call_id = call_id

    def started(self) -> None:
        self._server.started(self._call_id)

    def reported(self, text: bytes, item: Any) -> None:
        self._server.core.reported(self._call_id, text)
        self._server.settle()

    def outcome_read(self, text: bytes) -> None:
        self._server.core.outcome_read(self._call_id, text)
        self._server.settle()

    def gone(self, exit_status: int | None) -> None:
        self._server.gone(self._call_id, exit_status)


def _log_type_only(record: logging.LogRecord) -> bool:
    """Let no exception's text pass: it may quote a header, as Authorization with the token."""
    if isinstance(record.exc_info, tuple) and record.exc_info[0] is not None:
        record.msg, record.args = f"{record.getMessage()}: {record.exc_info[0].__name__}", None
        record.exc_info = None
    return True


_http_logger.addFilter(_log_type_only)


def presents_token(authorization: str, token: str) -> bool:
    """Whether the header Authorization presents the token. The scheme's case does not count (RFC 9110, 11.1)."""
    scheme, _, given = authorization.partition(" ")
    presented = given.strip(" ").encode("utf-8", "surrogateescape")
    return scheme.lower() == "bearer" and hmac.compare_digest(presented, token.encode())


def poll_query(query: Mapping[str, str]) -> tuple[int, float, bool]:
    """`after`, `wait` in seconds (at most 24) and `cancel` of a poll. Raises ValueError saying what is wrong."""
    after_text = query.get("after", "0")
    if not (after_text.isascii() and after_text.isdigit() and len(after_text) < 19):
        raise ValueError(f"after must be a number of reports, not {after_text!r}")
    wait_text = query.get("wait", "0")
    try:
        wait = float(wait_text)
    except ValueError:
        wait = math.nan
    if math.isnan(wait) or wait < 0 or "_" in wait_text:
        raise ValueError(f"wait must be a number of seconds from 0 on, not {wait_text!r}")
    cancel_text = query.get("cancel", "0")
    if cancel_text not in ("0", "1"):
        raise ValueError(f"cancel must be 1, or absent, not {cancel_text!r}")
    return int(after_text), min(wait, MAX_WAIT_SECONDS), cancel_text == "1"


def poll_body(boot_id: str, reply: PollReply) -> bytes:
    """The JSON text of a poll's reply; reports and outcome are JSON texts already."""
    head = b'{"boot_id":"%s","state":"%s","reports":[' % (boot_id.encode(), reply.state.encode())
    tail = b'],"next":%d,"outcome":' % reply.next
    return b"".join([head, b",".join(reply.reports), tail, reply.outcome or b"null", b"}"])


def _chunks(body: bytes) -> list[memoryview]:
    view = memoryview(body)
    return [view[start : start + WRITE_BYTES] for start in range(0, len(view), WRITE_BYTES)]


# --- running one -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running_worker(
    core_settings: CoreSettings, settings: ServerSettings, host: str, port: int
) -> AsyncIterator[tuple[WorkerServer, str]]:
    """Serve on host and port (0 = a free one) while the context lasts; gives the server and its URL."""
    core = WorkerCore(time.monotonic, core_settings, boot_id=secrets.token_hex(8), version=__version__)
    server = WorkerServer(core, settings)
    # A poll whose client vanished must end, so that the orphan timer starts; nothing else awaits after it has changed
    # anything.
    runner = web.AppRunner(
        server.app(),
        access_log=None,
        logger=_http_logger,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        max_line_size=MAX_LINE_BYTES,
        max_field_size=MAX_LINE_BYTES,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address = runner.addresses[0]
        yield server, url_of(*address[:2])
    finally:
        await runner.cleanup()


async def serve(core_settings: CoreSettings, settings: ServerSettings, host: str, port: int) -> None:
    """Run a worker until SIGTERM has drained it; prints one JSON line with url and pid when it can serve."""
    async with running_worker(core_settings, settings, host, port) as (server, url):
        loop = asyncio.get_running_loop()

        def drain(*_: object) -> None:
            loop.call_soon_threadsafe(server.drain)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, drain)
        say_ready(url)
        await server.ended.wait()
        # Not the loop's own handlers above: they end with the loop, and a late signal would then kill a drained worker
        # that is on its way to exit with 0.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def is_loopback(host: str) -> bool:
    """Whether every address of `host` is on this machine only. An unknown host is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)
