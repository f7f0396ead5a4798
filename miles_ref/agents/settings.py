"""How agent calls are made: the flags `--custom-agent-function-*` as one object (agents.md, The caller's side)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from miles_ref.agents.environment import DEFAULT_PATTERNS, has_url_credentials
from miles_ref.errors import UsageError


class Mode(StrEnum):
    """Where a call runs."""

    INLINE = "inline"
    SUBPROC = "subproc"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of agent calls; durations in seconds. Each of the first five has a flag of the driver.

    - `worker_urls`: --custom-agent-function-worker-url, one or several http URLs.
    - `worker_env`: --custom-agent-function-worker-env, shell patterns of the variables that travel.
    - `worker_token_file`: --custom-agent-function-worker-token-file.
    - `window`: how long a call goes on while nothing answers, from the last answered request on.
    - `cancel_grace`: how long a cancelled subproc call may clean up; a worker has its own.

    The rest is for tests and unusual networks: `poll_wait` (how long a poll is held, at most 24), `poll_margin` (what a
    poll's read timeout is over its wait), `request_timeout` (of other requests), `connect_timeout`, and the first and
    the longest pause before a repeat.
    """

    worker_urls: tuple[str, ...] = ()
    worker_env: tuple[str, ...] = DEFAULT_PATTERNS
    worker_token_file: Path | None = None
    window: float = 60.0
    cancel_grace: float = 120.0
    poll_wait: float = 24.0
    poll_margin: float = 10.0
    request_timeout: float = 35.0
    connect_timeout: float = 10.0
    first_pause: float = 0.1
    longest_pause: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "worker_urls", tuple(_checked_url(url) for url in self.worker_urls))

    @property
    def held_wait(self) -> float:
        """How long a poll asks to be held: well under the window, so that a quiet call is no lost worker."""
        return min(self.poll_wait, self.window / 2)


def check_mode(mode: str, settings: AgentSettings) -> None:
    """Raise UsageError for an unknown mode, and for mode worker without a URL."""
    if mode not in list(Mode):
        raise UsageError(f"--custom-agent-function-mode {mode!r} is unknown: choose inline, subproc or worker")
    if mode == Mode.WORKER and not settings.worker_urls:
        raise UsageError(
            "--custom-agent-function-mode worker needs --custom-agent-function-worker-url: the URL that "
            "`python -m miles_ref.worker` prints"
        )


def check_agent_call(mode: str, settings: AgentSettings, base_url: str) -> None:
    """Refuse settings with which no call can work, before a session is opened (agents.md, The caller's side).

    Raises UsageError: an unknown mode; mode worker without a URL, without the token file that it names, or with a
    worker on another host and a `base_url` that only this host can reach.
    """
    check_mode(mode, settings)
    if mode != Mode.WORKER:
        return
    read_token(settings)
    if not _is_loopback_url(base_url):
        return
    for url in settings.worker_urls:
        if not _is_loopback_url(url):
            raise UsageError(
                f"the agent would be told base_url {base_url}, which is on loopback, but the worker "
                f"{url} (--custom-agent-function-worker-url) is on another host: let the session server listen on an "
                "address that the worker can reach"
            )


def read_token(settings: AgentSettings) -> str | None:
    """The token for the workers, as read_token_file."""
    return read_token_file(settings.worker_token_file, "--custom-agent-function-worker-token-file")


def read_token_file(path: Path | None, flag: str) -> str | None:
    """The token in a file that `flag` names; None without a file. Raises UsageError if there is no token in it."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise UsageError(f"{flag} {path} cannot be read: {exc.strerror}") from None
    except UnicodeDecodeError as exc:
        raise UsageError(f"{flag} {path} is not UTF-8 text, byte {exc.start} on: write the token alone to it") from None
    if not token:
        raise UsageError(f"{flag} {path} is empty")
    return token


def _is_loopback_url(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _checked_url(url: str) -> str:
    if has_url_credentials(url):
        raise UsageError(
            "--custom-agent-function-worker-url must not hold credentials; give the token by "
            "--custom-agent-function-worker-token-file"
        )
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"--custom-agent-function-worker-url {url!r} is not an http URL such as http://10.0.0.7:8700")
    return url.rstrip("/")
