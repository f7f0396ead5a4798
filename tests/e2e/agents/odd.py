"""Agents that misbehave in ways that the shipped test agents do not."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from miles_ref.agents import InfraAbort, report_to_caller
from miles_ref.agents.framing import Frame, pack
from miles_ref.testing.agents import grandchild


class Odd(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


async def raises_oddly() -> None:
    raise Odd


def synchronous() -> int:
    return 1


async def cancels_itself() -> None:
    raise asyncio.CancelledError


async def returns_nan() -> float:
    return float("nan")


async def returns_odd_keys() -> dict[int, int]:
    return {1: 2}


async def reports_nan() -> None:
    report_to_caller([float("nan")])


async def leaves_by_sys_exit(code: int) -> None:
    sys.exit(code)


async def terminates_itself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()


async def leaves_a_task() -> str:
    began = asyncio.Event()

    async def work() -> None:
        report_to_caller("the task began")
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            report_to_caller("the task was cleaned up")

    left = asyncio.ensure_future(work())
    await began.wait()
    assert not left.done()
    return "done"


async def registers_at_exit(path: str) -> None:
    atexit.register(Path(path).write_text, "ran")


async def returns_deep(levels: int) -> Any:
    return deep(levels)


async def reports_deep(levels: int) -> None:
    report_to_caller(deep(levels))


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


async def reports_much_then_waits(size: int) -> None:
    report_to_caller("x" * size)
    await asyncio.Event().wait()


async def forges(kind: str, text: str, times: int = 1) -> None:
    """Write a frame of its own to the channel, of which the child's command line tells."""
    report_to_caller("before")
    os.write(int(sys.argv[2]), pack(Frame(kind.encode()), text.encode() * times))
    await asyncio.Event().wait()


async def leaves_tasks_of_which_two_interrupt() -> str:
    async def interrupts() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyboardInterrupt

    async def cleans_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(20):  # Once the others have long raised.
                await asyncio.sleep(0)
            report_to_caller("cleaned up")

    left = [asyncio.ensure_future(work()) for work in (cleans_up, interrupts, cleans_up, interrupts, cleans_up)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in left)
    return "done"


class Bare(InfraAbort):
    """Has neither reason nor exit status."""

    def __init__(self) -> None:
        Exception.__init__(self)


async def aborts_oddly(how: str) -> None:
    match how:
        case "reason":
            raise InfraAbort(Odd(), 7)  # type: ignore[arg-type]
        case "status":
            raise InfraAbort("SandboxLost", True)
        case "signal":
            raise InfraAbort("SandboxLost", signal.SIGTERM)
        case "attributes":
            raise Bare


async def forks_and_dies() -> None:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(RuntimeError):
            report_to_caller("a forked process must not report")
        time.sleep(3600)  # noqa: ASYNC251
    report_to_caller(pid)
    os._exit(4)


async def grandchild_then_waits() -> Any:
    import miles_ref.testing.agents as agents

    agents.report_to_caller = lambda item: None
    report_to_caller((await grandchild())["grandchild"])
    await asyncio.Event().wait()
