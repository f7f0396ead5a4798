"""Whom the cases judge: this package, a plugin, a server, a worker, or a program that reads and writes JSON lines.

A target says which cases it cannot be asked (`refusal`, a reason) and runs the others (`run`, differences). What goes
wrong around an implementation, not in it, is raised: ProgramError, CaseError.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

from miles_ref.errors import UsageError
from miles_ref.plugins import Pipeline
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


class ReferenceTarget:
    """This package: data cases in this process, its server in this process, its worker as a process."""

    name = "miles_ref"

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


class PluginTarget:
    """A picker, a merger, or a whole plugin set by name, in our pipeline.

    Law cases judge picker and merger: they are meant to choose and weigh otherwise than ours, so exact values say
    nothing about them. A plugin set has to give the values of the corpus.
    """

    def __init__(self, *, picker: str | None = None, merger: str | None = None, plugin_set: str | None = None) -> None:
        parts = [("picker", picker), ("merger", merger), ("plugin set", plugin_set)]
        self.name = ", ".join(f"{what} {name}" for what, name in parts if name)
        self._config: dict[str, Any] = {key: value for key, value in (("picker", picker), ("merger", merger)) if value}
        self._set = plugin_set
        # A plugin that cannot be loaded is a mistake in the command, not a case that fails.
        Pipeline("v2", plugin_set=plugin_set, **self._config)

    def refusal(self, case: Case) -> str | None:
        if laws_of(case) is not None:
            return None
        if self._set is None:
            return "exact values say nothing about a picker or merger; its laws do"
        return None if case.kind in ("assemble", "encode") else "not a matter of a plugin set"

    def run(self, case: Case) -> list[str]:
        if laws_of(case) is not None:
            return law_differences(case, plugin_set=self._set, **self._config)
        found = expectation_difference(case.expect, run_case(case, self._set))
        return [found] if found else []

    def close(self) -> None:
        pass


class ServerTarget:
    """A session server of any make, over HTTP."""

    def __init__(self, name: str, servers: Servers) -> None:
        self.name = name
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

    def __init__(self, command: str) -> None:
        self.name = f"worker:{command}"
        self._command = shlex.split(command)

    def refusal(self, case: Case) -> str | None:
        return None if case.kind == "worker" else "not a matter of an agent worker"

    def run(self, case: Case) -> list[str]:
        return run_worker_case(case, self._command)

    def close(self) -> None:
        pass


class ProgramTarget:
    """A program that reads one case a line and writes one observation a line (docs/adapter-protocol.md)."""

    def __init__(self, command: str) -> None:
        self.name = f"program:{command}"
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


def choose_target(
    target: str | None = None,
    *,
    picker: str | None = None,
    merger: str | None = None,
    plugin_set: str | None = None,
    backend_listen: str | None = None,
    server_version: str = "v1",
    server_config: Mapping[str, Any] | None = None,
) -> Target:
    """The target that command line options name. Raises UsageError where they contradict each other.

    `target`: server:"COMMAND", http://HOST:PORT (with `backend_listen`), worker:"COMMAND", program:"COMMAND"; None is
    this package, or the plugin that is named.
    """
    plugins = {"picker": picker, "merger": merger, "plugin_set": plugin_set}
    if any(plugins.values()):
        if target is not None:
            raise UsageError("--target and --picker, --merger or --plugin-set name two things to judge; give one")
        return PluginTarget(**plugins)
    is_url = target is not None and target.startswith(("http://", "https://"))
    if backend_listen is not None and not is_url:
        raise UsageError("--backend-listen is for a server that runs already: --target http://HOST:PORT")
    if target is None:
        return ReferenceTarget()
    if is_url:
        if backend_listen is None:
            raise UsageError(f"--target {target} needs --backend-listen 127.0.0.1:PORT, the server's backend address")
        return ServerTarget(target, RunningServers(target, backend_listen, server_version, server_config or {}))
    kind, _, command = target.partition(":")
    makers: dict[str, Callable[[str], Target]] = {"worker": WorkerTarget, "program": ProgramTarget}
    if kind == "server" and command:
        return ServerTarget(target, StartedServers(command))
    if kind not in makers or not command:
        raise UsageError(f'--target {target!r} is none of server:"...", http://..., worker:"...", program:"..."')
    return makers[kind](command)
