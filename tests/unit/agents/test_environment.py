"""Which variables travel, which an agent's process gets, and what a provider needs."""

from __future__ import annotations

from typing import Any

import pytest

from miles_ref.agents.environment import (
    DEFAULT_PATTERNS,
    OWN_TOKEN_VARIABLES,
    PROVIDER_CREDENTIALS,
    child_environment,
    harbor_env_vars,
    has_url_credentials,
    never_sent,
    provision_provider,
    sendable,
    travelling_environment,
)
from miles_ref.errors import UsageError


def test_the_defaults_send_harbor_agent_lite_and_the_providers_files_and_addresses() -> None:
    env = {"HARBOR_X": "1", "AGENT_Y": "2", "LITE_Z": "3", "HOME": "/root", "MY_AGENT_X": "4", "DAYTONA_API_URL": "u"}
    assert travelling_environment(env).env == {"HARBOR_X": "1", "AGENT_Y": "2", "LITE_Z": "3", "DAYTONA_API_URL": "u"}
    for credentials in PROVIDER_CREDENTIALS.values():
        names = {credentials.key_file_env_var, *credentials.address_env_vars}
        assert names <= set(DEFAULT_PATTERNS)
        assert set(travelling_environment(dict.fromkeys(names, "x")).env) == names


@pytest.mark.parametrize(
    "name",
    [
        *("AGENT_SECRET", "AGENT_SECRET_KEY", "AGENT_TOKEN", "AGENT_PASSWORD", "AGENT_API_KEY"),
        *("agent_secret", "Agent_Api_Key", "API_KEY", "TOKEN", "HARBORTOKEN"),
        *(name for credentials in PROVIDER_CREDENTIALS.values() for name in credentials.key_env_vars),
        *(name.lower() for credentials in PROVIDER_CREDENTIALS.values() for name in credentials.key_env_vars),
    ],
)
def test_secrets_never_travel_whatever_the_patterns_say(name: str) -> None:
    assert never_sent(name)
    assert travelling_environment({name: "value"}, ["*", name]).env == {}
    named = sendable({name: "canary-1"})
    assert named.env == {}
    assert name in named.warnings[0]
    assert "canary-1" not in named.warnings[0]


@pytest.mark.parametrize("name", ["AGENT_TOKENS", "AGENT_API_KEY_FILE", "SECRET_AGENT", "AGENT_PASSWORD_HINT"])
def test_other_names_travel(name: str) -> None:
    assert travelling_environment({name: "value"}, ["*"]).env == {name: "value"}


def test_patterns_replace_the_defaults_and_case_counts() -> None:
    env = {"HARBOR_X": "1", "MY_X": "2", "my_x": "3"}
    assert travelling_environment(env, ["MY_*"]).env == {"MY_X": "2"}
    assert travelling_environment(env, []).env == {}


@pytest.mark.parametrize(
    "value",
    [
        *(
            "https://user:secret@host/x",
            "postgres://u:s@db:5432/x",
            "HTTP://u:s@h",
            "https://token@host",
            " ftp://a:b@c ",
        ),
        *("redis://:secret@host", "ssh://git:secret@host", "see https://user:secret@host"),
        # What should have been escaped, and what looks like a port but is too long for one.
        *(
            "https://u:secret/w@h",
            "https://u:/secret@h",
            "ftp://u:a?secret@h",
            "https://u:#secret@h",
            "x://u:12secret/@h",
        ),
        *(
            "postgres://u:123456/secret@h",
            "https://u://secret@h",
            "https://u,v:secret/w@h",
            "http://a,http://u:secret/@b",
        ),
        *("http://a:80,http://u:secret/w@b", 'http://h "https://u:secret/w@h"', "http://u:secret/w,http://b/x@y"),
    ],
)
def test_a_url_with_credentials_stays_and_a_warning_names_its_variable(value: str) -> None:
    chosen = travelling_environment({"AGENT_URL": value, "AGENT_OK": "x"})
    assert chosen.env == {"AGENT_OK": "x"}
    assert len(chosen.warnings) == 1
    assert "AGENT_URL" in chosen.warnings[0]
    assert "secret" not in chosen.warnings[0]
    assert value.strip() not in chosen.warnings[0]


@pytest.mark.parametrize(
    "value",
    [
        *("https://host/a@b", "docker://registry/image@sha256:12", "user@host", "a:b@c", "", "://", "https://host:80"),
        *("ssh://git@host/x", "ssh://git@host:22/x@y", "git+ssh://git@host:org/repo@v1", "ftp://anonymous@host"),
        *("http://registry:5000/image@sha256:12", "http://[::1]:8080/a@b", '{"url": "http://h:80", "mail": "a@b"}'),
        *("http://a:80,http://b:81/x@y", "https://host/?next=a:b@c"),
        *("http://a,http://b/x@y", "http://a;http://b/x@y", "a://b|c://d/x@y", "a://b:80|c://d/x@y"),
        "http://user:123/45@host",  # Taken for a port; docs/agent-calls.md says so.
    ],
)
def test_other_values_have_no_credentials(value: str) -> None:
    assert not has_url_credentials(value)


