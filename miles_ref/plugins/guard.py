"""The guard around each implementation of a hook: what pluggy takes and this project does not (docs/plugins.md).

Registration refuses what cannot work; calls refuse what is no result. Each error names plugin, distribution and
version, hook, file and line, what was wrong, and how to go on.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from miles_ref.errors import AssemblyError, PluginError, PluginLoadError, described
from miles_ref.hookspecs import PROJECT, HookSpecs

logger = logging.getLogger("miles_ref.plugins")

_MARK = f"{PROJECT}_impl"
_MAY_BE_ASYNC = frozenset({"abort"})
_CHOICES = frozenset({"pick", "merge"})
"""Hooks that a user chooses by name, so that their errors name whom he chose (pipeline.md, v2)."""

HOOKS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(member).parameters)[1:]
    for name, member in vars(HookSpecs).items()
    if hasattr(member, f"{PROJECT}_spec")
}
"""Hook -> names of its arguments, as specified."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plugin comes from. A built-in has this package's distribution; a path has none."""

    name: str
    distribution: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        where = f" ({self.distribution} {self.version})" if self.distribution else ""
        return f"plugin {self.name}{where}"


@dataclass(frozen=True, slots=True)
class Implementation:
    """One plugin's function for one hook. `trusted` is for this package's own: they skip copies and checks."""

    origin: Origin
    hook: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    trusted: bool = False

    @classmethod
    def of(cls, origin: Origin, hook: str, function: Any, *, trusted: bool = False) -> Implementation:
        """Check a function's signature. Raises PluginLoadError."""
        where = f"{origin}, hook {hook} ({location(function)})"
        if hook not in HOOKS:
            raise PluginLoadError(f"{where}: there is no such hook; the hooks are {', '.join(HOOKS)}")
        if not callable(function):
            raise PluginLoadError(f"{where}: it is {function!r:.80}, not a function")
        _check_kind(function, hook, where)
        return cls(origin, hook, function, _check_arguments(function, hook, where), trusted)

    def __str__(self) -> str:
        return f"{self.origin}, hook {self.hook} ({location(self.function)})"

    def call(self, arguments: Mapping[str, Any], clock: Callable[[], float], slow_after: float) -> Any:
        """Call the function with those arguments that it takes; a call that takes long (seconds) is logged.

        Raises PluginError for anything that leaves it, SystemExit and KeyboardInterrupt too; CancelledError passes.
        A trusted implementation's errors pass as they are, save those of a picker or merger: they are PluginErrors too.
        """
        taken = {name: arguments[name] for name in self.arguments}
        if self.trusted:
            return self._call_trusted(taken)
        began = clock()
        try:
            return self.function(**taken)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a plugin must not end the server
            raise self.failure(error) from error
        finally:
            seconds = clock() - began
            if seconds >= slow_after:
                logger.warning("%s took %.2f s; the server answers nobody meanwhile", self, seconds)

    def _call_trusted(self, taken: Mapping[str, Any]) -> Any:
        try:
            return self.function(**taken)
        except Exception as error:
            if self.hook not in _CHOICES or isinstance(error, PluginError):
                raise
            if isinstance(error, AssemblyError):  # its cause is the session or the request, not the code
                raise PluginError(f"{self.origin}, hook {self.hook}: {error}") from error
            raise self.failure(error) from error

    def failure(self, error: BaseException) -> PluginError:
        """The error that says what the implementation raised, and where."""
        frames = traceback.extract_tb(error.__traceback__)
        at = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        return self.refusal(f"raised {described(error)}{at}")

    def refusal(self, what: str) -> PluginError:
        """The error that says what the implementation did wrong."""
        return PluginError(f"{self}: {what}. {_GO_ON}")

    def members(self, result: Any) -> list[Any]:
        """The members of a list or a tuple. Raises PluginError for all else; an awaitable or generator is closed."""
        if result is None:
            raise self.refusal("returned None; return a list, an empty one if nothing is chosen")
        if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            close = getattr(result, "close", None)
            if close is not None:
                close()
            kind = "an awaitable" if inspect.isawaitable(result) else "a generator"
            raise self.refusal(f"returned {kind} ({type(result).__name__}); hooks run synchronously and return a list")
        if not isinstance(result, list | tuple):
            raise self.refusal(f"returned {_shown(result)}; return a list")
        return list(result)


_GO_ON = (
    "The session is unchanged and can be collected again; fix the plugin, or choose another (miles-ref plugins list)"
)


def _shown(value: Any) -> str:
    """A plugin's value for a message, also if its repr is broken."""
    try:
        return f"{type(value).__name__} {value!r:.80}"
    except BaseException:  # it is the plugin's code, and must not end the server
        return type(value).__name__


def implementations(origin: Origin, plugin: Any, *, trusted: bool = False) -> dict[str, Implementation]:
    """The hooks that a plugin (a module or an object) implements with @hookimpl. Raises PluginLoadError."""
    found: dict[str, Implementation] = {}
    for name, function, options in _marked(plugin):
        hook = options.get("specname") or name
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginLoadError(
                f"{origin}, hook {hook} ({location(function)}): hook wrappers are refused; implement the hook itself"
            )
        found[hook] = Implementation.of(origin, hook, function, trusted=trusted)
    return found


def _marked(plugin: Any) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    for name in dir(plugin):
        try:
            function = getattr(plugin, name)
            options = getattr(function, _MARK, None)
        except (Exception, SystemExit):  # a property of the plugin that raises is no hook
            continue
        if isinstance(options, Mapping) and inspect.isroutine(function):
            yield name, function, options


def marked_hook(function: Any) -> str | None:
    """The hook that a function says with @hookimpl that it implements; None for a function without a mark."""
    options = getattr(function, _MARK, None)
    if not isinstance(options, Mapping):
        return None
    name = options.get("specname") or getattr(function, "__name__", None)
    return name if name in HOOKS else None


def _check_kind(function: Any, hook: str, where: str) -> None:
    inner = _unwrapped(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise PluginLoadError(f"{where}: it is a generator; return the result, do not yield it")
    if inspect.iscoroutinefunction(inner) and hook not in _MAY_BE_ASYNC:
        raise PluginLoadError(f"{where}: it is async; hooks run synchronously in the server, so use def, not async def")


def _check_arguments(function: Any, hook: str, where: str) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise PluginLoadError(f"{where}: its signature cannot be read: {error}") from error
    wanted = ", ".join(HOOKS[hook])
    for parameter in parameters:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise PluginLoadError(
                f"{where}: argument {parameter} is {parameter.kind.description}; take some of ({wanted})"
            )
        if parameter.default is not parameter.empty:
            raise PluginLoadError(
                f"{where}: argument {parameter.name} has a default, which would hide that the hook does not give it; "
                f"take some of ({wanted})"
            )
        if parameter.name not in HOOKS[hook]:
            raise PluginLoadError(f"{where}: there is no argument {parameter.name}; take some of ({wanted}), by name")
    return tuple(parameter.name for parameter in parameters)


def _unwrapped(function: Any) -> Any:
    """What is called in the end: below partials, methods and decorators that say what they wrap."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function) and not inspect.isclass(function) and callable(function):
        function = type(function).__call__
    return function


def location(function: Any) -> str:
    """File and line of a function, for an error."""
    code = getattr(getattr(_unwrapped(function), "__func__", _unwrapped(function)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "no source"
