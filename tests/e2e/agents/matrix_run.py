"""Runs one cell of the abort matrix against real workers, through a proxy that loses what the cell says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from miles_ref.agents import AgentSettings, InfraAbort, call_agent_abort_hook, call_agent_function
from miles_ref.process import ReadyProcess
from tests.e2e.agents.gate import Gate
from tests.e2e.agents.matrix import CANCELLED_ERROR, AbortScope, Caller, CallScope, Cell, Delete, Expected, Moment
from tests.e2e.agents.proxy import Proxy, hold, hold_reply, lose_request
from tests.e2e.agents.support import shorten_window, worker_process
from tests.e2e.agents.witness import Witnesses

OWN = "10.0.0.1:30000"
ABORTS = {AbortScope.OWN: OWN, AbortScope.ANOTHER: "10.0.0.1:3000", AbortScope.NULL: None, AbortScope.EVERY: OWN}

GATED = "tests.e2e.agents.gated:"
AGENTS = {
    Moment.SUBMITTING: GATED + "waits",
    Moment.HELD: GATED + "waits",
    Moment.IMPORTING: "tests.e2e.agents.gated_import:returns",
    Moment.RUNNING: GATED + "waits",
    Moment.BLOCKED: GATED + "blocks",
    Moment.REPORTING: GATED + "reports",
    Moment.CLEANUP: GATED + "cleans_slowly",
    Moment.UNFETCHED: GATED + "returns",
    Moment.LOST: GATED + "waits",
}

SHORT_WINDOW = 1.0
LONG_WINDOW = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a cell showed."""

    outcome: str
    child_gone: bool
    reports: list[Any]
    witnesses: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextlib.contextmanager
def worker(orphan_timeout: float) -> Iterator[ReadyProcess]:
    """A worker for cells; the short orphan timeout is for those whose DELETE is lost."""
    with worker_process("--cancel-grace", "60", "--orphan-timeout", str(orphan_timeout)) as process:
        yield process


@dataclass(slots=True)
class Workers:
    """The workers that cells share, and the calls on the steady one that none of them may touch."""

    steady: str
    impatient: str
    witnesses: Witnesses


@contextlib.asynccontextmanager
async def workers() -> AsyncIterator[Workers]:
    """A worker that waits long for polls, and one that ends orphans soon, for cells of one event loop."""
    with worker(120) as steady, worker(2) as impatient:
        shared = Workers(steady.url, impatient.url, Witnesses(steady.url))
        try:
            yield shared
        finally:
            await shared.witnesses.end()


