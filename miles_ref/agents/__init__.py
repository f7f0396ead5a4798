"""Agent functions: inline, in a child process, or on a worker (agents.md).

An agent imports `report_to_caller` and `InfraAbort` from here; both come from a module that imports nothing heavy. The
callers' side is loaded on first use, because a child process and an agent need none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_ref.agents.api import (
    AgentFunctionError,
    InfraAbort,
    WorkerRefusedError,
    WorkerReplyError,
    report_to_caller,
)

if TYPE_CHECKING:
    from miles_ref.agents.abort import call_agent_abort_hook
    from miles_ref.agents.call import call_agent_function
    from miles_ref.agents.environment import PROVIDER_CREDENTIALS
    from miles_ref.agents.settings import AgentSettings

__all__ = [
    "PROVIDER_CREDENTIALS",
    "AgentFunctionError",
    "AgentSettings",
    "InfraAbort",
    "WorkerRefusedError",
    "WorkerReplyError",
    "call_agent_abort_hook",
    "call_agent_function",
    "report_to_caller",
]

_LAZY = {
    "AgentSettings": "settings",
    "PROVIDER_CREDENTIALS": "environment",
    "call_agent_abort_hook": "abort",
    "call_agent_function": "call",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
