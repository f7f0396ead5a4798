"""`call_agent_function`: one agent call, inline, in a child process, or on a worker (agents.md)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from miles_ref.agents.api import AgentFunctionError, InfraAbort, check_json, reporting_to
from miles_ref.agents.client import Content, WorkerCall, deliver
from miles_ref.agents.environment import child_environment, sendable, travelling_environment
from miles_ref.agents.functions import function_path, resolve
from miles_ref.agents.local import LocalCall
from miles_ref.agents.settings import AgentSettings, Mode, check_mode, read_token
from miles_ref.errors import UsageError

logger = logging.getLogger("miles_ref.agents")

_warned: set[str] = set()


async def call_agent_function(
    fn: str | Callable[..., Any],
    *,
    mode: str = Mode.INLINE,
    kwargs: Mapping[str, Any] | None = None,
    on_report: Callable[[Any], None] | None = None,
    scope: str | None = None,
    env: Mapping[str, str] | None = None,
    settings: AgentSettings | None = None,
) -> Any:
    """Call an agent function and return its value (agents.md).

    - `fn`: `module:qualname`, or the function itself. `kwargs`: its keyword arguments; JSON unless mode is inline, else
      TypeError or ValueError.
    - `mode`: inline, subproc or worker. `on_report(item)`: called on this event loop, once for each report, in order.
    - `scope`: the abort scope of a worker call, the router's `ip:port`; None belongs to none.
    - `env`: variables for the call's process, over those that the rules choose; not with mode inline.

    Raises the agent's own exception (inline) or AgentFunctionError (subproc, worker) for an agent's error; InfraAbort
    if the infrastructure failed or the call was aborted, with its subclass WorkerReplyError for a worker that answers
    otherwise than it must; WorkerRefusedError and UsageError for a configuration that cannot work; CancelledError,
    after the agent's cleanup, if the calling task is cancelled.
    """
    settings = settings or AgentSettings()
    arguments = dict(kwargs or {})
    check_mode(mode, settings)
    if mode == Mode.INLINE:
        return await _inline(fn, arguments, on_report, env)
    check_json(arguments)
    if mode == Mode.SUBPROC:
        return settle(await _subproc(fn, arguments, on_report, env, settings))
    return settle(await _worker(fn, arguments, on_report, scope, env, settings))


def settle(outcome: Mapping[str, Any]) -> Any:
    """The value of an outcome, or the error that it is (agents.md, Outcomes)."""
    match outcome["kind"]:
        case "ok":
            return outcome["value"]
        case "error":
            raise AgentFunctionError(outcome["phase"], outcome["type"], outcome["message"], outcome["traceback"])
        case "infra_abort":
            raise InfraAbort(outcome["reason"], outcome["exit_status"])
        case "cancelled":
            raise InfraAbort("WorkerCancelled", outcome["exit_status"])
        case kind:
            raise ValueError(f"there is no outcome of kind {kind!r}")


async def _inline(
    fn: str | Callable[..., Any],
    kwargs: dict[str, Any],
    on_report: Callable[[Any], None] | None,
    env: Mapping[str, str] | None,
) -> Any:
    if env:
        raise UsageError("an inline agent runs in this process, whose environment is no call's: use mode subproc")
    function = resolve(function_path(fn)) if isinstance(fn, str) else fn
    task = asyncio.current_task()
    cancels = 0 if task is None else task.cancelling()
    with reporting_to(lambda item: deliver(on_report, json.loads(item))):
        try:
            return await function(**kwargs)
        finally:
            # As in a child: a cancel counts, whatever the agent made of it.
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError


async def _subproc(
    fn: str | Callable[..., Any],
    kwargs: dict[str, Any],
    on_report: Callable[[Any], None] | None,
    env: Mapping[str, str] | None,
    settings: AgentSettings,
) -> dict[str, Any]:
    environment = child_environment(os.environ, env or {})
    call = LocalCall(function_path(fn), kwargs, environment, cancel_grace=settings.cancel_grace, on_report=on_report)
    return await call.run()


async def _worker(
    fn: str | Callable[..., Any],
    kwargs: dict[str, Any],
    on_report: Callable[[Any], None] | None,
    scope: str | None,
    env: Mapping[str, str] | None,
    settings: AgentSettings,
) -> dict[str, Any]:
    if scope == "":
        raise UsageError("the scope of a worker call must not be an empty string; None is no scope")
    content = Content(function_path(fn), kwargs, _worker_environment(env, settings), scope)
    return await WorkerCall(content, settings, token=read_token(settings), on_report=on_report).run()


def _worker_environment(env: Mapping[str, str] | None, settings: AgentSettings) -> dict[str, str]:
    chosen = travelling_environment(os.environ, settings.worker_env)
    named = sendable(env or {})
    for warning in chosen.warnings + named.warnings:
        if warning not in _warned:
            _warned.add(warning)
            logger.warning("%s", warning)
    return chosen.env | named.env
