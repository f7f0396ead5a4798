"""The built-in abort: ends this process's worker calls of a scope (agents.md, Abort)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from miles_ref.hookspecs import hookimpl


@hookimpl(tryfirst=True)
async def abort(scope: Callable[[], str | None] | str | None, every_scope: bool) -> None:
    """Cancel the in-flight worker calls of the scope, or all of them."""
    # By name: the agents' room is above this one, and most processes that load the plugins never call a worker.
    agents_abort = import_module("miles_ref.agents.abort")
    await agents_abort.abort_worker_calls(scope, every_scope)
