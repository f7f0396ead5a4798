"""Verdicts: what became of each case, and what that says about an implementation as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from textwrap import shorten
from typing import Any


class Outcome(StrEnum):
    """What became of a case."""

    PASSED = "passed"
    FAILED = "failed"
    """The implementation differs from the expectation."""
    ERROR = "error"
    """The case could not be run: the target does not start, crashed or hangs, or the case itself is broken."""
    SKIPPED = "skipped"
    """The target does not offer what the case needs."""
    EXPECTED_FAILURE = "expected failure"
    """It failed, as the expectation file says."""
    UNEXPECTED_PASS = "unexpected pass"
    """The expectation file says that it fails, and it holds: the entry is out of date."""


BAD = frozenset({Outcome.FAILED, Outcome.ERROR, Outcome.UNEXPECTED_PASS})


@dataclass(frozen=True, slots=True)
class Verdict:
    """One case's outcome. `details` are its differences, the error or the reason why it was skipped."""

    case_id: str
    outcome: Outcome
    kind: str = ""
    why: str = ""
    spec: str = ""
    details: tuple[str, ...] = ()
    seconds: float = 0.0
    smoke: bool = False

    @property
    def bad(self) -> bool:
        return self.outcome in BAD

    def to_json(self) -> dict[str, Any]:
        """The verdict's line of a report."""
        return {
            "type": "verdict",
            "id": self.case_id,
            "outcome": str(self.outcome),
            "kind": self.kind,
            "why": self.why,
            "spec": self.spec,
            "details": list(self.details),
            "seconds": round(self.seconds, 4),
            "smoke": self.smoke,
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Verdict:
        """The inverse of `to_json`. Raises KeyError or ValueError for what is no verdict."""
        return cls(
            case_id=line["id"],
            outcome=Outcome(line["outcome"]),
            kind=line["kind"],
            why=line["why"],
            spec=line["spec"],
            details=tuple(line["details"]),
            seconds=line["seconds"],
            smoke=line["smoke"],
        )


def count(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many verdicts there are of each outcome, zeros included."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return {str(outcome): counts[outcome] for outcome in Outcome}


def sentence(verdicts: Sequence[Verdict], target: str, problems: Sequence[str] = ()) -> str:
    """The result in one sentence: what was judged, what was not, and the first thing to look at."""
    bad = [verdict for verdict in verdicts if verdict.bad]
    judged = [verdict for verdict in verdicts if verdict.outcome is not Outcome.SKIPPED]
    smoke = next((verdict for verdict in bad if verdict.smoke), None)
    if smoke is not None:
        first = shorten(smoke.details[0] if smoke.details else smoke.why, 200, placeholder=" ...")
        return (
            f"The harness and {target} do not understand each other: smoke case {smoke.case_id} fails ({first}), "
            "so nothing else was judged."
        )
    if problems:
        return f"The run of {target} does not count: {problems[0]}."
    if not judged:
        reasons = _reasons(verdicts)
        return f"Nothing was judged: {target} offers nothing that the {len(verdicts)} chosen cases need{reasons}."
    if bad:
        kinds = ", ".join(f"{n} {name}" for name, n in count(bad).items() if n)
        return f"{target} does not hold: {len(bad)} of {len(judged)} cases ({kinds}), first {bad[0].case_id}."
    known = sum(verdict.outcome is Outcome.EXPECTED_FAILURE for verdict in judged)
    skipped = len(verdicts) - len(judged)
    notes = [f"{known} known failures"] if known else []
    notes += [f"{skipped} skipped"] if skipped else []
    return f"{target} holds in all {len(judged)} judged cases{' (' + ', '.join(notes) + ')' if notes else ''}."


def _reasons(skipped: Sequence[Verdict], most: int = 3) -> str:
    """Why cases were skipped, the most frequent reasons first."""
    counts = Counter(verdict.details[0] for verdict in skipped if verdict.details).most_common()
    shown = [f"{number} cases: {shorten(reason, 160, placeholder=' ...')}" for reason, number in counts[:most]]
    if len(counts) > most:
        shown.append(f"{len(counts) - most} further reasons")
    return f" ({'; '.join(shown)})" if shown else ""
