"""A call on a worker, as its caller makes it (agents.md, The caller's side).

`machine.CALLER_TABLE` says what each answer, or its absence, means for the call; this module makes the requests. A call
is in `IN_FLIGHT` from before its first await until it has ended, which is how an abort finds it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from miles_ref.agents.api import InfraAbort, WorkerRefusedError, WorkerReplyError
from miles_ref.agents.http_client import Reply, Unanswered, WorkerClient
from miles_ref.agents.machine import CALLER_TABLE, CallerEvent, CallerState, End, Machine, json_text, outcome_fault
from miles_ref.agents.settings import AgentSettings
from miles_ref.tasks import kept

logger = logging.getLogger("miles_ref.agents")

T = TypeVar("T")

IN_FLIGHT: dict[int, WorkerCall] = {}
"""The worker calls of this process that have not ended, by id()."""

_warned_of: set[str] = set()
"""Boot ids: another worker may come to stand at the same URL."""

_DEFAULT_RETRY_AFTER = 1.0
_LAST_POLL = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Content:
    """What is called. `env` has been through the rules of environment.py; `scope` None belongs to no scope."""

    fn: str
    kwargs: Mapping[str, Any]
    env: Mapping[str, str]
    scope: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call id at one boot of one worker."""

    url: str
    call_id: str
    boot_id: str

    @property
    def path(self) -> str:
        return f"{self.url}/calls/{self.call_id}"


class _Aborted(Exception):
    """Ends what is being waited for: the call was aborted."""


