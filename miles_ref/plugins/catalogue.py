"""Which plugins there are: built in, installed as packages (entry point group `miles_ref`), or named by their path."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import miles_ref
from miles_ref.assembly.advantage import tree_advantage
from miles_ref.assembly.merge import merge
from miles_ref.assembly.pick import pick
from miles_ref.assembly.pickers import best_reward, drop_retries, keep_all, longest
from miles_ref.errors import PluginLoadError, described
from miles_ref.hookspecs import PROJECT
from miles_ref.plugins import v1, v2
from miles_ref.plugins.guard import Implementation, Origin, implementations, location, marked_hook

logger = logging.getLogger("miles_ref.plugins")

_OWN = "miles-ref"
SETS: dict[str, ModuleType] = {"v1": v1, "v2": v2}
"""The built-in plugin sets."""

DEFAULT_PICKER = "retry-trim"
DEFAULT_MERGER = "exactly-once"
_BUILT_IN: dict[str, tuple[str, Callable[..., Any]]] = {
    DEFAULT_PICKER: ("pick", pick),
    "keep-all": ("pick", keep_all),
    "drop-retries": ("pick", drop_retries),
    "longest": ("pick", longest),
    "best-reward": ("pick", best_reward),
    DEFAULT_MERGER: ("merge", merge),
    "tree-advantage": ("merge", tree_advantage),
}


@dataclass(frozen=True)
class Plugin:
    """A plugin that can be chosen, and the hooks that it implements."""

    origin: Origin
    hooks: dict[str, Implementation]

    @property
    def name(self) -> str:
        return self.origin.name

    @property
    def built_in(self) -> bool:
        return all(hook.trusted for hook in self.hooks.values())


class Catalogue:
    """The built-in and the installed plugins. An installed one that is broken is a warning that names it.

    `installed` are the entry points to look at; by default those of the group `miles_ref`, read when first needed.
    """

    def __init__(self, installed: Iterable[EntryPoint] | None = None) -> None:
        self._installed = installed
        self._plugins: dict[str, Plugin] | None = None
        self.warnings: list[str] = []

    def plugins(self) -> list[Plugin]:
        """All that can be chosen by name, the built-in ones first."""
        return list(self._all().values())

    def installed(self) -> list[Plugin]:
        """Those that are not built in, and not broken."""
        return [plugin for plugin in self.plugins() if not plugin.built_in]

    def plugin_set(self, name: str) -> Plugin:
        """A plugin by name with all its hooks. Raises PluginLoadError."""
        if name in SETS:
            return _built_in_set(name)
        if _is_path(name):
            raise PluginLoadError(
                f"plugin set {name!r}: a set goes by the name that it is installed under (entry points {PROJECT}); "
                "a path names one function, for a picker or a merger"
            )
        return self._find(name, None)

    def implementation(self, choice: str, hook: str) -> Implementation:
        """The one that implements `hook`: a plugin's name, `package.module.function` or `./file.py:function`.

        Raises PluginLoadError for what is missing, cannot be imported, or has a wrong signature.
        """
        if choice in _BUILT_IN and _BUILT_IN[choice][0] == hook:
            return _built_in(choice).hooks[hook]
        if _is_path(choice):
            return _by_path(choice, _import_file(choice), hook)
        if choice not in self._all() and "." in choice:
            return _by_path(choice, _import_dotted(choice), hook)
        return self._find(choice, hook).hooks[hook]

    def _find(self, name: str, hook: str | None) -> Plugin:
        plugins = self._all()
        found = plugins.get(name)
        if found is None or (hook is not None and hook not in found.hooks):
            choices = [
                one.name
                for one in plugins.values()
                if (hook in one.hooks if hook is not None else one.name not in _BUILT_IN)
            ]
            what = f"plugin {name!r} is not installed" if found is None else f"{found.origin} does not implement {hook}"
            path = ", or give package.module.function or ./file.py:function" if hook is not None else ""
            raise PluginLoadError(
                f"{what}; choose {', '.join(choices)}{path}" + "".join(f"\n{warning}" for warning in self.warnings)
            )
        return found

    def _all(self) -> dict[str, Plugin]:
        if self._plugins is None:
            self._plugins = {name: _built_in_set(name) for name in SETS} | {name: _built_in(name) for name in _BUILT_IN}
            for entry in entry_points(group=PROJECT) if self._installed is None else self._installed:
                self._add(entry)
        return self._plugins

    def _add(self, entry: EntryPoint) -> None:
        assert self._plugins is not None
        distribution = entry.dist
        origin = Origin(
            entry.name,
            distribution.name if distribution else None,
            distribution.version if distribution else None,
        )
        try:
            if entry.name in self._plugins:
                raise PluginLoadError(f"the name is taken by {self._plugins[entry.name].origin}")
            self._plugins[entry.name] = _plugin(origin, entry.load())
        except (Exception, SystemExit) as error:
            warning = f"{origin}, entry point {entry.value}, is left out: {described(error)}"
            self.warnings.append(warning)
            logger.warning("%s", warning)


def _built_in_set(name: str) -> Plugin:
    origin = Origin(name, _OWN, miles_ref.__version__)
    return Plugin(origin, implementations(origin, SETS[name], trusted=True))


def _built_in(name: str) -> Plugin:
    hook, function = _BUILT_IN[name]
    origin = Origin(name, _OWN, miles_ref.__version__)
    return Plugin(origin, {hook: Implementation.of(origin, hook, function, trusted=True)})


def _plugin(origin: Origin, value: Any) -> Plugin:
    hooks = implementations(origin, value)
    if not hooks:
        raise PluginLoadError(f"{origin} implements no hook; mark its functions with @miles_ref.hookspecs.hookimpl")
    return Plugin(origin, hooks)


def _is_path(choice: str) -> bool:
    return ":" in choice or choice.endswith(".py") or "/" in choice


def _by_path(choice: str, value: Any, hook: str) -> Implementation:
    """A function for `hook`, or an object or module that implements it with @hookimpl."""
    origin = Origin(choice)
    if callable(value) and not isinstance(value, type):
        marked = marked_hook(value)
        if marked is not None and marked != hook:
            raise PluginLoadError(
                f"{origin} ({location(value)}): it is marked with @hookimpl as {marked}, not {hook}; choose it for "
                f"{marked}, or another function for {hook}"
            )
        return Implementation.of(origin, hook, value)
    if value is None or isinstance(value, str | bytes | int | float | list | tuple | dict | set):
        raise PluginLoadError(
            f"{origin}: it is {type(value).__name__} {value!r:.80}, not a function; name a function for {hook}"
        )
    plugin = _plugin(origin, value() if isinstance(value, type) else value)
    if hook not in plugin.hooks:
        raise PluginLoadError(f"{origin} implements {', '.join(plugin.hooks)}, not {hook}")
    return plugin.hooks[hook]


def _import_dotted(choice: str) -> Any:
    module, _, attribute = choice.rpartition(".")
    return _attribute(_guarded_import(choice, lambda: importlib.import_module(module)), attribute, choice)


def _import_file(choice: str) -> Any:
    """`./file.py:function`, or `package.module:function`."""
    path, _, attribute = choice.rpartition(":")
    if not path or not attribute:
        raise PluginLoadError(f"plugin {choice}: name its function too, as in {choice.rstrip(':')}:function")
    if not path.endswith(".py") and "/" not in path:
        if Path(f"{path}.py").is_file() and not _importable(path):
            raise PluginLoadError(
                f"plugin {choice}: there is no module {path}, but a file: give ./{path}.py:{attribute}"
            )
        return _attribute(_guarded_import(choice, lambda: importlib.import_module(path)), attribute, choice)
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise PluginLoadError(f"plugin {choice}: there is no file {file}")
    return _attribute(_guarded_import(choice, lambda: _load_file(file)), attribute, choice)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _load_file(file: Path) -> ModuleType:
    # A name of its own for each file, known to sys.modules, so that dataclasses and pickling work in it.
    name = f"miles_ref_plugin_{hashlib.sha256(bytes(file)).hexdigest()[:12]}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _guarded_import(choice: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:  # importing runs the plugin's code, which may raise anything
        raise PluginLoadError(f"plugin {choice}: cannot import it: {described(error)}") from error


def _attribute(module: ModuleType, path: str, choice: str) -> Any:
    value: Any = module
    for name in path.split("."):
        if not hasattr(value, name):
            raise PluginLoadError(f"plugin {choice}: {getattr(module, '__file__', module.__name__)} has no {name!r}")
        value = getattr(value, name)
    return value
