"""Cases of kind http: steps against a running session server whose backend the steps script (cases.md, http).

Beyond cases.md, for cases that are read by people:
`$name` or `{name}` in a request's path is the id of the session created as `name`; a string body is sent as it is;
`backend` may be a list of replies; `{"fail": "cut"}` breaks the backend's reply in its middle;
`{"do": "hang_up", "job": name}` closes the client's connection of a started step; `{"do": "until",
"step": ...}` repeats a step until it holds, within a bound.
The values of expect may hold the markers of `miles_ref.testing.subset`. `backend_request` is about the request's body,
unless all its keys are of method, path, headers and body: then about the request as a whole. `content_type` is the
reply's, without parameters.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from miles_ref.errors import CaseError, DecodeError
from miles_ref.sample import Sample
from miles_ref.testing.case_backend import CaseBackend, Exchange
from miles_ref.testing.cases import Case
from miles_ref.testing.compare import show
from miles_ref.testing.kinds.codec import wire_sample
from miles_ref.testing.programs import ProgramError
from miles_ref.testing.references import References
from miles_ref.testing.subset import exact_differences, marker, subset_differences
from miles_ref.tokens.tokenizer import load_tokenizer
from miles_ref.wire import SAMPLES_VALUE_SPEC, SAMPLES_VALUE_SPEC_V2, decode_samples_and_merge_input_sample

TIMEOUT = 60.0
"""Seconds for one reply. A server that needs longer for these sizes hangs."""

UNTIL_TIMEOUT = 30.0
"""Seconds after which an `until` gives up; generous, because it only bounds a failure."""

ONCE_HEADERS = ("server", "date", "content-type", "content-length")
WHOLE_REQUEST = {"method", "path", "headers", "body"}


@dataclass(frozen=True)
class RunningServer:
    """A session server's address and the backend that it was started against."""

    url: str
    backend: CaseBackend


@dataclass
class Reply:
    """A server's reply, read in full. `headers` keeps repeats, names in lower case."""

    status: int
    headers: list[tuple[str, str]]
    raw: bytes

    @property
    def text(self) -> str:
        return self.raw.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON; a string if it is not JSON."""
        try:
            return json.loads(self.raw)
        except ValueError:
            return self.text

    @property
    def media_type(self) -> str | None:
        """The content type without its parameters."""
        found = next((value for key, value in self.headers if key == "content-type"), None)
        return found.partition(";")[0].strip() if found else None


@dataclass
class _Job:
    """A step that runs in a thread, while its backend's reply is held."""

    step: Mapping[str, Any]
    thread: threading.Thread
    exchange: Exchange
    connection: http.client.HTTPConnection
    result: list[Reply | OSError] = field(default_factory=list)


