"""Names of agent functions: `module:qualname` (agents.md). Imports nothing heavy."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from miles_ref.errors import UsageError

FUNCTION = re.compile(r"[^:]+:[^:]+")
"""The form of a name. Whether there is such a function is for the import to say: it finds `my-agents:run`, for one."""


def function_path(fn: str | Callable[..., Any]) -> str:
    """The name `module:qualname` under which another process finds `fn`. Raises UsageError if it cannot.

    The form `package.module.function` is taken too.
    """
    if isinstance(fn, str):
        path = fn if ":" in fn else ":".join(fn.rsplit(".", 1))
        if FUNCTION.fullmatch(path) is None:
            raise UsageError(f"--custom-agent-function-path {fn!r} must be module:qualname, as in my_agents.coder:run")
        return path
    module = getattr(fn, "__module__", None)
    qualname = getattr(fn, "__qualname__", None)
    if not module or not qualname or module == "__main__" or "<" in qualname:
        raise UsageError(
            f"the agent function {fn!r} cannot be found by another process: define it at the top of a module that can "
            "be imported, or use --custom-agent-function-mode inline"
        )
    return f"{module}:{qualname}"


def resolve(path: str) -> Callable[..., Any]:
    """Import `module:qualname`. Raises what the import raises, AttributeError, TypeError for what is no function.

    A qualname leads through classes only: through the modules that a module has imported, `agents:os.system` would be a
    function of every allowed module (--allow-function).
    """
    module_name, _, qualname = path.partition(":")
    target: Any = importlib.import_module(module_name)
    for name in qualname.split("."):
        target = getattr(target, name)
        if isinstance(target, ModuleType):
            raise TypeError(f"{path} leads through the module {target.__name__}: write {target.__name__}:...")
    if not callable(target):
        raise TypeError(f"{path} is not a function but {type(target).__name__}")
    return target  # type: ignore[no-any-return]
