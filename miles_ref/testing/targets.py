"""Whom the cases judge: this package, a plugin, a server, a worker, or a program that reads and writes JSON lines.

A target says which cases it cannot be asked (`refusal`, a reason) and runs the others (`run`, differences). What goes
wrong around an implementation, not in it, is raised: ProgramError, CaseError.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from miles_ref.errors import UsageError
from miles_ref.plugins import Catalogue, Pipeline, Plugin
from miles_ref.plugins.catalogue import SETS
from miles_ref.testing.cases import Case
from miles_ref.testing.compare import expectation_difference
from miles_ref.testing.json_lines import JsonLinesProgram
from miles_ref.testing.kinds.http import run_http_case
from miles_ref.testing.kinds.worker import run_worker_case
from miles_ref.testing.laws import law_differences
from miles_ref.testing.run import run_case
from miles_ref.testing.servers import LocalServers, RunningServers, Servers, StartedServers

WORKER = [sys.executable, "-m", "miles_ref.worker"]
DATA_KINDS = frozenset({"assemble", "encode", "decode", "match"})


class Target(Protocol):
    """An implementation under test."""

    name: str
    provides: frozenset[str] | None
    """The optional capabilities that it has, as cases name them in `requires`; None: all."""

    def refusal(self, case: Case) -> str | None:
        """Why the case says nothing about this target; None where it does."""
        ...

    def run(self, case: Case) -> list[str]:
        """The differences from the case's expectation; [] when it holds."""
        ...

    def close(self) -> None:
        """Give back what was started."""
        ...


def laws_of(case: Case) -> list[str] | None:
    """The laws that a case asks for, if it is a law case."""
    laws: list[str] | None = case.expect.get("laws")
    return laws


def lacking(case: Case, target: Target) -> list[str]:
    """What the case requires and the target does not provide."""
    required = case.raw.get("requires", ())
    return [] if target.provides is None else [name for name in required if name not in target.provides]


class ReferenceTarget:
    """This package: data cases in this process, its server in this process, its worker as a process."""

    name = "miles_ref"
    provides: frozenset[str] | None = None

    @cached_property
    def _servers(self) -> LocalServers:
        return LocalServers()

    def refusal(self, case: Case) -> str | None:
        return None

    def run(self, case: Case) -> list[str]:
        if case.kind == "http":
            return run_http_case(case, self._servers.get(case.version, case.config))
        if case.kind == "worker":
            return run_worker_case(case, WORKER)
        if laws_of(case) is not None:
            return law_differences(case)
        found = expectation_difference(case.expect, run_case(case))
        return [found] if found else []

    def close(self) -> None:
        if "_servers" in self.__dict__:
            self._servers.close()


def plugin_name(picker: str | None, merger: str | None, plugin_set: str | None) -> str:
    """How reports call the plugins that are judged."""
    parts = [("picker", picker), ("merger", merger), ("plugin set", plugin_set)]
    return ", ".join(f"{what} {name}" for what, name in parts if name is not None)


def plugin_refusal(case: Case, plugin_set: str | None) -> str | None:
    """Why a case says nothing about a picker or merger, or about a plugin set where there is one."""
    if plugin_set in SETS and case.version != plugin_set:
        return f"a matter of the other version than {plugin_set}'s"
    if laws_of(case) is not None:
        return None
    if plugin_set is None:
        return "exact values say nothing about a picker or merger; its laws do"
    return None if case.kind in ("assemble", "encode") else "not a matter of a plugin set"


class PluginTarget:
    """A picker, a merger, or a whole plugin set by name, in our pipeline and in this process.

    Law cases judge picker and merger: they are meant to choose and weigh otherwise than ours, so exact values say
    nothing about them. A plugin set has to give the values of the corpus. Raises PluginLoadError and UsageError for
    what cannot be judged: that is a mistake in the command, not a case that fails.
    """

    provides: frozenset[str] | None = None

    def __init__(self, *, picker: str | None = None, merger: str | None = None, plugin_set: str | None = None) -> None:
        self.name = plugin_name(picker, merger, plugin_set)
        self._set = plugin_set
        catalogue = Catalogue()
        if plugin_set is not None:
            _check_set(catalogue.plugin_set(plugin_set))
        # Loaded once: a path is relative to the folder of the start, and a plugin may go elsewhere.
        self._pipeline = Pipeline("v2", picker, merger, plugin_set=plugin_set, catalogue=catalogue)

    def refusal(self, case: Case) -> str | None:
        return plugin_refusal(case, self._set)

    def run(self, case: Case) -> list[str]:
        if laws_of(case) is not None:
            return law_differences(case, self._pipeline)
        found = expectation_difference(case.expect, run_case(case, self._set))
        return [found] if found else []

    def close(self) -> None:
        pass


def _check_set(plugin: Plugin) -> None:
    """Exact values judge who computes them, not who only chooses. Raises UsageError."""
    options = {"pick": "picker", "merge": "merger"}
    chosen = [f"--{options[hook]} {plugin.name}" for hook in plugin.hooks if hook in options]
    if set(plugin.hooks) <= {*options, "abort"}:
        advice = f"; give {' '.join(chosen)}" if chosen else ""
        raise UsageError(
            f"--plugin-set {plugin.name}: {plugin.origin} implements {', '.join(plugin.hooks)} only, about which exact "
            f"values say nothing{advice}"
        )