class HttpRun:
    """One run of one case. `differences` of `run` name the step by its index."""

    def __init__(self, version: str, server: RunningServer, encode: Callable[[str], Sequence[int]]) -> None:
        self._server = server
        self._refs = References(encode)
        self._fields = SAMPLES_VALUE_SPEC_V2 if version == "v2" else SAMPLES_VALUE_SPEC
        self._sessions: dict[str, str] = {}
        self._created: set[str] = set()
        self._last: tuple[Reply, Any] | None = None
        self._jobs: dict[str, _Job] = {}

    def run(self, steps: Sequence[Mapping[str, Any]]) -> list[str]:
        """The first step that does not hold, described; [] when all hold. Later steps would only repeat it.

        Raises ProgramError for a step that gets no reply.
        """
        try:
            for index, step in enumerate(steps):
                try:
                    found = self._step(step)
                except (OSError, http.client.HTTPException) as error:
                    late = isinstance(error, TimeoutError)
                    what = f"gave no answer within {TIMEOUT:g} s" if late else f"broke the connection: {error!r}"
                    raise ProgramError(
                        f"step {index} ({step['do']}): the server at {self._server.url} {what}"
                    ) from error
                if found:
                    return [f"step {index} ({step['do']}) {line}" for line in found]
            return []
        finally:
            for job in self._jobs.values():
                self._abandon(job)
            for session in self._created:
                with suppress(OSError, http.client.HTTPException):  # what matters was judged already
                    self._send("DELETE", f"/sessions/{session}", None, {})

    def _step(self, step: Mapping[str, Any]) -> list[str]:
        match step["do"]:
            case "start":
                self._start(step["step"], step["as"])
                return []
            case "release":
                self._server.backend.release(self._jobs[step["job"]].exchange)
                return []
            case "hang_up":
                self._hang_up(self._jobs[step["job"]])
                return []
            case "join":
                return self._join(step)
            case "until":
                return self._until(step)
        exchange = self._open_exchange(step)
        try:
            reply = self._call(step, self._connect())
        finally:
            self._server.backend.end(exchange)
        return self._judge(step, reply, exchange)

    def _until(self, until: Mapping[str, Any]) -> list[str]:
        """Repeat a step until it holds, for what happens after a client has gone. `save` keeps the reply that did."""
        end = time.monotonic() + UNTIL_TIMEOUT
        while found := self._step(until["step"]):
            if time.monotonic() > end:
                return [*(f"after {UNTIL_TIMEOUT:.0f} s still: {line}" for line in found), *self._last_reply()]
            time.sleep(0.01)
        if "save" in until and self._last is not None:
            self._refs.save(until["save"], self._last[1])
        return []

    def _last_reply(self) -> list[str]:
        if self._last is None:
            return []
        reply, _ = self._last
        return [f"the last reply was {reply.status} {show(reply.text, 400)}"]

    # Sending

    def _request_of(self, step: Mapping[str, Any]) -> tuple[str, str, Any, dict[str, str]]:
        session = self._refs.resolve(step.get("session"))
        session = self._sessions.get(session, session)
        headers = {str(k): str(v) for k, v in (self._refs.resolve(step.get("headers")) or {}).items()}
        body = self._refs.resolve(step.get("body"))
        match step["do"]:
            case "create":
                return "POST", "/sessions", body, headers
            case "chat":
                return "POST", f"/sessions/{session}/v1/chat/completions", body, headers
            case "samples":
                return "POST", f"/sessions/{session}/samples", body, headers
            case "get":
                return "GET", f"/sessions/{session}", None, headers
            case "delete":
                return "DELETE", f"/sessions/{session}", None, headers
            case "health":
                return "GET", "/health", None, headers
            case "request":
                return step["method"], self._path(self._refs.resolve(step["path"]), session), body, headers
            case other:
                raise CaseError(f"no such step: {other!r}")

    def _path(self, given: Any, session: str | None) -> str:
        if not isinstance(given, str):
            raise CaseError(f"path: the $ref leads to {show(given)}, not to a text")
        path: str = given
        for name in sorted(self._sessions, key=len, reverse=True):
            path = path.replace(f"{{{name}}}", self._sessions[name]).replace(f"${name}", self._sessions[name])
        return path.replace("{s}", session).replace("$s", session) if session else path

    def _connect(self) -> http.client.HTTPConnection:
        at = urlsplit(self._server.url)
        connection = http.client.HTTPConnection(at.hostname or "127.0.0.1", at.port, timeout=TIMEOUT)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _call(self, step: Mapping[str, Any], connection: http.client.HTTPConnection) -> Reply:
        method, path, body, headers = self._request_of(step)
        return self._send(method, path, body, headers, connection)

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        connection: http.client.HTTPConnection | None = None,
    ) -> Reply:
        connection = connection or self._connect()
        try:
            raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else _json_bytes(body)
            lower = {name.lower(): value for name, value in headers.items()}
            connection.request(method, path, raw, {"content-type": "application/json", **lower})
            response = connection.getresponse()
            data = response.read()
            return Reply(response.status, [(name.lower(), value) for name, value in response.getheaders()], data)
        finally:
            connection.close()

    def _open_exchange(self, step: Mapping[str, Any], *, held: bool = False) -> Exchange:
        script = step.get("backend")
        replies = script if isinstance(script, list) else [] if script is None else [script]
        return self._server.backend.begin([self._refs.resolve(reply) for reply in replies], held=held)

    # Jobs

    def _start(self, step: Mapping[str, Any], name: str) -> None:
        exchange = self._open_exchange(step, held=True)
        connection = self._connect()

        def work() -> None:
            try:
                job.result.append(self._call(step, connection))
            except (OSError, http.client.HTTPException) as error:
                job.result.append(OSError(repr(error)))
            finally:
                exchange.arrived.set()

        job = self._jobs[name] = _Job(step, threading.Thread(target=work, daemon=True), exchange, connection)
        job.thread.start()
        if not exchange.arrived.wait(TIMEOUT):
            raise CaseError(f"job {name!r}: neither a backend call nor a reply within {TIMEOUT:.0f} s")

    def _hang_up(self, job: _Job) -> None:
        if job.connection.sock is not None:
            job.connection.sock.shutdown(socket.SHUT_RDWR)
        job.thread.join(TIMEOUT)

    def _join(self, step: Mapping[str, Any]) -> list[str]:
        job = self._jobs.pop(step["job"])
        job.thread.join(TIMEOUT)
        self._server.backend.end(job.exchange)
        if not job.result:
            return [f"job {step['job']!r}: no reply within {TIMEOUT:.0f} s; was it released?"]
        reply = job.result[0]
        if isinstance(reply, OSError):
            return [f"job {step['job']!r}: the connection broke: {reply}"]
        merged = {**job.step, "expect": {**job.step.get("expect", {}), **step.get("expect", {})}}
        if "save" in step:
            merged["save"] = step["save"]
        return self._judge(merged, reply, job.exchange)

    def _abandon(self, job: _Job) -> None:
        self._server.backend.end(job.exchange)
        job.thread.join(TIMEOUT)

    # Judging

    def _judge(self, step: Mapping[str, Any], reply: Reply, exchange: Exchange) -> list[str]:
        self._keep(step, reply)
        expect = self._refs.resolve(step.get("expect") or {})
        found: list[str] = []
        if "status" in expect and reply.status != expect["status"]:
            found.append(f"status: got {reply.status} {show(reply.text)}, expected {expect['status']}")
        if "body" in expect:
            empty = expect["body"] is None and not reply.raw
            found += [] if empty else subset_differences(expect["body"], reply.json(), "body")
        found += _unmentioned(expect.get("text_mentions", []), reply)
        found += self._headers(expect.get("headers", {}), reply)
        if "content_type" in expect:
            found += subset_differences(expect["content_type"], reply.media_type, "content type")
        if "backend_request" in expect:
            found += _backend_request(expect["backend_request"], exchange.requests)
        if "samples" in expect:
            found += self._samples(expect["samples"], reply)
        if "sse" in expect:
            found += _sse(expect["sse"], reply)
        return found

    def _keep(self, step: Mapping[str, Any], reply: Reply) -> None:
        value = self._value(step, reply)
        self._last = reply, value
        if step["do"] == "create" and isinstance(value, dict) and isinstance(value.get("session_id"), str):
            self._created.add(value["session_id"])
            if "as" in step:
                self._sessions[step["as"]] = value["session_id"]
                self._refs.save(step["as"], value)
        if "save" in step:
            self._refs.save(step["save"], value)

    def _value(self, step: Mapping[str, Any], reply: Reply) -> Any:
        """What a `$ref` to the reply finds: JSON; of a samples payload what `expect.samples` compares."""
        if step["do"] == "samples" and reply.status == 200:
            with suppress(DecodeError):
                return self._decoded(reply)
        return reply.json() if reply.raw else None

    def _decoded(self, reply: Reply) -> dict[str, Any]:
        got = decode_samples_and_merge_input_sample(reply.raw, Sample(), fields=self._fields)
        samples = [wire_sample(sample, self._fields) for sample in got.samples]
        return {"samples": samples, "empty_reason": got.empty_reason, "session_metadata": got.session_metadata}

    @staticmethod
    def _headers(expected: Mapping[str, Any], reply: Reply) -> list[str]:
        found = []
        for name, value in expected.items():
            got = [v for k, v in reply.headers if k == name.lower()]
            wanted = [] if value is None else [value]
            found += subset_differences(wanted, got, f"header {name}")
        for name in ONCE_HEADERS:
            got = [v for k, v in reply.headers if k == name]
            if len(got) > 1:
                found.append(f"header {name}: sent {len(got)} times {show(got)}")
        return found

    def _samples(self, expected: Any, reply: Reply) -> list[str]:
        if isinstance(expected, list):
            expected = {"samples": expected}
        elif isinstance(expected, Mapping) and "error" in expected:
            return _refusal(expected, reply)
        elif isinstance(expected, Mapping) and "samples" in expected:
            expected = {"empty_reason": None, **expected}
        else:
            raise CaseError(f"expect.samples: the $ref leads to {show(expected)}, not to samples")
        if reply.status != 200:
            return [f"samples: got status {reply.status} {show(reply.text)}, expected a payload"]
        try:
            got = self._decoded(reply)
        except DecodeError as error:
            return [f"samples: the payload cannot be decoded: {error}"]
        found = exact_differences(expected["samples"], got["samples"], "samples")
        if "empty_reason" in expected:
            found += exact_differences(expected["empty_reason"], got["empty_reason"], "empty_reason")
        if "session_metadata" in expected:
            found += subset_differences(expected["session_metadata"], got["session_metadata"], "session_metadata")
        return found