class WorkerCall:
    """One call. Made and run on one event loop; `abort` may be called from any."""

    def __init__(
        self,
        content: Content,
        settings: AgentSettings,
        *,
        token: str | None = None,
        on_report: Callable[[Any], None] | None = None,
    ) -> None:
        self.scope = content.scope
        self.url: str | None = None
        self.grace = settings.cancel_grace
        self._content = content
        self._settings = settings
        self._token = token
        self._on_report = on_report
        self._machine: Machine[CallerState, CallerEvent, End] = Machine(CALLER_TABLE, CallerState.FRESH)
        self._loop = asyncio.get_running_loop()
        # By URL: another one is made there only when the former was surely not admitted.
        self._attempts: dict[str, Attempt] = {}
        self._latest: Attempt | None = None
        self._received = 0
        self._answered_at = self._loop.time()
        self._pause = settings.first_pause
        self._aborted = asyncio.Event()
        self._deletes: asyncio.Task[None] | None = None

    async def run(self) -> dict[str, Any]:
        """Make the call; return its outcome (agents.md, Outcomes), once all reports were given to `on_report`.

        Raises InfraAbort (WorkerUnreachable, WorkerLost, WorkerCancelled; WorkerReplyError) and WorkerRefusedError. If
        the task that runs this is cancelled, the call is cancelled too, and CancelledError is raised once the reports
        of its cleanup are in, at most after the worker's grace; a second cancellation does not wait.
        """
        IN_FLIGHT[id(self)] = self
        try:
            drive = self._loop.create_task(self._drive())
            try:
                return await asyncio.shield(drive)
            except asyncio.CancelledError:
                await self._cancelled(drive)
                raise
        finally:
            IN_FLIGHT.pop(id(self), None)

    async def abort(self) -> None:
        """Cancel the call wherever it is; returns when every DELETE was answered or given up, not when it has ended."""
        if asyncio.get_running_loop() is self._loop:
            await asyncio.shield(self._begin_abort())
        elif self._loop.is_closed():  # Whoever ran it is gone: nobody polls, so the orphan timer ends it.
            IN_FLIGHT.pop(id(self), None)
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.abort(), self._loop))

    # --- abort -------------------------------------------------------------------------------------------------------

    def _begin_abort(self) -> asyncio.Task[None]:
        if self._deletes is None:
            attempts = [] if self._machine.state is CallerState.ENDED else list(self._attempts.values())
            self._machine.apply(CallerEvent.ABORT)
            self._answered_at = self._loop.time()
            self._pause = self._settings.first_pause
            self._aborted.set()
            self._deletes = kept(self._delete_all(attempts))
        return self._deletes

    async def _cancelled(self, drive: asyncio.Task[dict[str, Any]]) -> None:
        """The caller's own task was cancelled: wait for what the cleanup reports."""
        self._begin_abort()
        drive.add_done_callback(_consume)
        try:
            await asyncio.wait({drive}, timeout=self.grace)
        finally:
            drive.cancel()

    async def _delete_all(self, attempts: list[Attempt]) -> None:
        if attempts:
            async with self._client() as client:
                await asyncio.gather(*(self._delete(client, attempt) for attempt in attempts))

    async def _delete(self, client: WorkerClient, attempt: Attempt) -> None:
        """Repeat a DELETE until it is answered, within the window."""
        deadline = self._loop.time() + self._settings.window
        pause = self._settings.first_pause
        is_current = attempt is self._latest
        while (left := deadline - self._loop.time()) > 0:
            try:
                silence = self._settings.request_timeout
                reply = await client.ask("DELETE", attempt.path, silence=silence, first_byte=left)
            except Unanswered:
                pass
            else:
                if _is_final(reply):
                    if is_current:
                        self._answered_at = self._loop.time()
                    return
                if reply.status == 429:
                    pause = max(pause, self._retry_after(reply))
            await asyncio.sleep(min(pause, left))
            if is_current and self._machine.state is CallerState.ENDED:
                return
            pause = min(2 * pause, self._settings.longest_pause)
        logger.warning("DELETE of call %s at %s was given up: its orphan timer ends it", attempt.call_id, attempt.url)

    # --- the call ----------------------------------------------------------------------------------------------------

    def _client(self) -> WorkerClient:
        return WorkerClient(self._token, self._settings.connect_timeout)

    async def _drive(self) -> dict[str, Any]:
        async with self._client() as client:
            try:
                attempt = await self._admit(client)
            except _Aborted:
                if self._machine.state is CallerState.ENDED:
                    raise InfraAbort(End.CANCELLED.value) from None
                attempt = self._current()
            return await self._follow(client, attempt)

    def _current(self) -> Attempt:
        assert self._latest is not None
        return self._latest

    async def _admit(self, client: WorkerClient) -> Attempt:
        """Find a worker that takes the call. Raises _Aborted, InfraAbort and WorkerRefusedError."""
        body_tail = json_text({"fn": self._content.fn, "kwargs": self._content.kwargs, "env": dict(self._content.env),
                               "scope": self._content.scope})[1:]  # fmt: skip
        not_before: dict[str, float] = {}
        while True:
            for url in self._by_load():
                if not_before.get(url, 0.0) > self._loop.time():
                    continue
                self.url = url
                retry_after = await self._try_place(client, url, body_tail)
                if self._machine.state in (CallerState.ADMITTED, CallerState.CLOSING):
                    return self._current()
                if retry_after is not None:
                    not_before[url] = self._loop.time() + retry_after
            await self._wait_for_places(client, not_before)

    def _by_load(self) -> list[str]:
        """The workers' URLs, the one with the fewest calls of this process first."""
        load = dict.fromkeys(self._settings.worker_urls, 0)
        for call in list(IN_FLIGHT.values()):
            if call is not self and call.url in load:
                load[call.url] += 1
        return sorted(load, key=load.__getitem__)

    async def _wait_for_places(self, client: WorkerClient, not_before: Mapping[str, float]) -> None:
        """Every worker has surely not admitted the call: wait before the next round."""
        now = self._loop.time()
        if all(not_before.get(url, 0.0) > now for url in self._settings.worker_urls):
            await self._unless_aborted(asyncio.sleep(min(not_before.values()) - now))
        else:
            await self._check_window(client)
            await self._rest(at_most=min((time - now for time in not_before.values() if time > now), default=math.inf))

    async def _try_place(self, client: WorkerClient, url: str, body_tail: bytes) -> float | None:
        """Submit to one worker until it is sure what became of it. Returns what Retry-After asks for, if it is full."""
        health = await self._health(client, url)
        if health is None:
            return None
        if health.status == 429:
            return self._retry_after(health)
        attempt = self._latest = self._attempts[url] = Attempt(url, secrets.token_urlsafe(16), health.boot_id)
        head = json_text({"call_id": attempt.call_id, "boot_id": attempt.boot_id})[:-1]
        while True:
            retry_after = await self._submit(client, attempt, head + b"," + body_tail)
            if self._machine.state is not CallerState.UNSURE:
                return retry_after
            if retry_after is not None:
                await self._unless_aborted(asyncio.sleep(retry_after))
            else:
                await self._check_window(client)
                await self._rest()

    async def _health(self, client: WorkerClient, url: str) -> Reply | None:
        """GET /health: its 200 or 429, or None if the worker takes no calls now."""
        try:
            reply = await self._unless_aborted(
                client.ask("GET", f"{url}/health", silence=self._settings.request_timeout, first_byte=self._left())
            )
        except Unanswered:
            self._apply(CallerEvent.NO_ANSWER)
            return None
        if reply.status == 429:
            self._note_answer(reply)
            return reply
        if not _is_final(reply) or reply.body.get("draining"):
            self._apply(CallerEvent.NOT_ADMITTED)
            return None
        if reply.status != 200:
            self._apply(CallerEvent.MISCONFIGURED, reply)
        self.grace = _number(reply.body.get("cancel_grace"), self.grace)
        orphan_timeout = _number(reply.body.get("orphan_timeout"), float("inf"))
        if orphan_timeout <= self._settings.window and reply.boot_id not in _warned_of:
            _warned_of.add(reply.boot_id)
            logger.warning(
                "the worker %s cancels calls after %g s without a poll (--orphan-timeout), but this caller goes on for "
                "%g s while it is out of reach: make its orphan timeout longer",
                url,
                orphan_timeout,
                self._settings.window,
            )
        self._note_answer(reply)
        return reply

    async def _submit(self, client: WorkerClient, attempt: Attempt, body: bytes) -> float | None:
        """Send the submit once, and move by what is proved. Returns what Retry-After asks for, if it is full."""
        self._apply(CallerEvent.SUBMIT_SENT)
        try:
            reply = await self._unless_aborted(
                client.ask(
                    "POST",
                    f"{attempt.url}/calls",
                    body=body,
                    silence=self._settings.request_timeout,
                    first_byte=self._left(),
                )
            )
        except Unanswered as exc:
            self._apply(CallerEvent.NO_ANSWER if exc.sent else CallerEvent.NOT_ADMITTED)
            return None
        self._note_answer(reply)
        self._apply(_submit_event(reply, attempt), reply)
        return self._retry_after(reply) if reply.status == 429 else None

    async def _follow(self, client: WorkerClient, attempt: Attempt) -> dict[str, Any]:
        """Poll until the outcome is here."""
        while True:
            try:
                outcome = await self._poll_or_rest(client, attempt)
            except _Aborted:
                continue
            if outcome is not None:
                return outcome

    async def _poll_or_rest(self, client: WorkerClient, attempt: Attempt) -> dict[str, Any] | None:
        try:
            return await self._poll(client, attempt, self._settings.held_wait)
        except Unanswered:
            self._apply(CallerEvent.NO_ANSWER)
        if self._is_window_over() and self._machine.state is not CallerState.CLOSING:
            # It may be this process that stood still, while the worker answered: it is asked once more.
            with suppress(Unanswered):
                return await self._poll(client, attempt, 0.0, at_least=_LAST_POLL)
        await self._check_window(client)
        await self._rest()
        return None

    async def _poll(
        self, client: WorkerClient, attempt: Attempt, wait: float, at_least: float = 0.0
    ) -> dict[str, Any] | None:
        """One poll, held for `wait` seconds; its answer may come within `at_least`, also past the window."""
        closing = self._machine.state is CallerState.CLOSING
        url = f"{attempt.path}?after={self._received}&wait={wait:g}{'&cancel=1' if closing else ''}"
        reply = await client.ask(
            "GET",
            url,
            silence=wait + self._settings.poll_margin,
            first_byte=max(self._left(), at_least),
            within=None if closing else self._unless_aborted,
        )
        if reply.status == 429 and reply.boot_id == attempt.boot_id:
            self._note_answer(reply)
            await self._sleep(self._retry_after(reply))
            return None
        if reply.status != 429 and not _is_final(reply):
            raise Unanswered(f"status {reply.status}", sent=True)
        self._note_answer(reply)
        if reply.status != 200 or reply.boot_id != attempt.boot_id:
            self._apply(_poll_event(reply, attempt), reply)
            return None
        return self._take(reply.body)

    def _take(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Give the reports to the caller, once each and in order; return the outcome if it is there."""
        reports, outcome = body.get("reports"), body.get("outcome")
        if not isinstance(reports, list) or body.get("next") != self._received + len(reports):
            raise Unanswered("a poll's reply does not follow the reports that are here", sent=True)
        for item in reports:
            self._received += 1
            deliver(self._on_report, item)
        if outcome is None:
            return None
        self._apply(CallerEvent.OUTCOME)
        fault = outcome_fault(outcome)
        if fault is not None:
            raise WorkerReplyError(fault, self.url or "")
        return dict(outcome)

    # --- small steps -------------------------------------------------------------------------------------------------

    def _apply(self, event: CallerEvent, reply: Reply | None = None) -> None:
        """Move the machine; raise what the call ends with, unless that is its outcome."""
        for end in self._machine.apply(event):
            if end is End.MISCONFIGURED and reply is not None:
                reason = f"{reply.status} {reply.code}: {reply.body.get('error')}"
                raise WorkerRefusedError(
                    f"the worker {self.url} refused the call with {reason}",
                    url=self.url or "",
                    status=reply.status,
                    code=reply.code,
                )
            if end is not End.OUTCOME:
                raise InfraAbort(end.value)

    def _note_answer(self, reply: Reply) -> None:
        if _is_final(reply) or reply.status == 429:
            # The time that a full worker asks for is not the window's.
            asked = self._retry_after(reply) if reply.status == 429 else 0.0
            self._answered_at = max(self._answered_at, self._loop.time() + asked)
            self._pause = self._settings.first_pause

    def _left(self) -> float:
        """Seconds until the window is over, from the last answered request on."""
        return max(0.001, self._answered_at + self._settings.window - self._loop.time())

    def _is_window_over(self) -> bool:
        return self._loop.time() >= self._answered_at + self._settings.window

    async def _check_window(self, client: WorkerClient) -> None:
        """End the call if nothing has answered within the window; a worker that may run it is told, once."""
        if not self._is_window_over():
            return
        may_run = self._machine.state in (CallerState.UNSURE, CallerState.ADMITTED)
        try:
            self._apply(CallerEvent.WINDOW_OVER)
        except InfraAbort:
            if may_run:
                await self._say_farewell(client)
            raise

    async def _say_farewell(self, client: WorkerClient) -> None:
        brief = min(self._settings.request_timeout, self._settings.connect_timeout)
        try:
            await client.ask("DELETE", self._current().path, silence=brief, first_byte=brief)
        except Unanswered as exc:
            logger.info("the last DELETE of a call to %s was not answered either: %s", self.url, exc)

    async def _rest(self, at_most: float = math.inf) -> None:
        """Pause before a repeat, twice as long each time, but `at_most` so many seconds."""
        pause, self._pause = min(self._pause, at_most), min(2 * self._pause, self._settings.longest_pause)
        await self._sleep(pause)

    async def _sleep(self, seconds: float) -> None:
        """Sleep; a call that is not closing yet stops when it is aborted, by _Aborted."""
        if self._machine.state is CallerState.CLOSING:
            await asyncio.sleep(seconds)
        else:
            await self._unless_aborted(asyncio.sleep(seconds))

    def _retry_after(self, reply: Reply) -> float:
        asked = _DEFAULT_RETRY_AFTER if reply.retry_after is None else reply.retry_after
        return max(asked, self._settings.first_pause)

    async def _unless_aborted(self, action: Awaitable[T]) -> T:
        """Await `action`, but close it and raise _Aborted as soon as the call is aborted."""
        task = asyncio.ensure_future(action)
        stop = asyncio.ensure_future(self._aborted.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if self._aborted.is_set():
                raise _Aborted
            return task.result()
        finally:
            stop.cancel()
            task.cancel()
            task.add_done_callback(_consume)


def deliver(on_report: Callable[[Any], None] | None, item: Any) -> None:
    """Give one reported item to the caller; an exception of its own does not end the call."""
    if on_report is None:
        return
    try:
        on_report(item)
    except (Exception, asyncio.CancelledError):  # a cancelled future's result() raises the latter
        logger.exception("on_report raised; the call goes on")


def _consume(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _is_final(reply: Reply) -> bool:
    """Whether a reply asks for no repeat of its request, as 429 and 5xx do, and 408, which is a slow connection."""
    return reply.status < 500 and reply.status not in (408, 429)


def _submit_event(reply: Reply, attempt: Attempt) -> CallerEvent:
    if reply.boot_id != attempt.boot_id or reply.status == 412:
        return CallerEvent.REBOOTED
    if reply.status == 200:
        return CallerEvent.ACCEPTED
    if reply.status in (429, 503):
        return CallerEvent.NOT_ADMITTED
    if not _is_final(reply):
        return CallerEvent.NO_ANSWER
    if reply.status == 410:
        return {"tombstone": CallerEvent.TOMBSTONED, "cancelled": CallerEvent.CANCELLED}.get(
            reply.code, CallerEvent.GONE
        )
    return CallerEvent.MISCONFIGURED


def _poll_event(reply: Reply, attempt: Attempt) -> CallerEvent:
    if reply.boot_id != attempt.boot_id:
        return CallerEvent.REBOOTED
    if reply.status == 410 and reply.code == "tombstone":
        return CallerEvent.TOMBSTONED
    if reply.status in (404, 410):
        return CallerEvent.GONE
    return CallerEvent.MISCONFIGURED


def _number(value: Any, default: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    try:
        number = float(value)
    except OverflowError:
        return default
    return number if math.isfinite(number) and number >= 0 else default
