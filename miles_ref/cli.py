"""The command line: one thin entry; each room brings its own commands, imported only when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

_COMMANDS: Mapping[str, tuple[str, str]] = {
    "report": ("miles_ref.testing.check_command:report_command", "Read a report of check; make other forms of it."),
    "serve": ("miles_ref.server.command:serve_command", "Serve sessions over HTTP, linear (v1) or tree (v2)."),
    "engine": ("miles_ref.engine.command:engine_command", "Serve the embedded backend, a small real model."),
    "demo": ("miles_ref.demo.command:demo_command", "Run one episode end to end and prove its samples."),
    "prove": ("miles_ref.engine.command:prove_command", "Prove the samples in a payload file, log prob by log prob."),
    "case": ("miles_ref.testing.command:case", "Run cases of the corpus, or propose their values."),
    "check": ("miles_ref.testing.check_command:check_command", "Check an implementation or a plugin by the corpus."),
    "plugins": ("miles_ref.plugins.command:plugins_group", "Show which plugins there are."),
    "tree": ("miles_ref.plugins.tree_command:tree_command", "Draw a session's forest."),
    "worker": ("miles_ref.agents.command:worker_group", "Ask an agent worker how it is."),
}
"""Command -> (module:attribute, what it does)."""


class _LazyGroup(click.Group):
    """Commands by name, each imported when it is asked for, so that --help is fast and needs no extra."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup)
@click.version_option(package_name="miles-ref", message="%(version)s")
def main() -> None:
    """Reference session server, sample assembly and corpus for agentic RL."""
