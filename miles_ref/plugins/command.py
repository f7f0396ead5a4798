"""`miles-ref plugins list`: which plugins there are, and which of them a server with these flags would ask."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from miles_ref.errors import MilesRefError
from miles_ref.plugins.catalogue import SETS, Catalogue, Plugin
from miles_ref.plugins.guard import Implementation
from miles_ref.plugins.pipeline import Pipeline


@click.group()
def plugins_group() -> None:
    """Plugins: who decides what is trained."""


@plugins_group.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
@click.option("--use-session-server", "version", type=click.Choice(list(SETS)), default="v2", show_default=True)
@click.option("--session-sample-picker-path", "picker", help="As `miles-ref serve` has it.")
@click.option("--session-merge-function-path", "merger", help="As `miles-ref serve` has it.")
def list_plugins(as_json: bool, version: str, picker: str | None, merger: str | None) -> None:
    """List the plugins with their hooks. A hook is active where these flags would have it asked."""
    catalogue = Catalogue()
    try:
        active = Pipeline(version, picker, merger, catalogue=catalogue).asked()
    except MilesRefError as error:
        raise click.ClickException(str(error)) from error
    rows = [_row(plugin, active) for plugin in catalogue.plugins()]
    listed = {row["name"] for row in rows}
    rows += [_path_row(one) for one in active if one.origin.name not in listed]
    if as_json:
        click.echo(json.dumps({"plugins": rows, "warnings": catalogue.warnings}, indent=1))
        return
    _print(rows)
    for warning in catalogue.warnings:
        click.echo(f"warning: {warning}", err=True)


def _row(plugin: Plugin, active: list[Implementation]) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.origin.distribution,
        "version": plugin.origin.version,
        "built_in": plugin.built_in,
        "hooks": list(plugin.hooks),
        "active": [one.hook for one in active if one.origin == plugin.origin],
    }


def _path_row(one: Implementation) -> dict[str, Any]:
    absent = {"distribution": None, "version": None, "built_in": False}
    return {"name": one.origin.name, **absent, "hooks": [one.hook], "active": [one.hook]}


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold")
    for heading in ("name", "version", "hooks", "active"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        source = f"{row['distribution']} {row['version']}" if row["distribution"] else "path"
        table.add_row(row["name"], source, ", ".join(row["hooks"]), ", ".join(row["active"]))
    Console(soft_wrap=True).print(table)
