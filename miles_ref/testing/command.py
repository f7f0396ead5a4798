"""`miles-ref case run` and `miles-ref case propose`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from miles_ref.errors import CaseError, UsageError
from miles_ref.testing.cases import load_sound_cases
from miles_ref.testing.check import judge
from miles_ref.testing.check_command import UsageFailure
from miles_ref.testing.targets import choose_target
from miles_ref.testing.verdict import Outcome


@click.group()
def case() -> None:
    """Cases: data that pins the contract (cases.md)."""


@case.command("run")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object a case, then one with the counts.")
@click.option(
    "--target",
    help='Whom to judge, this package by default: server:"COMMAND", worker:"COMMAND" or program:"COMMAND".',
)
def run(paths: tuple[Path, ...], as_json: bool, target: str | None) -> None:
    """Run the cases of files or folders.

    A case that is not of the format has failed, and the others are run. One that the target cannot be asked counts as
    neither. Exit status 0 only when none failed and at least one ran.
    """
    try:
        cases, faults = load_sound_cases(paths)
        judged = choose_target(target)
    except (CaseError, UsageError) as error:
        raise UsageFailure(str(error)) from error
    passed, failed = 0, len(faults)
    for fault in faults:
        click.echo(json.dumps({"type": "fault", "detail": fault}, ensure_ascii=False) if as_json else fault)
    try:
        for one in cases:
            verdict = judge(one, judged)
            passed += verdict.outcome is Outcome.PASSED
            failed += verdict.bad
            if as_json:
                click.echo(json.dumps(verdict.to_json(), ensure_ascii=False))
            elif verdict.bad:
                click.echo(f"{one.id}: {one.why} {verdict.details[0]}".replace(":  ", ": "))
    finally:
        judged.close()
    click.echo(json.dumps({"passed": passed, "failed": failed}) if as_json else f"{passed} passed, {failed} failed")
    sys.exit(0 if passed and not failed else 1)


@case.command("propose")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--reason", help="Why these expectations are right; without it they are shown, not written.")
def propose(file: Path, reason: str | None) -> None:
    """Fill in, or change, the expectations of FILE's cases from the independent oracle.

    Shows each difference, and where this package gives something else. They are written only with a reason, which is
    kept in the corpus. Exit status 1 where something is proposed and not written.
    """
    from miles_ref.testing import propose as proposals

    try:
        found = proposals.propose(file, proposals.load_oracle())
        for one in found:
            click.echo(f"{one.case_id}\n{one.difference()}")
            if one.ours is not None:
                click.echo(f"  this package gives something else: {one.ours}")
        if found and reason and reason.strip():
            proposals.accept(file, found, reason.strip())
    except CaseError as error:
        raise UsageFailure(str(error)) from error
    written = bool(reason and reason.strip())
    state = "written" if written else 'not written: say why with --reason "..."'
    click.echo(f"{len(found)} expectations {state}" if found else "every expectation is the oracle's")
    sys.exit(0 if written or not found else 1)
