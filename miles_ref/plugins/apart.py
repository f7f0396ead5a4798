"""Foreign asynchronous code, kept apart from who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from miles_ref.tasks import kept


async def run_apart(what: str, action: Coroutine[Any, Any, None], seconds: float) -> None:
    """Run `action` in a task of its own for at most `seconds`; `what` names it in errors.

    Raises what it raises; TimeoutError for one that is not done in time, which is cancelled, and left behind where it
    swallows that; RuntimeError for one that lets a CancelledError out though nobody cancelled it, as `await` of a task
    that it cancelled itself does. So a CancelledError from here is the caller's own, and `action` is cancelled by it.
    """
    task = kept(action)
    task.add_done_callback(_looked_at)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise late(what, seconds)
        if task.cancelled():
            raise RuntimeError(f"{what}: let a CancelledError out that nobody sent it: catch it where it awaits")
        task.result()
    finally:
        task.cancel()


def late(what: str, seconds: float) -> TimeoutError:
    """The error of what is not done in time."""
    return TimeoutError(f"{what}: not done after {seconds:g} s")


def _looked_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # of one that was left behind nobody asks