class CellRun:
    """One cell, from the call to the end of everything that it started."""

    def __init__(self, cell: Cell, proxy: Proxy, gate: Gate, url: str) -> None:
        self.cell = cell
        self.reports: list[Any] = []
        self._proxy = proxy
        self._gate = gate
        self._url = url
        self._release = asyncio.Event()
        self._reported = asyncio.Event()
        self._pid: int | None = None
        self._opening: asyncio.Task[None] | None = None
        # Through the proxy a poll is held to its end, also one that the caller has left: it counts as polling.
        self._settings = AgentSettings(worker_urls=(proxy.url,), window=LONG_WINDOW, poll_wait=SHORT_WINDOW / 2)

    def start(self) -> asyncio.Task[str]:
        """Make the call."""
        return asyncio.create_task(self._call(), name=self.cell.id)

    def set_window(self) -> None:
        """A worker that is out of reach from here on is soon given up.

        Not before: however slow everything else is, the call must get to where the abort is to find it.
        """
        if self.cell.delete is Delete.LOST or self.cell.moment is Moment.LOST:
            shorten_window(self._settings, SHORT_WINDOW)

    async def _call(self) -> str:
        scope = OWN if self.cell.call is CallScope.SET else None
        try:
            return "ok" if await self._made(scope) == "done" else "another value"
        except InfraAbort as exc:
            return exc.reason

    async def _made(self, scope: str | None) -> Any:
        return await call_agent_function(
            AGENTS[self.cell.moment],
            mode="worker",
            on_report=self._on_report,
            scope=scope,
            env={"AGENT_GATE_PORT": str(self._gate.port)},
            settings=self._settings,
        )

    def _on_report(self, item: Any) -> None:
        self.reports.append(item)
        self._reported.set()

    def prepare(self) -> None:
        """Tell the proxy what the moment needs."""
        match self.cell.moment:
            case Moment.SUBMITTING:
                self._proxy.on("POST", "/calls", hold_reply(self._release))
            case Moment.HELD:
                self._proxy.on("POST", "/calls", hold(self._release))
            case Moment.UNFETCHED:
                self._proxy.on("GET", "/calls/", hold_reply(self._release))

    async def reach_moment(self) -> None:
        """Wait until the call is where the abort is to find it."""
        match self.cell.moment:
            case Moment.SUBMITTING:
                await self._proxy.saw_answer("POST", "/calls")
            case Moment.HELD:
                await self._proxy.saw("POST", "/calls")
                return
            case Moment.IMPORTING:
                await self._gate.reached()
                await self._proxy.saw("GET", "/calls/")
            case Moment.UNFETCHED:
                await self._proxy.saw_answer("GET", "/calls/")
            case Moment.CLEANUP:
                await self._reported.wait()
                await self._delete_directly()
                await self._gate.reached()
            case _:
                await self._reported.wait()
        self._pid = (await self._listed()).get("pid")

    def set_delete(self) -> None:
        """Tell the proxy what becomes of the DELETE."""
        match self.cell.delete:
            case Delete.LOST:
                self._proxy.on("DELETE", "/calls/", lose_request)
                self._proxy.on("GET", "cancel=1", lose_request)
            case Delete.ARRIVES if self.cell.moment is Moment.HELD and self.cell.deleted:
                arrived = asyncio.Event()
                self._proxy.on("DELETE", "/calls/", hold(arrived))
                self._proxy.on("GET", "cancel=1", hold(arrived))
                self._release.set()
                self._opening = asyncio.create_task(self._after_submit(arrived))
            case _:
                if self.cell.moment is Moment.UNFETCHED:
                    self._proxy.on("GET", "cancel=1", hold_reply(_opened()))

    async def _after_submit(self, arrived: asyncio.Event) -> None:
        await self._proxy.saw_answer("POST", "/calls")
        arrived.set()

    async def let_go(self) -> None:
        """After the abort: whatever was held goes on."""
        lost_submit = self.cell.moment is Moment.HELD and self.cell.delete is Delete.LOST
        if self.cell.delete is Delete.OVERTAKES:
            await self._proxy.saw_answer("DELETE", "/calls/")
        if not lost_submit:
            self._release.set()
        if not self.cell.deleted or self.cell.moment is Moment.CLEANUP:
            self._gate.open()

    async def child_gone(self) -> bool:
        """Whether nothing of the call runs any more, after a bounded wait for what the worker still has to end."""
        self._release.set()
        if self.cell.moment is Moment.LOST:
            return await _ends(self._pid)
        if self.cell.moment is Moment.HELD:
            await self._proxy.saw_answer("POST", "/calls")
        for _ in range(600):
            if (await self._listed()).get("state", "finished") == "finished":
                return self._pid is None or not _lives(self._pid)
            await asyncio.sleep(0.1)
        return False

    async def _listed(self) -> dict[str, Any]:
        """The call's row in GET /calls of the worker, asked without the proxy; empty if it is not known."""
        call_id = json.loads((await self._proxy.saw("POST", "/calls")).body)["call_id"]
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/calls") as reply:
            rows = (await reply.json())["calls"]
        return next((row for row in rows if row["call_id"] == call_id), {})

    async def _delete_directly(self) -> None:
        call_id = json.loads((await self._proxy.saw("POST", "/calls")).body)["call_id"]
        async with aiohttp.ClientSession() as session, session.delete(f"{self._url}/calls/{call_id}") as reply:
            assert reply.status == 202


