"""`python -m miles_ref.worker`: runs agent calls for rollout processes on other hosts (agents.md, Worker)."""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from miles_ref.agents.core import CoreSettings
from miles_ref.agents.settings import read_token_file
from miles_ref.agents.worker_server import ServerSettings, is_loopback, serve
from miles_ref.errors import UsageError


def parser() -> argparse.ArgumentParser:
    """The worker's flags."""
    defaults = CoreSettings()
    flags = argparse.ArgumentParser(prog="python -m miles_ref.worker", description=__doc__)
    flags.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    flags.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    flags.add_argument("--keep-env", type=_names, action="extend", default=[], metavar="NAME,...",
                       help="variables for which this host's value, or its absence, wins over the call's")  # fmt: skip
    flags.add_argument("--clean-env", action="store_true", help="agents start from --pass-env and the call's variables")
    flags.add_argument("--pass-env", type=_names, action="extend", default=[], metavar="NAME,...",
                       help="with --clean-env: the variables of this host that agents get")  # fmt: skip
    for name, text in (
        ("orphan_timeout", "a call that nobody polls for so long is cancelled"),
        ("cancel_grace", "how long a cancelled call may clean up before SIGKILL"),
        ("outcome_ttl", "how long a fetched outcome is kept"),
        ("tombstone_ttl", "how long a call that was deleted before its submit is refused"),
    ):
        flag = "--" + name.replace("_", "-")
        flags.add_argument(flag, type=_seconds, default=getattr(defaults, name), metavar="S",
                           help=text + " (default %(default)s s)")  # fmt: skip
    flags.add_argument("--max-calls", type=_positive, default=defaults.max_calls, help="default %(default)s")
    flags.add_argument("--report-budget-bytes", type=_positive, default=defaults.report_budget_bytes,
                       help="reports kept for one call; beyond them the agent waits (default %(default)s)")  # fmt: skip
    flags.add_argument("--token-file", type=Path, help="file with the token that callers must present")
    flags.add_argument("--allow-function", nargs="+", action="extend", default=[], metavar="PATTERN",
                       help="run only functions module:qualname that match")  # fmt: skip
    flags.add_argument("--insecure", action="store_true", help="listen beyond loopback without a token")
    flags.add_argument("--agent-log-dir", type=Path, help="one file a call for what agents print (default: stderr)")
    return flags


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the flags, and serve until SIGTERM has drained the worker."""
    flags = parser()
    options = flags.parse_args(arguments)
    try:
        token = read_token_file(options.token_file, "--token-file")
    except UsageError as exc:
        flags.error(str(exc))
    if token is None and not options.insecure and not is_loopback(options.host):
        flags.error(f"--host {options.host} is not loopback: anybody who reaches it could run code here. "
                    "Give --token-file, or --insecure if the network is trusted")  # fmt: skip
    if options.pass_env and not options.clean_env:
        flags.error("--pass-env says what --clean-env lets pass: give both, or neither")
    if options.agent_log_dir is not None and not options.agent_log_dir.is_dir():
        flags.error(f"--agent-log-dir {options.agent_log_dir} is not a directory")
    core_settings = CoreSettings(
        orphan_timeout=options.orphan_timeout,
        cancel_grace=options.cancel_grace,
        outcome_ttl=options.outcome_ttl,
        tombstone_ttl=options.tombstone_ttl,
        max_calls=options.max_calls,
        report_budget_bytes=options.report_budget_bytes,
    )
    settings = ServerSettings(
        token=token,
        keep_env=tuple(options.keep_env),
        clean_env=options.clean_env,
        pass_env=tuple(options.pass_env),
        allow_functions=tuple(options.allow_function),
        agent_log_dir=options.agent_log_dir,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    _raise_descriptor_limit()
    try:
        asyncio.run(serve(core_settings, settings, options.host, options.port))
    except OSError as exc:
        sys.exit(f"the worker cannot listen on {options.host}:{options.port}: {exc.strerror}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return value


def _raise_descriptor_limit() -> None:
    """A call needs three descriptors and its poll one: the usual soft limit of 1024 would end at about 200 calls."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
