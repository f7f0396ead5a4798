"""The command line: one thin entry; each room brings its own commands."""

from __future__ import annotations

import click

from miles_ref.engine.command import engine_command, prove_command


@click.group()
def main() -> None:
    """Reference session server, sample assembly and corpus for agentic RL."""


main.add_command(engine_command)
main.add_command(prove_command)