class ServerTarget:
    """A session server of any make, over HTTP."""

    def __init__(self, name: str, servers: Servers, provides: frozenset[str] = frozenset()) -> None:
        self.name = name
        self.provides: frozenset[str] | None = provides
        self._servers = servers

    def refusal(self, case: Case) -> str | None:
        if case.kind != "http":
            return "not a matter of a session server"
        return self._servers.refusal(case.version, case.config)

    def run(self, case: Case) -> list[str]:
        return run_http_case(case, self._servers.get(case.version, case.config))

    def close(self) -> None:
        self._servers.close()


class WorkerTarget:
    """An agent worker of any make; `--port N` and the flags of agents.md are added to its command."""

    def __init__(self, command: str, provides: frozenset[str] = frozenset()) -> None:
        self.name = f"worker:{command}"
        self.provides: frozenset[str] | None = provides
        self._command = shlex.split(command)

    def refusal(self, case: Case) -> str | None:
        return None if case.kind == "worker" else "not a matter of an agent worker"

    def run(self, case: Case) -> list[str]:
        return run_worker_case(case, self._command)

    def close(self) -> None:
        pass


class ProgramTarget:
    """A program that reads one case a line and writes one observation a line (docs/adapter-protocol.md)."""

    def __init__(self, command: str, provides: frozenset[str] = frozenset()) -> None:
        self.name = f"program:{command}"
        self.provides: frozenset[str] | None = provides
        self._program = JsonLinesProgram(shlex.split(command))

    def refusal(self, case: Case) -> str | None:
        if case.kind not in DATA_KINDS or laws_of(case) is not None:
            return "not a matter of a JSON-lines program"
        return self._program.refusal(case.raw)

    def run(self, case: Case) -> list[str]:
        found = expectation_difference(case.expect, self._program.observe(case.raw))
        return [found] if found else []

    def close(self) -> None:
        self._program.close()


def read_config(text: str | None, option: str) -> dict[str, Any] | None:
    """The config of a server as the command line has it. Raises UsageError for what is no JSON object."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option} {text!r} is not a JSON object")
    return value


def choose_target(
    target: str | None = None,
    *,
    picker: str | None = None,
    merger: str | None = None,
    plugin_set: str | None = None,
    backend_listen: str | None = None,
    server_version: str | None = None,
    server_config: Mapping[str, Any] | None = None,
    provides: Sequence[str] = (),
    judge_plugin: Callable[..., Target] = PluginTarget,
) -> Target:
    """The target that command line options name. Raises UsageError where they contradict each other.

    `target`: server:"COMMAND", http://HOST:PORT (with `backend_listen`), worker:"COMMAND", program:"COMMAND"; None is
    this package, or the plugin that is named. `judge_plugin` makes the target of plugins.
    """
    plugins = {"picker": picker, "merger": merger, "plugin_set": plugin_set}
    for option, value in {"target": target, **plugins, "backend_listen": backend_listen}.items():
        if value is not None and not value.strip():
            raise UsageError(
                f"--{option.replace('_', '-')} is given with an empty value; is a shell variable unset? Name what to "
                "judge, or leave the option out"
            )
    if target is None or not target.startswith(("http://", "https://")):
        _only_running(server_version, server_config, backend_listen)
    if target is None and provides:
        raise UsageError("--provides is for a --target: this package, and plugins in it, have every capability")
    if any(name is not None for name in plugins.values()):
        if target is not None:
            raise UsageError("--target and --picker, --merger or --plugin-set name two things to judge; give one")
        return judge_plugin(**plugins)
    if target is None:
        return ReferenceTarget()
    has = frozenset(provides)
    if target.startswith(("http://", "https://")):
        if backend_listen is None:
            raise UsageError(f"--target {target} needs --backend-listen 127.0.0.1:PORT, the server's backend address")
        servers = RunningServers(target, backend_listen, server_version or "v1", server_config or {})
        return ServerTarget(target, servers, has)
    kind, _, command = target.partition(":")
    if kind not in ("server", "worker", "program") or not command.strip():
        raise UsageError(f'--target {target!r} is none of server:"...", http://..., worker:"...", program:"..."')
    try:
        shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--target {target!r}: the command cannot be split into words: {error}") from error
    if kind == "server":
        return ServerTarget(target, StartedServers(command), has)
    return (WorkerTarget if kind == "worker" else ProgramTarget)(command, has)


def _only_running(
    server_version: str | None, server_config: Mapping[str, Any] | None, backend_listen: str | None
) -> None:
    """Refuse what describes a server that runs already: ignored, it would leave judged what nobody meant."""
    options = {
        "--backend-listen": backend_listen,
        "--server-version": server_version,
        "--server-config": server_config,
    }
    for option, value in options.items():
        if value is not None:
            raise UsageError(
                f"{option} is for a server that runs already: give --target http://HOST:PORT, or leave it out"
            )
