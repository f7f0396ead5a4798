"""The built-in abort of agent calls, and the way to the hook `abort` (agents.md, Abort)."""

from __future__ import annotations

import asyncio
import logging

from miles_ref.agents.client import IN_FLIGHT, WorkerCall
from miles_ref.plugins import Pipeline
from miles_ref.plugins.guarded import Scope

logger = logging.getLogger("miles_ref.agents")


async def abort_worker_calls(scope: Scope, every_scope: bool = False) -> None:
    """Cancel this process's worker calls of one scope, or all of them; every other call goes on.

    Takes the calls that are in flight now. A lazy scope is evaluated only if there are any, and not with
    `every_scope`. A null scope matches nothing. Returns when every DELETE was answered or given up. Raises ValueError
    for an empty scope and TypeError for what is no string, also with `every_scope`, and whatever a lazy scope raises.
    """
    if not callable(scope):
        _check(scope)
    calls = list(IN_FLIGHT.values())
    if not every_scope and (calls or not callable(scope)):
        calls = _of_scope(calls, scope)
    await asyncio.gather(*(call.abort() for call in calls))


async def call_agent_abort_hook(scope: Scope, every_scope: bool = False) -> None:
    """Call every implementation of the hook `abort`, the built-in first (agents.md, Abort).

    All run, whichever of them raise; their exceptions are raised together afterwards, in an ExceptionGroup.
    """
    await Pipeline(installed_aborts=True).abort(scope, every_scope)


def _of_scope(calls: list[WorkerCall], scope: Scope) -> list[WorkerCall]:
    value = scope() if callable(scope) else scope
    _check(value)
    if value is None:
        logger.warning("an abort without a scope matches no call: give the router's ip:port, or every_scope=True")
        return []
    return [call for call in calls if call.scope == value]


def _check(scope: object) -> None:
    if scope == "":
        raise ValueError("the scope of an abort is an empty string: give the router's ip:port, or every_scope=True")
    if scope is not None and not isinstance(scope, str):
        raise TypeError(f"the scope of an abort must be a string or None, not {type(scope).__name__}")
