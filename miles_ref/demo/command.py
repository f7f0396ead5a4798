"""The command `miles-ref demo`. It imports the driver, the engine and rich only when it runs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from miles_ref.demo import MOST_TURNS
from miles_ref.engine.settings import SEEDS

PLAIN_WIDTH = 120


@click.command("demo")
@click.option("--version", type=click.Choice(["v1", "v2"]), default="v1", show_default=True, help="v2 grows a tree.")
@click.option("--agent-mode", type=click.Choice(["inline", "subproc", "worker"]), default="inline", show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
@click.option(
    "--seed", type=click.IntRange(0, SEEDS[1]), default=0, show_default=True, help="Decides task, weights and words."
)
@click.option(
    "--steps",
    type=click.IntRange(5, MOST_TURNS - 1),  # the answer takes a turn too
    default=8,
    show_default=True,
    help="Operations of the task.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the figures, and nothing else.")
def demo_command(as_json: bool, **choices: Any) -> None:
    """Run one episode end to end and prove its samples.

    Starts the embedded engine and the session server, lets an agent solve a task with tool calls, collects the samples
    and shows them. A fresh process then recomputes the log prob of every trained token. The exit status is 0 only when
    all agree and every negative control fails. The files with samples and records stay in --out.
    """
    from rich.console import Console

    from miles_ref.demo.episode import Plan, run_demo
    from miles_ref.demo.show import show
    from miles_ref.errors import MilesRefError

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        with _progress(Console(stderr=True)) as progress:
            episode = run_demo(Plan(**choices), progress)
    except (MilesRefError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(episode.figures()))
    else:
        console = Console(highlight=False, markup=False)
        # What is read from a file or a pipe is not wrapped at the 80 columns of no terminal.
        show(episode, console if console.is_terminal else Console(highlight=False, markup=False, width=PLAIN_WIDTH))
    sys.exit(0 if episode.proven else 1)


@contextmanager
def _progress(console: Any) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, else a line for each step."""
    if not console.is_terminal:
        yield lambda step: console.print(step, highlight=False, soft_wrap=True)
        return
    with console.status("starting") as status:
        yield status.update
