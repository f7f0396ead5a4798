"""Tasks that go on whatever becomes of who started them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_kept: set[asyncio.Task[Any]] = set()


def kept(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of the running loop, held until it is done: the loop alone would let it be collected."""
    task = asyncio.get_running_loop().create_task(work)
    _kept.add(task)
    task.add_done_callback(_kept.discard)
    return task
