"""The corpus in pytest: one test a case, its id the case's id.

pytest loads this in every run of an environment where the package is installed, so nothing heavy is imported until a
case file is collected. In the repository tests/golden is collected like any folder; elsewhere `--miles-corpus` adds the
corpus that the wheel carries. The options choose whom it judges, as those of `miles-ref check` do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from miles_ref.testing.cases import Case
    from miles_ref.testing.expectations import ExpectedFailure
    from miles_ref.testing.targets import Target

_RUN = pytest.StashKey["CorpusRun"]()
_IDS = pytest.StashKey[dict[str, tuple[Path, int]]]()
"""Ids of the cases that were collected, with the file and the place in it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `miles-ref check`, with a prefix."""
    group = parser.getgroup("miles-ref", "cases of the miles-ref corpus")
    group.addoption("--miles-corpus", action="store_true", help="Collect the corpus of the installed package, too.")
    group.addoption("--miles-target", metavar="TARGET", help='server:"...", http://..., worker:"...", program:"...".')
    group.addoption("--miles-picker", metavar="PICKER", help="Judge a picker by its laws.")
    group.addoption("--miles-merger", metavar="MERGER", help="Judge a merger by its laws.")
    group.addoption("--miles-plugin-set", metavar="NAME", help="Judge a whole plugin set.")
    group.addoption("--miles-backend-listen", metavar="HOST:PORT", help="Backend address of a running server.")
    group.addoption("--miles-server-version", choices=["v1", "v2"], help="Sessions of a running server; v1.")
    group.addoption("--miles-server-config", metavar="JSON", help="Config of a running server.")
    group.addoption(
        "--miles-provides", action="append", default=[], metavar="NAME", help="An optional capability of the target."
    )
    group.addoption("--miles-expectations", metavar="FILE", help="File of known failures, strict.")


_CHOICES = ("target", "picker", "merger", "plugin-set", "backend-listen", "server-version", "server-config", "provides")


def pytest_configure(config: pytest.Config) -> None:
    """Add the shipped corpus to what is collected, if it is asked for; refuse options that name nobody to judge.

    Raises pytest.UsageError.
    """
    known_failures(config)
    if any(config.getoption(f"--miles-{name}") not in (None, []) for name in _CHOICES):
        run = CorpusRun.of(config)
        if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
            # The processes of pytest-xdist have a target each; this one only had to find a mistake.
            del config.stash[_RUN]
            run.close()
    if config.getoption("--miles-corpus"):
        from miles_ref.testing.corpus import case_folders, corpus_root

        given = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
        folders = [str(folder) for folder in case_folders(corpus_root())]
        config.args = [*given, *(folder for folder in folders if folder not in given)]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Take the case files of a corpus."""
    if file_path.suffix != ".json":
        return None
    from miles_ref.testing.corpus import is_case_file

    return CaseFile.from_parent(parent, path=file_path) if is_case_file(file_path) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Refuse an expectation that matches no case that was collected, and a capability that none requires.

    A process of pytest-xdist cannot end the run by an error of usage: its only test then is one that says the mistake.
    """
    wrong = _mistake(config, [item.case for item in items if isinstance(item, CaseItem)])
    if wrong is not None and not hasattr(config, "workerinput"):
        raise pytest.UsageError(wrong)
    yield
    if wrong is not None:
        items[:] = [MistakeItem.from_parent(session, name="miles-ref options", mistake=wrong)]


def _mistake(config: pytest.Config, cases: list[Case]) -> str | None:
    """What the options say of cases that are not among the collected ones; where there are none, nothing."""
    if not cases:
        return None
    from miles_ref.errors import UsageError
    from miles_ref.testing.check import check_provides

    try:
        check_provides(cases, config.getoption("--miles-provides"), "--miles-provides")
    except UsageError as error:
        return str(error)
    for entry in known_failures(config):
        if not any(entry.matches(case.id) for case in cases):
            return f"{entry.where}: {entry.pattern!r} matches no case that was collected"
    return None


def known_failures(config: pytest.Config) -> list[ExpectedFailure]:
    """The entries of the expectation file, if there is one. Raises pytest.UsageError."""
    from miles_ref.errors import UsageError
    from miles_ref.testing.expectations import read_expectations

    file = config.getoption("--miles-expectations")
    try:
        return read_expectations(Path(file)) if file else []
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what the target started."""
    run = config.stash.get(_RUN, None)
    if run is not None:
        del config.stash[_RUN]
        run.close()