def _json_bytes(body: Any) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def _refusal(expected: Mapping[str, Any], reply: Reply) -> list[str]:
    """What of `{"error": status, "mentions": [...]}` does not hold."""
    if reply.status != expected["error"]:
        return [f"samples: got status {reply.status} {show(reply.text)}, expected {expected['error']}"]
    return _unmentioned(expected.get("mentions", []), reply)


def _unmentioned(expected: Any, reply: Reply) -> list[str]:
    """The texts that are not in the reply's; what is no text, which a `$ref` may lead to, is one as JSON."""
    parts = expected if isinstance(expected, list) else [expected]
    texts = [part if isinstance(part, str) else json.dumps(part) for part in parts]
    return [f"body: {show(text)} is not in {show(reply.text)}" for text in texts if text not in reply.text]


def _sse(expected: Any, reply: Reply) -> list[str]:
    if reply.media_type != "text/event-stream":
        return [f"sse: the reply is no event stream, its content type is {show(reply.media_type)}"]
    return subset_differences(_payloads(expected), _events(reply.text), "sse")


def _payloads(expected: Any) -> Any:
    """Expected events; a text is the raw payload of one, whole, so that it is parsed as the reply's are."""
    mark = marker(expected)
    if mark is not None:
        return {mark[0]: _payloads(mark[1])}
    return [_payload(item) for item in expected] if isinstance(expected, list) else expected


