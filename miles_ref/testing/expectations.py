"""Expectation files: the failures that are known. Strict, so that they cannot rot.

One entry a line, a glob on case ids and a reason: `v2/merge/*-trim*  # masks per node, not per token; our issue 41`.
Blank lines and lines that begin with # are comments. An entry that matches no judged case is a problem, and a case that
an entry names and that passes is an "unexpected pass": both fail the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from miles_ref.errors import UsageError
from miles_ref.testing.verdict import Outcome, Verdict


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """One entry: cases whose id matches `pattern` are known to fail, because of `reason`."""

    pattern: str
    reason: str
    where: str

    def matches(self, case_id: str) -> bool:
        return fnmatchcase(case_id, self.pattern)


def read_expectations(path: Path) -> list[ExpectedFailure]:
    """The entries of a file. Raises UsageError for an unreadable file, an entry without a reason, or a repeat."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"expectation file {path} cannot be read: {error}") from error
    entries: list[ExpectedFailure] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pattern, _, reason = (part.strip() for part in line.partition("#"))
        where = f"{path.name}:{number}"
        if not reason:
            raise UsageError(f"{where}: {pattern!r} has no reason; write `{pattern}  # why it is known to fail`")
        if any(entry.pattern == pattern for entry in entries):
            raise UsageError(f"{where}: {pattern!r} stands there twice")
        entries.append(ExpectedFailure(pattern, reason, where))
    return entries


def apply_expectations(
    verdicts: Iterable[Verdict], entries: Sequence[ExpectedFailure]
) -> tuple[list[Verdict], list[str]]:
    """The verdicts in the light of the entries, and the entries that match nothing that was judged, as problems.

    A failed smoke case stays failed: when the harness is miswired, no known failure explains it.
    """
    used: set[ExpectedFailure] = set()
    judged = [expected(verdict, entries, used) for verdict in verdicts]
    problems = [
        f"{entry.where}: {entry.pattern!r} matches no case that was judged; remove it or correct it"
        for entry in entries
        if entry not in used
    ]
    return judged, problems


def expected(verdict: Verdict, entries: Sequence[ExpectedFailure], used: set[ExpectedFailure]) -> Verdict:
    """One verdict in the light of the entries; those that concern it are added to `used`."""
    matching = [entry for entry in entries if entry.matches(verdict.case_id)]
    if not matching or verdict.outcome is Outcome.SKIPPED:
        return verdict
    used.update(matching)
    entry = matching[0]
    if verdict.outcome is Outcome.PASSED:
        detail = f"{entry.where} expects it to fail ({entry.reason}); it holds now: remove the entry"
        return replace(verdict, outcome=Outcome.UNEXPECTED_PASS, details=(detail,))
    if verdict.outcome is Outcome.FAILED and not verdict.smoke:
        return replace(verdict, outcome=Outcome.EXPECTED_FAILURE, details=(f"known: {entry.reason}", *verdict.details))
    return verdict