class CorpusRun:
    """What the cases of one process share: the target and the expectation file. Raises pytest.UsageError."""

    def __init__(self, config: pytest.Config) -> None:
        from miles_ref.errors import MilesRefError
        from miles_ref.testing.targets import choose_target, read_config

        self.known = known_failures(config)
        try:
            self.target: Target = choose_target(
                config.getoption("--miles-target"),
                picker=config.getoption("--miles-picker"),
                merger=config.getoption("--miles-merger"),
                plugin_set=config.getoption("--miles-plugin-set"),
                backend_listen=config.getoption("--miles-backend-listen"),
                server_version=config.getoption("--miles-server-version"),
                server_config=read_config(config.getoption("--miles-server-config"), "--miles-server-config"),
                provides=config.getoption("--miles-provides"),
            )
        except MilesRefError as error:
            raise pytest.UsageError(f"whom the miles-ref corpus judges: {error}") from error

    @classmethod
    def of(cls, config: pytest.Config) -> CorpusRun:
        """The one of this process, made when it is first asked for."""
        if _RUN not in config.stash:
            config.stash[_RUN] = cls(config)
        return config.stash[_RUN]

    def close(self) -> None:
        """End what the target started."""
        self.target.close()


class CaseFile(pytest.File):
    """A file of cases."""

    def collect(self) -> Iterator[pytest.Item]:
        """One item a case. Raises CollectError for what is not of the format."""
        from miles_ref.errors import CaseError
        from miles_ref.testing.cases import parse_file

        try:
            cases = parse_file(self.path)
        except CaseError as error:
            raise self.CollectError(str(error)) from error
        known, here = self.config.stash.setdefault(_IDS, {}), self.path.resolve()
        for at, case in enumerate(cases):
            first = known.setdefault(case.id, (here, at))
            if first != (here, at):  # A file that is named twice may be collected twice.
                raise self.CollectError(f"{self.path}: the id {case.id!r} is used twice, first in {first[0]}")
            yield CaseItem.from_parent(self, name=case.id, case=case)


class CaseFailure(Exception):
    """A case that does not hold; its text is the whole report."""


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, case: Case, **rest: Any) -> None:
        super().__init__(**rest)
        self.case = case
        for tag in ("golden", case.kind):
            self.keywords[tag] = tag
        for tag in case.tags:
            self.keywords[tag] = tag

    def runtest(self) -> None:
        """Judge the case; a skip, or CaseFailure."""
        from miles_ref.testing.check import judge
        from miles_ref.testing.expectations import expected
        from miles_ref.testing.verdict import Outcome

        run = CorpusRun.of(self.config)
        verdict = expected(judge(self.case, run.target), run.known, set())
        self.user_properties.append(("why", verdict.why))
        if verdict.outcome is Outcome.SKIPPED:
            pytest.skip(verdict.details[0])
        if verdict.outcome is Outcome.EXPECTED_FAILURE:
            pytest.xfail(verdict.details[0])
        if verdict.bad:
            lines = (f"{verdict.outcome}: {self.case.id}", f"why: {verdict.why}", f"spec: {verdict.spec}")
            raise CaseFailure("\n".join((*lines, *(f"- {detail}" for detail in verdict.details))))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A failed case is shown by its own words, anything else as a traceback."""
        if isinstance(excinfo.value, CaseFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the case stands."""
        return self.path, None, self.case.id


class MistakeItem(pytest.Item):
    """A mistake in the options, as a test that fails."""

    def __init__(self, *, mistake: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.mistake = mistake

    def runtest(self) -> None:
        """Raises CaseFailure."""
        raise CaseFailure(self.mistake)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The mistake alone."""
        return self.mistake

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """No file: it stands on the command line."""
        return self.path, None, self.name