def _payload(item: Any) -> Any:
    if not isinstance(item, str):
        return item
    try:
        return {"$exact": json.loads(item)}
    except ValueError:
        return item


def _events(text: str) -> list[Any]:
    """The data payloads of server-sent events, JSON where they are JSON."""
    events = []
    for block in text.split("\n\n"):
        data = "\n".join(line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:"))
        if data:
            try:
                events.append(json.loads(data))
            except ValueError:
                events.append(data)
    return events


def _backend_request(expected: Any, requests: Sequence[Mapping[str, Any]]) -> list[str]:
    if expected is None:
        return [f"the backend was called: {show(requests[0]['body'])}"] if requests else []
    if len(requests) != 1:
        return [f"the backend was called {len(requests)} times, expected once"]
    whole = isinstance(expected, Mapping) and set(expected) <= WHOLE_REQUEST and bool(expected)
    if not whole:
        got = requests[0]
        found = subset_differences(expected, got["body"], "backend_request")
        if found and got["body"] is None:
            return [
                f"backend_request: {got['method']} {got['path']} came with an empty body, expected {show(expected)}"
            ]
        return found
    headers = dict(expected.get("headers", {}))
    absent = {"$absent": True}
    wanted = {**expected, "headers": {k.lower(): absent if v is None else v for k, v in headers.items()}}
    return subset_differences(wanted, requests[0], "backend_request")


def run_http_case(case: Case, server: RunningServer) -> list[str]:
    """The differences of one http case. Raises ProgramError when the server gives no reply."""
    tokenizer = load_tokenizer(case.config["tokenizer"])
    return HttpRun(case.version, server, tokenizer.encode).run(case.input["steps"])
