"""`miles-ref worker`: ask a worker how it is."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from miles_ref.agents.settings import AgentSettings, read_token_file
from miles_ref.errors import UsageError


@click.group("worker")
def worker_group() -> None:
    """Ask an agent worker how it is; `python -m miles_ref.worker` runs one."""


@worker_group.command("status")
@click.argument("url")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the worker's token.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def status_command(url: str, token_file: Path | None, as_json: bool) -> None:
    """Show the calls of the worker at URL: states, scopes, ages, child processes. No arguments, no values."""
    try:
        (base,) = AgentSettings(worker_urls=(url,)).worker_urls
        token = read_token_file(token_file, "--token-file")
    except UsageError as exc:
        raise click.UsageError(str(exc)) from None
    health = _get(f"{base}/health", token)
    calls = _get(f"{base}/calls", token)["calls"]
    if as_json:
        click.echo(json.dumps({"url": base, "health": health, "calls": calls}, indent=1))
    else:
        _show(base, health, calls)


def _get(url: str, token: str | None) -> dict[str, Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as reply:
            body: Any = json.load(reply)
    except urllib.error.HTTPError as exc:
        hint = ": give --token-file" if exc.code == 401 else ""
        raise click.ClickException(f"{url} answers {exc.code}{hint}") from None
    except (OSError, ValueError) as exc:
        raise click.ClickException(f"no worker answers at {url}: {getattr(exc, 'reason', exc)}") from None
    if not isinstance(body, dict) or "boot_id" not in body:
        raise click.ClickException(f"what answers at {url} is not an agent worker: its reply has no boot_id")
    return body


def _show(url: str, health: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    state = "draining" if health["draining"] else "serving"
    console.print(
        f"{url}  version {health['version']}  boot {health['boot_id']}  {state}  "
        f"{health['running']} of {health['max_calls']} calls run",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("call", "state", "age (s)", "child", "scope", "function", "reports")
    for call in calls:
        child = "" if call["pid"] is None else str(call["pid"])
        table.add_row(
            call["call_id"],
            call["state"],
            f"{call['age']:.1f}",
            child,
            escape(call["scope"] or ""),
            escape(call["fn"]),
            str(call["reports"]),
        )
    console.print(table)
