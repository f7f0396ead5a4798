"""Session servers for cases of kind http: one for each version and config, started when first needed.

A case's config becomes the command line flags of session-http.md, so that every way to start a server, in this process
or as a program of any kind, is configured alike.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from aiohttp import web

from miles_ref.data import tokenizer_names, tokenizer_path
from miles_ref.errors import UsageError
from miles_ref.server.app import SessionServer
from miles_ref.server.command import serve_command
from miles_ref.server.settings import ServerSettings
from miles_ref.testing.case_backend import CaseBackend
from miles_ref.testing.cases import CONFIG_DEFAULTS
from miles_ref.testing.kinds.http import RunningServer
from miles_ref.testing.loop_thread import LoopThread
from miles_ref.testing.programs import Program, free_port, healthy

MOST_PROCESSES = 4
"""Started servers that are kept at a time."""

_SWITCHES = {
    "routed_experts": ("--use-rollout-routing-replay",),
    "indexer_topk": ("--use-rollout-indexer-replay",),
    "additional_r3": ("--pause-generation-mode", "in_place"),
    "speculative": ("--sglang-speculative-algorithm", "EAGLE"),
    "debug_messages": ("--save-debug-trajectory-data",),
    "strict_append_only": ("--session-strict-append-only",),
}
_VALUES = {
    "family": "--tito-model",
    "num_layers": "--num-layers",
    "moe_router_topk": "--moe-router-topk",
    "matcher": "--session-message-matcher",
    "picker": "--session-sample-picker-path",
    "merger": "--session-merge-function-path",
    "max_nodes": "--session-max-nodes",
}


def server_flags(version: str, config: Mapping[str, Any]) -> list[str]:
    """The flags that configure a session server as a case's `version` and `config` ask (session-http.md, Flags)."""
    settings = {key: value for key, value in config.items() if value != CONFIG_DEFAULTS[key]}
    # Always said: a server has a default of its own, and it is not the format's.
    tokenizer = settings.pop("tokenizer", CONFIG_DEFAULTS["tokenizer"])
    flags = ["--use-session-server", version, "--hf-checkpoint", tokenizer_argument(tokenizer)]
    extra = settings.pop("flags", [])
    for key, value in settings.items():
        if key in _SWITCHES:
            flags += _SWITCHES[key] if value else ()
        elif key == "allowed_append_roles":
            flags += ["--tito-allowed-append-roles", ",".join(value)]
        elif key in _VALUES:
            flags += [_VALUES[key], str(value)]
        else:
            raise UsageError(f"config key {key!r} is not one of a session server")
    return [*flags, *extra]


def tokenizer_argument(name: str) -> str:
    """What --hf-checkpoint gets: the folder of a shipped tokenizer, other names as they are."""
    return str(tokenizer_path(name)) if name in tokenizer_names() else name


def config_key(version: str, config: Mapping[str, Any]) -> str:
    """Equal for the cases that one server can serve."""
    return json.dumps([version, {**CONFIG_DEFAULTS, **config}], sort_keys=True)


class Servers(Protocol):
    """Where the servers of a target come from."""

    def refusal(self, version: str, config: Mapping[str, Any]) -> str | None:
        """Why there can be no server of this kind; None when there can."""
        ...

    def get(self, version: str, config: Mapping[str, Any]) -> RunningServer:
        """A running server, kept for later cases. Raises ProgramError."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class LocalServers:
    """Our own server, in this process: one application for each version and config, on one thread's loop."""

    def __init__(self) -> None:
        self._thread = LoopThread()
        self._running: dict[str, tuple[RunningServer, web.AppRunner]] = {}

    def refusal(self, version: str, config: Mapping[str, Any]) -> str | None:
        return None

    def get(self, version: str, config: Mapping[str, Any]) -> RunningServer:
        key = config_key(version, config)
        if key not in self._running:
            self._running[key] = self._start(version, config)
        return self._running[key][0]

    def _start(self, version: str, config: Mapping[str, Any]) -> tuple[RunningServer, web.AppRunner]:
        backend = CaseBackend(self._thread)
        try:
            with serve_command.make_context("serve", server_flags(version, config)) as context:
                params = {**context.params, "backend_url": backend.url}
            del params["host"], params["port"]
            runner = self._thread.run(_serve(SessionServer(ServerSettings(**params))))
        except BaseException:
            backend.close()
            raise
        host, port = runner.addresses[0][:2]
        return RunningServer(f"http://{host}:{port}", backend), runner

    def close(self) -> None:
        for server, runner in self._running.values():
            self._thread.run(runner.cleanup())
            server.backend.close()
        self._running.clear()
        self._thread.close()


