"""Which variables an agent's process gets, and which travel to a worker (agents.md, Environment that travels).

The rules are data: `PROVIDER_CREDENTIALS` names each sandbox provider's variables, `DEFAULT_PATTERNS` what goes by
default, `SECRET_ENDINGS` what never goes. Functions take the environment; none reads or changes the process's own.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

from miles_ref.errors import UsageError


@dataclass(frozen=True, slots=True)
class ProviderCredentials:
    """Where a sandbox provider's SDK finds its key and its address.

    `key_env_vars` hold the key itself and never travel. `key_file_env_var` names a file with the key, by default
    `default_key_path`; `address_env_vars` say which endpoint is meant. `sdk` is the module of the provider's SDK.
    """

    key_env_vars: tuple[str, ...]
    key_file_env_var: str
    address_env_vars: tuple[str, ...]
    default_key_path: str
    sdk: str


PROVIDER_CREDENTIALS: Mapping[str, ProviderCredentials] = MappingProxyType(
    {
        "daytona": ProviderCredentials(
            key_env_vars=("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN"),
            key_file_env_var="DAYTONA_API_KEY_FILE",
            address_env_vars=("DAYTONA_API_URL", "DAYTONA_SERVER_URL", "DAYTONA_TARGET", "DAYTONA_ORGANIZATION_ID"),
            default_key_path="~/.config/daytona/api_key",
            sdk="daytona",
        ),
        "e2b": ProviderCredentials(
            key_env_vars=("E2B_API_KEY", "E2B_ACCESS_TOKEN"),
            key_file_env_var="E2B_API_KEY_FILE",
            address_env_vars=("E2B_DOMAIN", "E2B_API_URL", "E2B_SANDBOX_URL"),
            default_key_path="~/.e2b/api_key",
            sdk="e2b",
        ),
        "modal": ProviderCredentials(
            key_env_vars=("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"),
            key_file_env_var="MODAL_CONFIG_PATH",
            address_env_vars=("MODAL_SERVER_URL", "MODAL_ENVIRONMENT", "MODAL_PROFILE"),
            default_key_path="~/.modal.toml",
            sdk="modal",
        ),
    }
)

DEFAULT_PATTERNS: tuple[str, ...] = (
    "HARBOR_*",
    "AGENT_*",
    "LITE_*",
    *(name for p in PROVIDER_CREDENTIALS.values() for name in (p.key_file_env_var, *p.address_env_vars)),
)
"""What goes to a worker unless --custom-agent-function-worker-env says otherwise (shell patterns; case counts)."""

SECRET_ENDINGS = ("SECRET", "SECRET_KEY", "TOKEN", "PASSWORD", "API_KEY")

OWN_TOKEN_VARIABLES = ("MILES_REF_WORKER_TOKEN", "MILES_REF_WORKER_TOKEN_FILE")
"""The worker's own: its agents do not get them."""

_MIN_CONTAINED_TOKEN = 8
"""Characters of a token from which on a value that contains it holds it: a shorter one stands in values by chance."""

