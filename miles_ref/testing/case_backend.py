"""The backend that a case's steps script: it answers what a step says, and keeps what it received (cases.md, http).

It runs on a thread's event loop, so that the runner can stay plain blocking code, and so that one implementation serves
a server in this process, one that we start, and one that was started against our address (`--backend-listen`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_ref.testing.backend import ScriptedBackend, ScriptedReply, SeenRequest
from miles_ref.testing.loop_thread import LoopThread

EXHAUSTED = {"error": "the case scripts no further backend reply for this step"}
"""Body of the 599 that an unexpected call gets."""

REPEATED = {
    "error": "the backend broke the connection once, as the case says, and got another request in the same step: "
    "nothing may be sent twice"
}
"""Body of the 599 that a call gets after a failing connection that was the step's last reply."""

FAILURES = {"connect": "before", "cut": "during"}
JSON_HEADERS = {"content-type": "application/json"}
SPECIAL_LOG_PROBS = {"-inf": float("-inf"), "inf": float("inf"), "nan": float("nan")}


@dataclass
class Exchange:
    """The backend's part in one step: replies to give, in order, and the requests that came. `failed`: the last reply
    that was given was a failing connection."""

    replies: list[Mapping[str, Any]]
    held: bool = False
    failed: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[ScriptedReply] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)


class CaseBackend:
    """A backend whose replies come from the exchanges that are open, the oldest unanswered one first."""

    def __init__(self, thread: LoopThread, port: int = 0) -> None:
        self._thread = thread
        self._open: list[Exchange] = []
        self._lock = threading.Lock()
        self._server = ScriptedBackend(self._reply_to)
        thread.run(self._server.start(port))
        self.url = self._server.url

    def close(self) -> None:
        """Stop listening and break what is open."""
        self._thread.run(self._server.stop())

    def begin(self, replies: Sequence[Mapping[str, Any]], *, held: bool = False) -> Exchange:
        """Open an exchange; the next requests get its replies. `held`: not before `release`."""
        exchange = Exchange(list(replies), held)
        with self._lock:
            self._open.append(exchange)
        return exchange

    def release(self, exchange: Exchange) -> None:
        """Let held replies go."""
        with self._lock:
            exchange.held = False
            waiting, exchange.waiting = exchange.waiting, []
        for reply in waiting:
            self._thread.loop.call_soon_threadsafe(reply.release)

    def end(self, exchange: Exchange) -> None:
        """Close an exchange: its unused replies are forgotten, what it holds is released."""
        with self._lock:
            if exchange in self._open:
                self._open.remove(exchange)
            self._server.seen.clear()
        self.release(exchange)

    def _reply_to(self, request: SeenRequest) -> ScriptedReply:
        with self._lock:
            exchange = next((one for one in self._open if one.replies), self._open[-1] if self._open else None)
            if exchange is None or not exchange.replies:
                repeated = exchange is not None and exchange.failed
                reply = ScriptedReply(REPEATED if repeated else EXHAUSTED, status=599)
            else:
                script = exchange.replies.pop(0)
                exchange.failed = "fail" in script
                reply = _reply(script)
            if exchange is not None:
                exchange.requests.append(_plain(request))
                reply.hold = exchange.held
                exchange.waiting.append(reply)
                exchange.arrived.set()
            return reply


def _reply(script: Mapping[str, Any]) -> ScriptedReply:
    if "fail" in script:
        return ScriptedReply(b'{"id": "cut in the middle', fail=FAILURES[script["fail"]])
    body = script.get("body")
    content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else _with_special_log_probs(body)
    return ScriptedReply(content, script.get("status", 200), script.get("headers") or JSON_HEADERS)


def _plain(request: SeenRequest) -> dict[str, Any]:
    try:
        body = request.json() if request.raw else None
    except ValueError:
        body = request.raw.decode("utf-8", "replace")
    return {"method": request.method, "path": request.path, "headers": dict(request.headers), "body": body}


def _with_special_log_probs(value: Any) -> Any:
    """`value` with the log probs "-inf", "inf" and "nan" as numbers, which a Python backend writes as bare words."""
    if isinstance(value, dict):
        return {
            key: [_special(entry) for entry in item]
            if key == "output_token_logprobs" and isinstance(item, list)
            else _with_special_log_probs(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_with_special_log_probs(item) for item in value]
    return value


def _special(entry: Any) -> Any:
    if isinstance(entry, list) and entry and isinstance(entry[0], str):
        return [SPECIAL_LOG_PROBS.get(entry[0], entry[0]), *entry[1:]]
    return entry