async def run_cell(cell: Cell, shared: Workers) -> Result:
    """Run one possible cell."""
    with contextlib.ExitStack() as stack:
        doomed = None
        url = shared.impatient if cell.delete is Delete.LOST else shared.steady
        if cell.moment is Moment.LOST:
            doomed = stack.enter_context(worker(120))
            url = doomed.url
        await shared.witnesses.gather_for(cell)
        async with Gate() as gate, Proxy(url) as proxy:
            run = CellRun(cell, proxy, gate, url)
            run.prepare()
            call = run.start()
            await _unless_over(call, run.reach_moment())
            run.set_window()
            if doomed is not None:
                os.killpg(doomed.pid, signal.SIGKILL)
            run.set_delete()
            abort = asyncio.create_task(call_agent_abort_hook(ABORTS[cell.abort], cell.abort is AbortScope.EVERY))
            await asyncio.sleep(0)
            if cell.caller is Caller.CANCELLED:
                call.cancel()
            await run.let_go()
            outcome = await _outcome(call)
            await abort
            gone = await run.child_gone()
            return Result(outcome, gone, run.reports, await shared.witnesses.say(cell))


async def _unless_over(call: asyncio.Task[str], moment: Coroutine[Any, Any, None]) -> None:
    """Wait for a moment. Raises AssertionError for a call that ends before it, with what it ended with."""
    reaching = asyncio.create_task(moment)
    await asyncio.wait({call, reaching}, return_when=asyncio.FIRST_COMPLETED)
    if not reaching.done():
        reaching.cancel()
        raise AssertionError(f"the call was over before its moment: {await _outcome(call)}")
    await reaching


async def _outcome(call: asyncio.Task[str]) -> str:
    try:
        return await call
    except asyncio.CancelledError:
        return CANCELLED_ERROR


def _opened() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return True


async def _ends(pid: int | None) -> bool:
    """Whether the process ends by itself, as its guardian has promised, within a bounded time."""
    assert pid is not None
    for _ in range(200):
        if not _lives(pid):
            return True
        await asyncio.sleep(0.05)
    return False


def complaints(cell: Cell, wanted: Expected, result: Result) -> list[str]:
    """What is wrong with a result; empty if it is as expected."""
    wrong = []
    if result.outcome != wanted.outcome:
        wrong.append(f"outcome {result.outcome}, expected {wanted.outcome}")
    if not result.child_gone:
        wrong.append("the child lives")
    if any(witness != "ok" for witness in result.witnesses):
        wrong.append(f"calls of other scopes ended with {result.witnesses}")
    if not reports_good(cell, wanted, result.reports):
        wrong.append(f"reports {result.reports}, expected {wanted.reports}")
    return wrong


def reports_good(cell: Cell, wanted: Expected, reports: list[Any]) -> bool:
    """Whether the reports are in order, none twice, and as complete as expected."""
    cleanup = ["cleanup 1", "cleanup 2"]
    cancelled = cell.deleted or cell.moment is Moment.CLEANUP
    if cell.moment is Moment.REPORTING:
        numbers = [item for item in reports[1:] if isinstance(item, int)]
        tail = cleanup if cancelled and wanted.reports == "all" else []
        return reports == ["started", *range(len(numbers)), *tail]
    if cell.moment in (Moment.SUBMITTING, Moment.HELD) and cancelled:
        # The cancel may come before the agent begins: then nothing, else everything, was reported.
        return reports in ([], ["started", *cleanup]) if wanted.reports == "all" else reports == []
    if cell.moment is Moment.IMPORTING:
        return reports == ([] if cancelled else ["started"])
    if cell.moment is Moment.UNFETCHED:
        return reports == ([] if wanted.reports == "before" else ["started"])
    full = ["started", *cleanup] if cancelled else ["started"]
    return reports == (full if wanted.reports == "all" else ["started"])
