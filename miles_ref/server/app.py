"""The aiohttp application: routes, errors and life of a session server (session-http.md)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, suppress

from aiohttp import web

from miles_ref import __version__
from miles_ref.errors import AssemblyError, GenerationAbortedError, MilesRefError, described
from miles_ref.limits import MAX_LINE_BYTES
from miles_ref.plugins.pipeline import Pipeline
from miles_ref.server.collect import Collector, SamplesRequest
from miles_ref.server.headers import copied_back, forwarded
from miles_ref.server.metadata import MismatchReporter, Snapshot
from miles_ref.server.metrics import CONTENT_TYPE, Metrics
from miles_ref.server.pages import inspect_page
from miles_ref.server.sessions import Session, SessionStore
from miles_ref.server.settings import ServerSettings
from miles_ref.server.turns import TurnRunner
from miles_ref.server.upstream import Upstream
from miles_ref.trajectory.commit import Committer
from miles_ref.trajectory.dump import dump_json, record_json
from miles_ref.trajectory.raw_json import dump
from miles_ref.trajectory.turn import TurnPlanner

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SWEEP_SECONDS = 30.0
_READ_BUFFER = 1 << 20


class SessionServer:
    """A session server. `clock` gives epoch seconds; `monotonic` seconds for idle times.

    Everything that can be wrong with the settings is found here: raises UsageError or PluginLoadError.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._monotonic = monotonic
        renderer = settings.renderer()
        matching = settings.matching()
        assembly = settings.assembly(renderer)
        pipeline = Pipeline(
            settings.version,
            picker=settings.session_sample_picker_path,
            merger=settings.session_merge_function_path,
        )
        is_tree = settings.version == "v2"
        planner = TurnPlanner(renderer, settings.forward(), tree=is_tree, strict=settings.session_strict_append_only)
        self._reporter = MismatchReporter(renderer)
        self._collector = Collector(pipeline, assembly, self._reporter)
        self._upstream = Upstream(settings.backend_url)
        self._turns = TurnRunner(
            planner,
            Committer(renderer.tokenizer, assembly),
            self._upstream,
            clock,
            settings.max_session_bytes,
        )
        self.sessions = SessionStore(
            monotonic,
            lambda: secrets.token_hex(16),
            lambda: settings.trajectory(matching),
            on_expired=lambda: self.metrics.sessions.labels("expired").inc(),
            ttl=settings.session_ttl,
            max_sessions=settings.max_sessions,
        )
        self.metrics = Metrics(
            lambda: len(self.sessions),
            lambda: sum(session.stored_bytes for session in self.sessions),
            lambda: sum(session.in_flight for session in self.sessions),
        )

    def use_backend(self, url: str) -> None:
        """Call the backend at `url` instead of the settings'; to be set before the server runs."""
        self._upstream.base_url = url.rstrip("/")

    def runner(self) -> web.AppRunner:
        """The server, to be bound to an address. Its cleanup lets requests in flight finish within the grace."""
        app = web.Application(client_max_size=self.settings.max_body_bytes, middlewares=[self._errors])
        add = app.router.add_route
        add("GET", "/health", self._health)
        add("GET", "/inspect", self._inspect)
        add("GET", "/metrics", self._metrics)
        add("POST", "/sessions", self._create)
        add("GET", "/sessions/{id}", self._dump)
        add("DELETE", "/sessions/{id}", self._delete)
        add("POST", "/sessions/{id}/v1/chat/completions", self._chat)
        add("POST", "/sessions/{id}/samples", self._samples)
        add("*", "/sessions/{id}/{path:.*}", self._proxy)
        app.cleanup_ctx.append(self._running)
        return web.AppRunner(
            app,
            access_log=None,
            # A client that goes away does not end its turn: the backend works on, and the turn is committed.
            handler_cancellation=False,
            auto_decompress=False,
            shutdown_timeout=self.settings.shutdown_grace,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            read_bufsize=_READ_BUFFER,
        )

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        await self._upstream.open()
        sweeper = asyncio.create_task(self._sweep()) if self.settings.session_ttl else None
        yield
        if sweeper is not None:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
        await self._upstream.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self.settings.session_ttl))
            self.sessions.sweep()

    # Errors

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except AssemblyError as error:
            return self._refusal(web.Response(status=error.status_code, text=str(error)))
        except MilesRefError as error:
            response = _json_error(error.status_code, str(error))
            if isinstance(error, GenerationAbortedError):
                response.headers["Retry-After"] = "1"
            if error.status_code >= 500:
                logger.warning("%s %s: %d %s", request.method, request.path, error.status_code, error)
            return self._refusal(response)
        except web.HTTPException as error:
            return self._refusal(_json_error(error.status, error.text or error.reason))
        except (web.RequestPayloadError, ConnectionError) as error:
            return self._refusal(_json_error(400, f"the request's body did not arrive whole: {error}"))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            # Families, templates and libraries run here too. A SystemExit would end the server and all its sessions,
            # and a tokenizer's panic is no Exception. Signals do not come this way (`serve` handles them itself).
            logger.exception("%s %s", request.method, request.path)
            return self._refusal(_json_error(500, f"internal error: {described(error)}"))

    def _refusal(self, response: web.Response) -> web.Response:
        self.metrics.refusals.labels(str(response.status)).inc()
        return response

    # The server's own pages

    async def _health(self, request: web.Request) -> web.Response:
        health = {"status": "ok"}
        if self.settings.session_server_instance_id is not None:
            health["session_server_instance_id"] = self.settings.session_server_instance_id
        return web.json_response(health)

    async def _inspect(self, request: web.Request) -> web.Response:
        about = f"miles-ref {__version__}, {self.settings.version}, backend {self._upstream.base_url}"
        page = inspect_page(self.sessions, self._monotonic(), about)
        return web.Response(text=page, content_type="text/html")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    # Sessions

    async def _create(self, request: web.Request) -> web.Response:
        session = self.sessions.create()
        self.metrics.sessions.labels("created").inc()
        return web.json_response({"session_id": session.id})

    async def _dump(self, request: web.Request) -> web.Response:
        session = self._session(request)
        snapshot = Snapshot(session)
        metadata = self._collector.metadata_json(snapshot)
        records = []
        for node in snapshot.path:
            records.append(record_json(node))
            await asyncio.sleep(0)
        return web.Response(body=dump_json(session.id, records, metadata), content_type="application/json")

    async def _delete(self, request: web.Request) -> web.Response:
        self.sessions.delete(request.match_info["id"])
        self.metrics.sessions.labels("deleted").inc()
        return web.Response(status=204)

    async def _samples(self, request: web.Request) -> web.Response:
        with self._using(request) as session:
            wanted = SamplesRequest.parse(await request.read(), tree=self.settings.version == "v2")
            self._session(request)  # It may have been deleted meanwhile.
            with self.metrics.collect_seconds.time():
                payload = await self._collector.collect(session, wanted)
        self.metrics.collects.inc()
        return web.Response(body=payload, content_type="application/octet-stream")

    # Turns

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        requested = self._clock()
        with self._using(request) as session:
            body = await request.read()
            headers = forwarded(request.headers.items(), session.id)
            headers.popall("Content-Encoding", None)
            try:
                result = await self._turns.run(session, headers, body, requested)
            except MilesRefError:
                self.metrics.turns.labels("refused").inc()
                raise
        if result.reply is None:
            self.metrics.turns.labels("backend_error").inc()
            return web.Response(status=result.status, body=result.body, headers=copied_back(result.headers.items()))
        self.metrics.turns.labels("committed" if result.committed else "not_committed").inc()
        if result.stream:
            return web.Response(body=result.reply.event_stream(), headers=_EVENT_STREAM)
        return web.Response(body=result.body, headers=copied_back(result.headers.items()))

    async def _proxy(self, request: web.Request) -> web.StreamResponse:
        with self._using(request) as session:
            return await self._passed_on(request, session)

    async def _passed_on(self, request: web.Request, session: Session) -> web.StreamResponse:
        body = await request.read() if request.can_read_body else None
        url = self._upstream.url(_path_below_session(request))
        headers = forwarded(request.headers.items(), session.id)
        async with self._upstream.call(request.method, url, headers, body) as reply:
            response = web.StreamResponse(status=reply.status, headers=copied_back(reply.headers.items()))
            await response.prepare(request)
            try:
                async for chunk in reply.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            except Exception:
                # The reply is cut off in its middle; closing the connection is the only way left to say so.
                if request.transport is not None:
                    request.transport.abort()
                logger.warning("%s %s: the reply was cut off", request.method, request.path)
            return response

    def _session(self, request: web.Request) -> Session:
        return self.sessions.get(request.match_info["id"])

    def _using(self, request: web.Request) -> AbstractContextManager[Session]:
        return self.sessions.using(request.match_info["id"])


_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def _json_error(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=dump({"error": text}), content_type="application/json")


def _path_below_session(request: web.Request) -> str:
    """Path and query that follow the session's id, spelled as the client spelled them."""
    url = request.rel_url
    path = "/" + url.raw_path.split("/", 3)[3]
    return f"{path}?{url.raw_query_string}" if url.raw_query_string else path