_URL_CREDENTIALS = re.compile(
    r"""
    (?<=[a-z0-9+.-])://[^/?\#\s:]*:[^/?\#\s]+@  # user:secret@
    | (?:(?<=http)|(?<=https))://[^/?\#\s]+@   # https://token@
    """,
    re.IGNORECASE | re.VERBOSE,
)
_USER_AND_COLON = re.compile(
    r"""
    (?<=[a-z0-9+.-])://
    (?:[^/?\#:@\[,;|] | [,;|](?![a-z][a-z0-9+.-]*://))*  # of a list of URLs, not more than one
    :(?!\d{1,5}(?:[/?\#,;|]|$))                          # but not host:port/
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Before an @, the beginning of user:secret@ where the secret holds the / ? or # that it should have escaped."""

_WORD_ENDS = re.compile(r'[\s"]')
_KEY_VARIABLES = frozenset(name for p in PROVIDER_CREDENTIALS.values() for name in p.key_env_vars)


@dataclass(frozen=True, slots=True)
class Travelling:
    """The variables that go to a worker, and a warning for each that a pattern named but a rule kept back."""

    env: dict[str, str]
    warnings: tuple[str, ...]


def never_sent(name: str) -> bool:
    """Whether the value of this variable must not leave the host, whatever the patterns say (case does not count)."""
    upper = name.upper()
    return upper.endswith(SECRET_ENDINGS) or upper in _KEY_VARIABLES


def has_url_credentials(value: str) -> bool:
    """Whether the value holds a URL with credentials, as https://user:secret@host.

    A secret may hold the / ? or # that it should have escaped, unless at most five digits stand before it: that is a
    port (http://registry:5000/image@sha256:12). A user alone is no secret (ssh://git@host), but in http and https it is
    a token (https://token@host). Takes time linear in the length of the value.
    """
    if _URL_CREDENTIALS.search(value) is not None:
        return True
    # Not one expression with an @ at its end: from every :// of a list it would go through the rest of the list.
    for word in _WORD_ENDS.split(value):
        at = word.rfind("@")
        if at >= 0 and _USER_AND_COLON.search(word, 0, at + 1) is not None:
            return True
    return False


def travelling_environment(env: Mapping[str, str], patterns: Iterable[str] = DEFAULT_PATTERNS) -> Travelling:
    """Select from `env` what goes to a worker (agents.md, Environment that travels). Warnings hold names, no values."""
    wanted = tuple(patterns)
    chosen = {name: value for name, value in env.items() if any(fnmatchcase(name, pattern) for pattern in wanted)}
    return _kept_back(chosen)


def _kept_back(chosen: Mapping[str, str]) -> Travelling:
    sent: dict[str, str] = {}
    warnings = []
    for name, value in chosen.items():
        if never_sent(name):
            continue
        if has_url_credentials(value):
            warnings.append(f"{name} is not sent to the worker: its value is a URL with credentials in it")
            continue
        sent[name] = value
    return Travelling(sent, tuple(warnings))


def sendable(env: Mapping[str, str]) -> Travelling:
    """Select from variables that a caller named one by one: all but what must never be sent, with a warning each."""
    travelling = _kept_back(env)
    secrets = tuple(f"{name} is not sent to the worker: secrets never go by value" for name in env if never_sent(name))
    return Travelling(travelling.env, secrets + travelling.warnings)


def child_environment(
    host: Mapping[str, str],
    call: Mapping[str, str],
    *,
    keep: Iterable[str] = (),
    clean: bool = False,
    passed: Iterable[str] = (),
    without: Iterable[str] = (),
    own_token: str | None = None,
) -> dict[str, str]:
    """The environment of a call's process: the host's, then the call's variables (agents.md, The child process).

    For names in `keep` the host's value, or its absence, wins. With `clean` only the host's variables in `passed` are
    taken. The host's variables in `without`, and any that holds `own_token`, are left out: one whose value is the
    token, or contains it if it has 8 characters or more.
    """
    passed_names = frozenset(passed)
    kept_names = frozenset(keep)
    dropped_names = frozenset(without)
    base = {
        name: value
        for name, value in host.items()
        if (not clean or name in passed_names) and name not in dropped_names and not _holds_token(value, own_token)
    }
    return base | {name: value for name, value in call.items() if name not in kept_names}


def _holds_token(value: str, token: str | None) -> bool:
    if not token:
        return False
    return value == token or (len(token) >= _MIN_CONTAINED_TOKEN and token in value)


def provision_provider(
    provider: str,
    remote: bool = False,
    *,
    env: Mapping[str, str] | None = None,
    file_exists: Callable[[str], bool] | None = None,
    module_exists: Callable[[str], bool] | None = None,
) -> dict[str, str]:
    """Check that trials can use a sandbox provider; return the provider's variables to forward, none of them a key.

    Trials on this host (`remote=False`) need a key, in a variable or a file, and the SDK. Trials on a worker need
    neither here, because the worker has its own. The address variables, and a variable that names the key's file, are
    forwarded in both cases. `env`, `file_exists` and `module_exists` default to this process's. Raises UsageError that
    names the variables, the file or the package that is missing.
    """
    credentials = PROVIDER_CREDENTIALS.get(provider)
    if credentials is None:
        raise UsageError(f"unknown sandbox provider {provider!r}: choose one of {', '.join(PROVIDER_CREDENTIALS)}")
    variables = os.environ if env is None else env
    if not remote:
        _check_key(provider, credentials, variables, file_exists or _file_exists)
        _check_sdk(provider, credentials, module_exists or _module_exists)
    names = (credentials.key_file_env_var, *credentials.address_env_vars)
    return sendable({name: variables[name] for name in names if name in variables}).env


def harbor_env_vars(
    *,
    provider: str | None = None,
    settings: Mapping[str, str] | None = None,
    agent_worker: bool = False,
    env: Mapping[str, str] | None = None,
    file_exists: Callable[[str], bool] | None = None,
    module_exists: Callable[[str], bool] | None = None,
) -> dict[str, str]:
    """The variables with which a launcher starts a run of harbor trials (examples/harbor/run.py).

    `settings` become HARBOR_<NAME>. With `agent_worker` the trials run on a worker, so that neither the provider's key
    nor its SDK is asked for on this host. Raises UsageError as provision_provider does.
    """
    variables = {f"HARBOR_{name.upper()}": value for name, value in (settings or {}).items()}
    if provider is not None:
        variables["HARBOR_PROVIDER"] = provider
        variables |= provision_provider(
            provider, remote=agent_worker, env=env, file_exists=file_exists, module_exists=module_exists
        )
    return variables


def _check_key(
    provider: str,
    credentials: ProviderCredentials,
    env: Mapping[str, str],
    file_exists: Callable[[str], bool],
) -> None:
    if any(env.get(name) for name in credentials.key_env_vars):
        return
    path = env.get(credentials.key_file_env_var) or credentials.default_key_path
    if not file_exists(path):
        raise UsageError(
            f"no key for the sandbox provider {provider}: set one of {', '.join(credentials.key_env_vars)}, or "
            f"{credentials.key_file_env_var} to a file that exists (there is none at {path}); or run the trials on a "
            "worker that has the key"
        )


def _check_sdk(provider: str, credentials: ProviderCredentials, module_exists: Callable[[str], bool]) -> None:
    if not module_exists(credentials.sdk):
        raise UsageError(
            f"the SDK of the sandbox provider {provider} is not installed here: pip install {credentials.sdk}, or run "
            "the trials on a worker that has it"
        )


def _file_exists(path: str) -> bool:
    return os.path.isfile(os.path.expanduser(path))


def _module_exists(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
