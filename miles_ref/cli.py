"""The command line: one thin entry; each room brings its own commands."""

from __future__ import annotations

import click


@click.group()
def main() -> None:
    """Reference session server, sample assembly and corpus for agentic RL."""