async def _serve(server: SessionServer) -> web.AppRunner:
    runner = server.runner()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


class StartedServers:
    """Servers of a command line, one process for each version and config, the last few kept.

    In the command, {port}, {backend} (its base URL), {version}, {tokenizer} and {family} are replaced, and the flags of
    the contract stand at {flags}, or at the end where no such place is named.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._thread = LoopThread()
        self._running: dict[str, tuple[RunningServer, Program]] = {}
        if "{port}" not in command or "{backend}" not in command:
            raise UsageError(
                'a server\'s command must hold {port} and {backend}: server:"prog --port {port} --backend {backend}"'
            )

    def refusal(self, version: str, config: Mapping[str, Any]) -> str | None:
        return None

    def get(self, version: str, config: Mapping[str, Any]) -> RunningServer:
        key = config_key(version, config)
        if key not in self._running:
            while len(self._running) >= MOST_PROCESSES:
                self._end(next(iter(self._running)))
            self._running[key] = self._start(version, config)
        return self._running[key][0]

    def _end(self, key: str) -> None:
        server, program = self._running.pop(key)
        program.close()
        server.backend.close()

    def _start(self, version: str, config: Mapping[str, Any]) -> tuple[RunningServer, Program]:
        backend = CaseBackend(self._thread)
        port = free_port()
        argv = command_line(self._command, version, config, port, backend.url)
        program = Program(
            argv, env={"MILES_REF_CASE_CONFIG": json.dumps({**CONFIG_DEFAULTS, **config, "version": version})}
        )
        url = f"http://127.0.0.1:{port}"
        try:
            program.wait_healthy(url)
        except BaseException:
            program.close(grace=1)
            backend.close()
            raise
        return RunningServer(url, backend), program

    def close(self) -> None:
        for key in list(self._running):
            self._end(key)
        self._thread.close()


def command_line(command: str, version: str, config: Mapping[str, Any], port: int, backend: str) -> list[str]:
    """The words of a server's command with its places filled in."""
    settings = {**CONFIG_DEFAULTS, **config}
    places = {
        "port": str(port),
        "backend": backend,
        "version": version,
        "tokenizer": tokenizer_argument(settings["tokenizer"]),
        "family": settings["family"],
    }
    flags = server_flags(version, config)
    words: list[str] = []
    for word in shlex.split(command):
        if word == "{flags}":
            words += flags
        else:
            for name, value in places.items():
                word = word.replace("{" + name + "}", value)
            words.append(word)
    return words if "{flags}" in command else [*words, *flags]


class RunningServers:
    """A server that somebody else started, with one version and config, against the address that we listen on."""

    def __init__(self, url: str, listen: str, version: str, config: Mapping[str, Any]) -> None:
        at = urlsplit(f"http://{listen}")
        try:
            port = at.port
        except ValueError:
            port = None
        if at.hostname not in ("127.0.0.1", "localhost") or not port:
            raise UsageError(f"--backend-listen {listen!r} is not 127.0.0.1:PORT; the backend listens on loopback only")
        unknown = sorted(config.keys() - CONFIG_DEFAULTS.keys())
        if unknown:
            raise UsageError(f"--server-config: no key {unknown[0]!r}; known are {', '.join(CONFIG_DEFAULTS)}")
        self._key = config_key(version, config)
        self._described = f"{version} {dict(config)}"
        self._thread = LoopThread()
        try:
            self._server = RunningServer(url.rstrip("/"), CaseBackend(self._thread, port))
        except OSError as error:
            self._thread.close()
            raise UsageError(
                f"--backend-listen {listen}: cannot listen there: {error.strerror}; end what uses the port, such as "
                "another run or another process of pytest (-n 0)"
            ) from error
        if not healthy(self._server.url):
            self.close()
            raise UsageError(
                f"{url}: GET /health is not answered with 200; is the server running, with backend {listen}?"
            )

    def refusal(self, version: str, config: Mapping[str, Any]) -> str | None:
        if config_key(version, config) == self._key:
            return None
        return f"needs a server of another version or config than the running one ({self._described})"

    def get(self, version: str, config: Mapping[str, Any]) -> RunningServer:
        return self._server

    def close(self) -> None:
        self._server.backend.close()
        self._thread.close()
