"""The command line: one thin entry; each room brings its own commands, imported when they are used."""

from __future__ import annotations

from importlib import import_module

import click

from miles_ref import __version__

COMMANDS = {
    "case": ("miles_ref.testing.command:case", "Run cases of the corpus, or propose one."),
    "check": ("miles_ref.testing.check_command:check_command", "Check a plugin, a server or a program."),
    "demo": ("miles_ref.demo.command:demo_command", "Run one episode end to end and prove its samples."),
    "engine": ("miles_ref.engine.command:engine_command", "Serve a small real model that speaks SGLang's chat API."),
    "plugins": ("miles_ref.plugins.command:plugins_group", "Show the installed plugins."),
    "prove": ("miles_ref.engine.command:prove_command", "Prove the samples in a payload file."),
    "serve": ("miles_ref.server.command:serve_command", "Serve sessions before a backend."),
    "tree": ("miles_ref.trajectory.command:tree_command", "Draw the tree of a session or of a payload."),
    "worker": ("miles_ref.agents.command:worker_group", "Look at an agent worker."),
}
"""Name to where the command is and what it does: `miles-ref --help` imports none of them."""


class LazyGroup(click.Group):
    """A group whose commands are imported on use."""

    def list_commands(self, context: click.Context) -> list[str]:
        """All names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The command itself; None for a name that there is not."""
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The help's list, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(context)])


@click.group(cls=LazyGroup)
@click.version_option(__version__)
def main() -> None:
    """Reference session server, sample assembly and corpus for agentic RL."""