@pytest.mark.parametrize("before", ["", "a@b,", "a@b "])
@pytest.mark.parametrize(
    "url", ["http://a,", "http://a/,", "http://a:80,", "http://a:80/x ", "a://", "a://b:", "a://b,"]
)
def test_a_long_list_of_urls_is_read_once(before: str, url: str) -> None:
    # Half an hour, if it were read again from every URL on.
    assert not has_url_credentials(before + url * 100_000)


def test_the_call_s_variables_go_over_the_host_s() -> None:
    assert child_environment({"A": "host", "B": "host"}, {"B": "call", "C": "call"}) == {
        "A": "host",
        "B": "call",
        "C": "call",
    }


def test_for_kept_names_the_host_s_value_or_absence_wins() -> None:
    assert child_environment({"A": "host"}, {"A": "call", "B": "call", "C": "call"}, keep=["A", "B"]) == {
        "A": "host",
        "C": "call",
    }


def test_a_clean_environment_starts_from_the_passed_names_alone() -> None:
    host = {"A": "host", "B": "host", "HOME": "/root"}
    assert child_environment(host, {"C": "call"}, clean=True, passed=["A", "ABSENT"]) == {"A": "host", "C": "call"}


def test_a_worker_s_own_token_stays_its_own() -> None:
    own = {"MILES_REF_WORKER_TOKEN": "x", "MILES_REF_WORKER_TOKEN_FILE": "/f"}
    host = own | {"SAME": "t0kent0k", "HEADER": "Bearer t0kent0k", "A": "t0kent0"}
    rules: dict[str, Any] = {"without": OWN_TOKEN_VARIABLES, "own_token": "t0kent0k"}
    assert child_environment(host, {}, **rules) == {"A": "t0kent0"}
    assert child_environment(host, {}, clean=True, passed=list(host), **rules) == {"A": "t0kent0"}
    assert child_environment({"SAME": "t", "PATH": "/bin:/opt/bin", "HOME": "/root"}, {}, own_token="t") == {
        "PATH": "/bin:/opt/bin",
        "HOME": "/root",
    }
    assert child_environment({"HEADER": "Bearer t0kent0"}, {}, own_token="t0kent0") == {"HEADER": "Bearer t0kent0"}


def test_without_a_token_every_variable_stays() -> None:
    host = {"EMPTY": "", "A": "1", "MILES_REF_WORKER_TOKEN": "x", "MILES_REF_WORKER_TOKEN_FILE": "/f"}
    assert child_environment(host, {}, own_token=None) == host


def provision(provider: str, remote: bool = False, env: dict[str, str] | None = None, **found: Any) -> dict[str, str]:
    return provision_provider(
        provider,
        remote,
        env=env or {},
        file_exists=lambda path: path in found.get("files", ()),
        module_exists=lambda name: found.get("sdk", True),
    )


@pytest.mark.parametrize("provider", PROVIDER_CREDENTIALS)
def test_a_local_run_needs_a_key_and_the_sdk(provider: str) -> None:
    credentials = PROVIDER_CREDENTIALS[provider]
    with pytest.raises(UsageError, match=credentials.key_env_vars[0]):
        provision(provider)
    key = {credentials.key_env_vars[0]: "the-key"}
    assert provision(provider, env=key) == {}
    assert provision(provider, files=[credentials.default_key_path]) == {}
    at = {credentials.key_file_env_var: "/keys/mine"}
    assert provision(provider, env=at, files=["/keys/mine"]) == at
    with pytest.raises(UsageError, match="/keys/mine"):
        provision(provider, env=at, files=[credentials.default_key_path])
    with pytest.raises(UsageError, match=f"pip install {credentials.sdk}"):
        provision(provider, env=key, sdk=False)


@pytest.mark.parametrize("provider", PROVIDER_CREDENTIALS)
def test_a_run_on_a_worker_needs_neither_and_still_forwards_the_address(provider: str) -> None:
    address = {PROVIDER_CREDENTIALS[provider].address_env_vars[0]: "https://sandboxes.example"}
    assert provision(provider, remote=True, env=address | {"OTHER": "x"}, sdk=False) == address
    key = {PROVIDER_CREDENTIALS[provider].key_env_vars[0]: "the-key"}
    assert provision(provider, remote=True, env=address | key, sdk=False) == address


def test_an_unknown_provider_lists_the_known() -> None:
    with pytest.raises(UsageError, match="daytona, e2b, modal"):
        provision("daytone")


def test_harbor_variables_for_both_launchers() -> None:
    env = {"E2B_DOMAIN": "example.com"}
    with pytest.raises(UsageError, match="E2B_API_KEY"):
        harbor_env_vars(provider="e2b", env=env, file_exists=lambda path: False, module_exists=lambda name: True)
    assert harbor_env_vars(
        provider="e2b",
        settings={"task": "sum"},
        agent_worker=True,
        env=env,
        file_exists=lambda path: False,
        module_exists=lambda name: False,
    ) == {"HARBOR_TASK": "sum", "HARBOR_PROVIDER": "e2b", "E2B_DOMAIN": "example.com"}
    assert harbor_env_vars(settings={"task": "sum"}) == {"HARBOR_TASK": "sum"}
