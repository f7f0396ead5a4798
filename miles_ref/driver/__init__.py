"""The training side: opens a session, runs the agent function, collects its samples (session-http.md, Driver).

The names are imported on first use, so that `import miles_ref.driver` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_ref.driver.generate import generate
    from miles_ref.driver.request_kwargs import request_kwargs
    from miles_ref.driver.rollout import abort_rollout
    from miles_ref.driver.settings import DriverSettings
    from miles_ref.driver.tracer import CollectTimeoutError, OpenAIEndpointTracer, SessionRecord, SessionServerError

__all__ = [
    "CollectTimeoutError",
    "DriverSettings",
    "OpenAIEndpointTracer",
    "SessionRecord",
    "SessionServerError",
    "abort_rollout",
    "generate",
    "request_kwargs",
]

_HOMES = {
    "CollectTimeoutError": "tracer",
    "DriverSettings": "settings",
    "OpenAIEndpointTracer": "tracer",
    "SessionRecord": "tracer",
    "SessionServerError": "tracer",
    "abort_rollout": "rollout",
    "generate": "generate",
    "request_kwargs": "request_kwargs",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # also wins over the submodule of the same name that the import has just bound
    return value
