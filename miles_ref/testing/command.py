"""`miles-ref case run`: run cases, one line a failure, then the count."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from miles_ref.errors import CaseError, MilesRefError
from miles_ref.testing.cases import Case, load_cases
from miles_ref.testing.run import difference


@click.group()
def case() -> None:
    """Cases: data that pins the contract (cases.md)."""


@case.command("run")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object a case, then one with the counts.")
def run(paths: tuple[Path, ...], as_json: bool) -> None:
    """Run the assemble, encode, decode and match cases of files or folders.

    Exit status 0 only when none failed and at least one ran.
    """
    try:
        cases = load_cases(paths)
    except CaseError as error:
        raise click.ClickException(str(error)) from error
    failed = 0
    for one in cases:
        problem = _problem(one)
        failed += problem is not None
        if as_json:
            click.echo(json.dumps({"id": one.id, "passed": problem is None, "why": one.why, "difference": problem}))
        elif problem is not None:
            click.echo(f"{one.id}: {f'{one.why} ' if one.why else ''}{problem}")
    counts = {"passed": len(cases) - failed, "failed": failed}
    click.echo(json.dumps(counts) if as_json else f"{counts['passed']} passed, {failed} failed")
    sys.exit(0 if cases and not failed else 1)


def _problem(one: Case) -> str | None:
    try:
        return difference(one)
    except MilesRefError as error:
        return f"the case could not be run: {error}"
    except Exception as error:  # an implementation under test may break in any way; the other cases still run
        return f"the case broke with {type(error).__name__}: {error}"
