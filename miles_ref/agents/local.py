"""A call in a child process of this process: mode subproc (agents.md, The child process)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from miles_ref.agents.child import Child, ChildSpec, request_frame
from miles_ref.agents.client import deliver
from miles_ref.agents.framing import read_json
from miles_ref.agents.machine import LINGER_SECONDS, LIVE, Action, Call, State
from miles_ref.agents.starts import Start, starts

logger = logging.getLogger("miles_ref.agents")


class LocalCall:
    """One call; listens to its child, and is timed and cancelled by the same life cycle as on a worker."""

    def __init__(
        self,
        fn: str,
        kwargs: Mapping[str, Any],
        env: Mapping[str, str],
        *,
        cancel_grace: float,
        on_report: Callable[[Any], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        spec = ChildSpec(request_frame(fn, kwargs), env)
        self._on_report = on_report
        self._call = Call({State.CANCELLING: cancel_grace, State.ENDING: LINGER_SECONDS})
        self._ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._child: Child | None = None
        self._outcome: dict[str, Any] | None = None
        self._start = Start(lambda: self._spawn(spec))

    @property
    def pid(self) -> int | None:
        """The child's process id while it lives."""
        return self._child.pid if self._child is not None and self._call.state in LIVE else None

    async def run(self) -> dict[str, Any]:
        """Run the child to its end; return the outcome (agents.md, Outcomes).

        If the task that runs this is cancelled, so is the child, and CancelledError is raised when it has ended, at
        most after the grace; a second cancellation kills it.
        """
        self._do(self._call.submit(self._loop.time()))
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self._do(self._call.cancel("caller", self._loop.time()))
            await self._ended.wait()
            raise
        finally:
            self._start.withdraw()
            if self._child is not None:
                self._child.abandon()
        assert self._outcome is not None
        return self._outcome

    # --- the child's listener ----------------------------------------------------------------------------------------

    def started(self) -> None:
        self._do(self._call.started(self._loop.time()))
        self._start.ready()

    def reported(self, text: bytes, item: Any) -> None:
        deliver(self._on_report, item)

    def outcome_read(self, text: bytes) -> None:
        self._do(self._call.outcome_read(text, self._loop.time()))

    def gone(self, exit_status: int | None, reason: str = "ChildExited") -> None:
        self._do(self._call.gone(exit_status, self._loop.time(), reason))
        self._outcome = read_json(self._call.outcome or b"null")
        self._ended.set()
        self._start.ready()  # Last: it starts other calls.

    # --- carrying out ------------------------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if action is Action.SPAWN:
                starts().ask(self._start)
            elif action in (Action.SIGTERM, Action.SIGKILL):
                self._signal(action)
        self._set_timer()

    def _signal(self, action: Action) -> None:
        if self._child is None:
            self._start.withdraw()
            self.gone(None)
        elif action is Action.SIGTERM:
            self._child.terminate()
        else:
            self._child.kill()

    def _spawn(self, spec: ChildSpec) -> None:
        try:
            self._child = Child(spec, self)
        except OSError as exc:
            logger.error("no child process could be made for an agent call: %s", exc.strerror)
            self.gone(None, reason="SpawnFailed")

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._call.state in LIVE and self._call.deadline is not None:
            self._timer = self._loop.call_at(self._call.deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._do(self._call.tick(self._loop.time()))
