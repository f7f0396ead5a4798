"""Starts child processes a few at a time.

A parent is suspended until its new child has loaded the interpreter, and that takes long while hundreds of others load
theirs: with all of them started at once, the event loop would stand still for seconds.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

HELD_SECONDS = 0.5
"""How long a child that does not get ready keeps others from starting: an endless import must not."""


class Start:
    """One child to be started. `action` starts it, on the event loop, and must not raise."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._starts: Starts | None = None
        self._timer: asyncio.TimerHandle | None = None

    def withdraw(self) -> bool:
        """Do not start it. False if that was done already."""
        return self._starts is not None and self._starts.forget(self)

    def ready(self) -> None:
        """The child runs its function, or has ended: the next one may start. May be told again."""
        if self._timer is not None and self._starts is not None:
            self._timer.cancel()
            self._timer = None
            self._starts.leave()

    def wait_in(self, starts: Starts) -> None:
        """Note where it waits."""
        self._starts = starts

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the child."""
        assert self._action is not None
        self._timer = loop.call_later(HELD_SECONDS, self.ready)
        # Let go of: it holds the call's arguments, which are not to be kept as long as the child runs.
        action, self._action = self._action, None
        action()


class Starts:
    """The children of one event loop that are to start. `at_once` of them load at the same time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, at_once: int | None = None) -> None:
        self._loop = loop
        self._free = at_once or 2 * (os.cpu_count() or 1)
        self._waiting: deque[Start] = deque()
        self._filling = False

    def ask(self, start: Start) -> None:
        """Start the child now, or as soon as others are ready."""
        start.wait_in(self)
        self._waiting.append(start)
        self._fill()

    def forget(self, start: Start) -> bool:
        """Forget a start that waits; whether it did."""
        if start not in self._waiting:
            return False
        self._waiting.remove(start)
        return True

    def leave(self) -> None:
        """A child that was loading is ready."""
        self._free += 1
        self._fill()

    def _fill(self) -> None:
        # A start that fails is ready while it is run, and comes here again. The loop that runs it goes on instead: with
        # a call inside a call for each of them, many that fail in a row would reach the recursion limit.
        if self._filling:
            return
        self._filling = True
        try:
            while self._free and self._waiting:
                self._free -= 1
                self._waiting.popleft().run(self._loop)
        finally:
            self._filling = False


_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Starts] = WeakKeyDictionary()


def starts() -> Starts:
    """The starts of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _of_loop:
        _of_loop[loop] = Starts(loop)
    return _of_loop[loop]
