"""`miles-ref check`: judge an implementation by the corpus; `miles-ref report`: read a report again."""

from __future__ import annotations

import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from miles_ref import __version__
from miles_ref.errors import MilesRefError, UsageError

_PATH = click.Path(path_type=Path)
_MOST_SECONDS = 86400  # a day
_OUT = click.Path(path_type=Path, dir_okay=False, writable=True)


def _report_options(command: Any) -> Any:
    for option in (
        click.option("--badge", type=_OUT, help="Write an SVG badge."),
        click.option("--html", type=_OUT, help="Write one HTML page."),
        click.option("--junit", type=_OUT, help="Write JUnit XML."),
    ):
        command = option(command)
    return command


class UsageFailure(click.ClickException):
    """Nothing could be judged: a mistake in the command or its files, told apart from a verdict by its status."""

    exit_code = 2


def _seconds(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value <= _MOST_SECONDS:  # neither holds for nan
        raise click.BadParameter(f"{value:g} is no time: more than 0 and at most {_MOST_SECONDS} seconds")
    return value


@click.command("check")
@click.argument("paths", nargs=-1, type=_PATH)
@click.option("--picker", help="Judge a picker: an installed name, pkg.module.fn or ./file.py:fn.")
@click.option("--merger", help="Judge a merger, named likewise.")
@click.option("--plugin-set", metavar="NAME", help="Judge a whole plugin set.")
@click.option(
    "--target",
    help='server:"prog --port {port} --backend {backend}", http://127.0.0.1:PORT, worker:"prog", program:"prog".',
)
@click.option("--backend-listen", metavar="HOST:PORT", help="With http://: the backend address that the server has.")
@click.option("--server-version", type=click.Choice(["v1", "v2"]), help="With http://: the server's sessions; v1.")
@click.option("--server-config", metavar="JSON", help="With http://: the config that it runs with.")
@click.option("--provides", multiple=True, metavar="NAME", help="An optional capability that the target has.")
@click.option(
    "--case-timeout",
    type=float,
    callback=_seconds,
    metavar="SECONDS",
    help="How long a plugin may take for one case; 60.",
)
@click.option("-k", "--select", "patterns", multiple=True, metavar="GLOB", help="Only cases whose id matches.")
@click.option("--tag", "tags", multiple=True, help="Only cases with one of these tags.")
@click.option("--expectations", type=_PATH, help="File of known failures, strict.")
@click.option("--report", "lines", type=_OUT, help="Write the verdicts as JSON lines.")
@_report_options
@click.option("-q", "--quiet", is_flag=True, help="Print the sentence only.")
def check_command(
    paths: tuple[Path, ...],
    picker: str | None,
    merger: str | None,
    plugin_set: str | None,
    target: str | None,
    backend_listen: str | None,
    server_version: str | None,
    server_config: str | None,
    provides: tuple[str, ...],
    case_timeout: float | None,
    patterns: tuple[str, ...],
    tags: tuple[str, ...],
    expectations: Path | None,
    quiet: bool,
    lines: Path | None,
    **forms: Path | None,
) -> None:
    """Judge an implementation by the corpus, or by the cases of PATHS; without options, this package itself.

    Prints each failure with its reason, then one sentence. Exit status: 0 when something was judged and all of it holds
    or is a known failure; 1 when not; 2 for a mistake in the command, when nothing was judged.
    """
    from miles_ref.testing.cases import load_cases
    from miles_ref.testing.check import check_provides, run_all, select
    from miles_ref.testing.corpus import corpus_root
    from miles_ref.testing.expectations import apply_expectations, read_expectations
    from miles_ref.testing.isolation import CASE_SECONDS, IsolatedPlugins
    from miles_ref.testing.report import Report, open_outputs, write_reports
    from miles_ref.testing.targets import choose_target, read_config

    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        if case_timeout is not None and picker is merger is plugin_set is None:
            raise UsageError("--case-timeout is for --picker, --merger and --plugin-set: give one, or leave it out")
        known = read_expectations(expectations) if expectations else []
        cases = select(load_cases(paths or [corpus_root()]), patterns, tags)
        check_provides(cases, provides)
        chosen = choose_target(
            target,
            picker=picker,
            merger=merger,
            plugin_set=plugin_set,
            backend_listen=backend_listen,
            server_version=server_version,
            server_config=read_config(server_config, "--server-config"),
            provides=provides,
            judge_plugin=partial(IsolatedPlugins, seconds=case_timeout or CASE_SECONDS),
        )
        with _sigterm_exits():
            try:
                open_outputs([lines, *forms.values()])
                verdicts = []
                for verdict in run_all(cases, chosen):
                    verdicts.append(verdict)
                    _progress(len(verdicts), len(cases), quiet)
            finally:
                chosen.close()
    except MilesRefError as error:
        raise UsageFailure(str(error)) from error
    verdicts, problems = apply_expectations(verdicts, known)
    corpus = f"miles-ref {__version__}, {len(cases)} cases"
    versions = {"miles-ref": __version__, "Python": platform.python_version(), "aiohttp": version("aiohttp")}
    report = Report(chosen.name, corpus, started, verdicts, problems, versions)
    write_reports(report, lines=lines, **forms)
    if not quiet:
        _tell(report)
    click.echo(report.sentence)
    sys.exit(0 if report.good else 1)


@click.command("report")
@click.argument("lines", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_report_options
def report_command(lines: Path, **forms: Path | None) -> None:
    """Read a report that `miles-ref check --report` wrote; make other forms of it; print its sentence.

    A report without its footer, of a run that broke off, is refused with exit status 2.
    """
    from miles_ref.testing.report import from_lines, open_outputs, write_reports

    try:
        report = from_lines(lines.read_text(encoding="utf-8", errors="replace").splitlines())
        open_outputs(forms.values())
        write_reports(report, **forms)
    except MilesRefError as error:
        raise UsageFailure(str(error)) from error
    click.echo(report.sentence)
    sys.exit(0 if report.good else 1)


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """SIGTERM becomes SystemExit, so that what the target started is ended; not where somebody else handles it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _progress(done: int, total: int, quiet: bool) -> None:
    if not quiet and sys.stderr.isatty():
        click.echo(f"\r{done} of {total}", nl=done == total, err=True)


def _tell(report: Any) -> None:
    for verdict in report.verdicts:
        if verdict.bad:
            click.secho(f"{verdict.outcome}: {verdict.case_id}", fg="red", bold=True)
            click.echo(f"  {verdict.why}")
            for detail in verdict.details:
                click.echo(f"  - {detail}")
    for problem in report.problems:
        click.secho(problem, fg="red")
