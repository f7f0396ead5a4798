"""What the driver must know: where the session server is, how the agent runs, how long to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from miles_ref.agents.functions import function_path
from miles_ref.agents.settings import AgentSettings, Mode, check_agent_call
from miles_ref.errors import UsageError

AgentFunction: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
Version: TypeAlias = Literal["v1", "v2"]


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """Settings of `generate` and `OpenAIEndpointTracer`. Both take this, or any object with the attributes below.

    `session_servers` are the addresses `ip:port` of the instances; each session belongs to one of them. `version` is
    what they serve. `scope` names the rollout's calls for an abort: its router's `ip:port`, None if there is no router.
    `max_seq_len` is the token budget of a sample (None: no limit). `agent_function` is `pkg.module.fn`,
    `pkg.module:fn`, or, in mode inline, the function itself; `agent_mode` is where it runs (agents.md), `agent` how.
    Timeouts are in seconds, each for one whole request.

    `of(args)` reads these attributes, named as the flags are; those with a default may be absent or None:

    | attribute | default |
    |---|---|
    | session_server_ip | |
    | session_server_port: one port, or a list of them, one an instance | |
    | session_server_instance_id | None |
    | use_session_server: True, "v1" or "v2" | "v1" |
    | sglang_router_ip, sglang_router_port | None |
    | max_seq_len | None |
    | custom_agent_function_path | |
    | custom_agent_function_mode: "inline", "subproc" or "worker" | "inline" |
    | custom_agent_function_worker_url: one URL, or several as a list or with commas | |
    | custom_agent_function_worker_env: name patterns, as a list or with commas | AgentSettings' |
    | custom_agent_function_worker_token_file | None |
    | session_create_timeout, session_collect_timeout, session_delete_timeout | 30, 120, 30 |
    """

    session_servers: tuple[str, ...]
    version: Version = "v1"
    session_server_instance_id: str | None = None
    scope: str | None = None
    max_seq_len: int | None = None
    agent_function: str | AgentFunction | None = None
    agent_mode: str = "inline"
    agent: AgentSettings = field(default_factory=AgentSettings)
    create_timeout: float = 30.0
    collect_timeout: float = 120.0
    delete_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.session_servers:
            raise UsageError("no session server: set session_server_ip and session_server_port")
        if self.version not in ("v1", "v2"):
            raise UsageError(f"use_session_server is {self.version!r}: the session server speaks v1 or v2")
        for name in ("create_timeout", "collect_timeout", "delete_timeout"):
            seconds = getattr(self, name)
            if not (isinstance(seconds, int | float) and 0 < seconds <= threading.TIMEOUT_MAX):
                raise UsageError(f"session_{name} is {seconds!r:.80}: give a positive number of seconds")
        if self.scope == "":
            raise UsageError("scope is an empty string: give the router's ip:port, or None for no scope")
        limit = self.max_seq_len
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise UsageError(f"max_seq_len is {limit!r}: give a positive number of tokens, or None for no limit")

    @classmethod
    def of(cls, args: Any) -> DriverSettings:
        """`args` itself if it is a DriverSettings, else its attributes as the class lists them. Raises UsageError."""
        if isinstance(args, DriverSettings):
            return args

        def read(name: str) -> Any:
            return getattr(args, name, None)

        version = read("use_session_server")
        return cls(
            session_servers=_addresses(read("session_server_ip"), read("session_server_port")),
            scope=rollout_scope(args),
            agent_function=agent_function(args),
            agent=_agent_settings(read),
            **_given(
                version="v1" if version is True else version,
                session_server_instance_id=read("session_server_instance_id"),
                max_seq_len=read("max_seq_len"),
                agent_mode=read("custom_agent_function_mode"),
                create_timeout=read("session_create_timeout"),
                collect_timeout=read("session_collect_timeout"),
                delete_timeout=read("session_delete_timeout"),
            ),
        )

    def checked_agent_function(self) -> str | AgentFunction:
        """The agent function, `module:qualname` if it is named, once it is clear that it can be called.

        Raises UsageError, naming the flag, where no call can work with these settings.
        """
        function = self.agent_function
        if function is None:
            raise UsageError("there is no agent function: set --custom-agent-function-path to pkg.module.function")
        for address in self.session_servers:
            check_agent_call(self.agent_mode, self.agent, f"http://{address}")
        if callable(function) and self.agent_mode == Mode.INLINE:
            return function
        return function_path(function)


def host_and_port(ip: str, port: Any) -> str:
    """`ip:port`, with brackets around an IPv6 address."""
    return f"[{ip}]:{port}" if ":" in ip and not ip.startswith("[") else f"{ip}:{port}"


def _addresses(ip: str | None, ports: Any) -> tuple[str, ...]:
    if ip is None or ports is None:
        return ()
    several = ports if isinstance(ports, Sequence) and not isinstance(ports, str) else [ports]
    return tuple(host_and_port(ip, port) for port in several)


def _given(**values: Any) -> dict[str, Any]:
    """Those that are not None: the class has the others' defaults."""
    return {name: value for name, value in values.items() if value is not None}


def _agent_settings(read: Callable[[str], Any]) -> AgentSettings:
    token_file = read("custom_agent_function_worker_token_file")
    return AgentSettings(
        **_given(
            worker_urls=_several(read("custom_agent_function_worker_url")),
            worker_env=_several(read("custom_agent_function_worker_env")),
            worker_token_file=None if token_file is None else Path(token_file),
        )
    )


def _several(value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = value.split(",") if isinstance(value, str) else value
    return tuple(item.strip() for item in items if item.strip())


def rollout_scope(args: Any) -> str | None:
    """What an abort of this rollout's agent calls is asked for by: the router's `ip:port`, None without a router."""
    if isinstance(args, DriverSettings):
        return args.scope
    ip, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    return None if ip is None or port is None else host_and_port(ip, port)


def agent_function(args: Any) -> str | AgentFunction | None:
    """The agent function of a DriverSettings, or of an object with its attributes."""
    if isinstance(args, DriverSettings):
        return args.agent_function
    return cast(str | AgentFunction | None, getattr(args, "custom_agent_function_path", None))
