"""Settings of the driver, read off an object whose attributes are named as the flags are."""

from json import dumps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_ref.driver.settings import DriverSettings
from miles_ref.errors import UsageError


def args(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"session_server_ip": "10.0.0.1", "session_server_port": 30000} | more)


def test_defaults() -> None:
    settings = DriverSettings.of(args())
    assert settings.session_servers == ("10.0.0.1:30000",)
    assert (settings.version, settings.scope, settings.max_seq_len) == ("v1", None, None)
    assert (settings.collect_timeout, settings.agent_mode) == (120.0, "inline")


def test_absent_and_none_are_the_same() -> None:
    assert DriverSettings.of(args(max_seq_len=None, use_session_server=None, session_collect_timeout=None)) == (
        DriverSettings.of(args())
    )


def test_settings_are_taken_as_they_are() -> None:
    settings = DriverSettings(("h:1",), version="v2")
    assert DriverSettings.of(settings) is settings


@pytest.mark.parametrize(("value", "version"), [(True, "v1"), ("v1", "v1"), ("v2", "v2")])
def test_version(value: Any, version: str) -> None:
    assert DriverSettings.of(args(use_session_server=value)).version == version


@pytest.mark.parametrize("change", [{"scope": ""}, {"collect_timeout": 10**400}, {"create_timeout": float("nan")}])
def test_values_with_which_nothing_can_work(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(change))):
        DriverSettings(("h:1",), **change)


def test_several_instances() -> None:
    assert DriverSettings.of(args(session_server_port=[1, 2])).session_servers == ("10.0.0.1:1", "10.0.0.1:2")


def test_an_ipv6_address_gets_brackets() -> None:
    settings = DriverSettings.of(args(session_server_ip="::1", sglang_router_ip="::2", sglang_router_port=7))
    assert (settings.session_servers, settings.scope) == (("[::1]:30000",), "[::2]:7")


def test_the_scope_is_the_routers_address() -> None:
    assert DriverSettings.of(args(sglang_router_ip="10.0.0.9", sglang_router_port=3000)).scope == "10.0.0.9:3000"


@pytest.mark.parametrize("spelling", ["http://a:1,http://b:2", ["http://a:1", "http://b:2"]])
def test_worker_urls(spelling: Any) -> None:
    settings = DriverSettings.of(args(custom_agent_function_worker_url=spelling))
    assert settings.agent.worker_urls == ("http://a:1", "http://b:2")


def test_worker_settings() -> None:
    flags = {"mode": "worker", "worker_env": "A_*, B", "worker_token_file": "/t"}
    settings = DriverSettings.of(args(**{f"custom_agent_function_{name}": value for name, value in flags.items()}))
    assert (settings.agent_mode, settings.agent.worker_env) == ("worker", ("A_*", "B"))
    assert settings.agent.worker_token_file == Path("/t")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, "--custom-agent-function-path"),
        ({"path": "f"}, "--custom-agent-function-path"),
        ({"path": "m.f", "mode": "thread"}, "--custom-agent-function-mode"),
        ({"path": lambda: None, "mode": "subproc"}, "--custom-agent-function-mode inline"),
        ({"path": "m.f", "mode": "worker"}, "--custom-agent-function-worker-url"),
        ({"path": "m.f", "mode": "worker", "worker_url": "http://10.0.0.7:1"}, "--custom-agent-function-worker-url"),
    ],
)
def test_settings_with_which_no_agent_call_can_work(change: dict[str, Any], named: str) -> None:
    given = {f"custom_agent_function_{name}": value for name, value in change.items()}
    settings = DriverSettings.of(args(session_server_ip="127.0.0.1", **given))
    with pytest.raises(UsageError, match=named):
        settings.checked_agent_function()


@pytest.mark.parametrize("path", ["pkg.module.fn", "pkg.module:fn"])
def test_both_spellings_of_the_agent_function(path: str) -> None:
    assert DriverSettings.of(args(custom_agent_function_path=path)).checked_agent_function() == "pkg.module:fn"


@pytest.mark.parametrize(("mode", "given"), [("inline", dumps), ("subproc", "json:dumps")])
def test_a_function_is_named_for_other_processes(mode: str, given: Any) -> None:
    settings = DriverSettings.of(args(custom_agent_function_path=dumps, custom_agent_function_mode=mode))
    assert settings.checked_agent_function() == given


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"session_server_ip": None}, "session_server_ip"),
        ({"session_server_port": None}, "session_server_port"),
        ({"session_server_port": []}, "session_server_port"),
        ({"use_session_server": "v3"}, "'v3'"),
        ({"session_collect_timeout": 0}, "session_collect_timeout is 0"),
        ({"session_delete_timeout": float("inf")}, "session_delete_timeout is inf"),
        ({"session_create_timeout": "5"}, "session_create_timeout is '5'"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"max_seq_len": True}, "max_seq_len is True"),
        ({"max_seq_len": 1.5}, "max_seq_len is 1.5"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        DriverSettings.of(args(**change))
