"""Ending a rollout's agent calls before their time (agents.md, Abort)."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
from types import ModuleType
from typing import Any

from miles_ref.agents.abort import call_agent_abort_hook
from miles_ref.driver.settings import AgentFunction, agent_function, rollout_scope
from miles_ref.errors import described
from miles_ref.plugins.apart import run_apart
from miles_ref.plugins.pipeline import ABORT_SECONDS

logger = logging.getLogger("miles_ref.driver")


async def abort_rollout(args: Any, *, every_scope: bool = False) -> None:
    """End the agent calls of one rollout, or of all; returns when that was asked for, not when they have ended.

    `args` is a DriverSettings, or any object with its attributes for router and agent function.

    Oversampling, once enough samples are there: `await abort_rollout(args)` ends the calls of this rollout's router,
    the scope `ip:port`; evaluation has a router of its own and goes on. A hot-restart takeover ends all that this
    process holds: `await abort_rollout(args, every_scope=True)`.

    The hook `abort` comes first (built-in, then plugins), then the agent module's own `abort(args)`, if it has one,
    sync or async. Each has `ABORT_SECONDS`. All run; what they raise is raised together afterwards, as an
    ExceptionGroup.
    """
    errors: list[Exception] = []
    try:
        await call_agent_abort_hook(lambda: rollout_scope(args), every_scope)
    except ExceptionGroup as group:
        errors.extend(group.exceptions)
    except Exception as error:
        errors.append(error)
    try:
        await run_apart("the agent module's own abort", _agents_own_abort(args), ABORT_SECONDS)
    except Exception as error:
        errors.append(error)
    if errors:
        raise ExceptionGroup("not every abort succeeded", errors)


async def _agents_own_abort(args: Any) -> None:
    try:
        own = getattr(_agent_module(agent_function(args)), "abort", None)
        if not callable(own):
            return
        pending = own(args)
        if inspect.isawaitable(pending):
            await pending
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # such as SystemExit: the agent module's code must not end the driver
        raise RuntimeError(f"the agent module's own abort raised {described(error)}") from error


def _agent_module(function: str | AgentFunction | None) -> ModuleType | None:
    """The agent function's module; None where it is not installed, as on a host whose agents run on workers."""
    if function is None:
        return None
    try:
        return importlib.import_module(_module_name(function))
    except ModuleNotFoundError as error:
        logger.info("no abort of the agent's own: %s", error)
        return None


def _module_name(function: str | AgentFunction) -> str:
    if not isinstance(function, str):
        return function.__module__
    module, colon, _ = function.partition(":")
    return module if colon else function.rpartition(".")[0]
