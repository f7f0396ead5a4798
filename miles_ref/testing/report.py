"""Reports of a run: JSON lines with header and footer, and what is made of them: JUnit, an HTML page, a badge.

The footer says that the run came to its end and how many verdicts there are; a report without it is refused, so that a
run that broke off is never read as a good one. No clock here: `started` is passed in.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from xml.etree import ElementTree

from miles_ref.errors import UsageError
from miles_ref.testing.verdict import BAD, Outcome, Verdict, count, sentence

FORMAT = 1
"""Version of the report's format."""


@dataclass(frozen=True)
class Report:
    """A finished run: whom it judged, with what, and the verdicts. `problems` are faults of the run as a whole."""

    target: str
    corpus: str
    started: str
    verdicts: Sequence[Verdict]
    problems: Sequence[str] = field(default_factory=tuple)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        return sentence(self.verdicts, self.target, self.problems)

    @property
    def good(self) -> bool:
        """Whether something was judged, all of it holds, and nothing is wrong with the run."""
        judged = any(verdict.outcome is not Outcome.SKIPPED for verdict in self.verdicts)
        return judged and not self.problems and not any(verdict.bad for verdict in self.verdicts)


def to_lines(report: Report) -> list[str]:
    """The report as JSON lines: one header, one verdict a case, one footer."""
    header = {
        "type": "header",
        "format": FORMAT,
        "target": report.target,
        "corpus": report.corpus,
        "started": report.started,
        "versions": dict(report.versions),
    }
    footer = {
        "type": "footer",
        "cases": len(report.verdicts),
        "counts": count(report.verdicts),
        "problems": list(report.problems),
        "good": report.good,
        "sentence": report.sentence,
    }
    return [json.dumps(line) for line in (header, *(verdict.to_json() for verdict in report.verdicts), footer)]


def from_lines(lines: Iterable[str]) -> Report:
    """The inverse of `to_lines`. Raises UsageError where header or footer is missing or does not fit the verdicts."""
    try:
        parsed = [json.loads(line) for line in lines if line.strip()]
        kinds = [line["type"] for line in parsed]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            "not a report: a file that check --report wrote has a JSON object with a type in each line"
        ) from error
    if not kinds or kinds[0] != "header":
        raise UsageError("not a report: it does not begin with a header line")
    if kinds[-1] != "footer":
        raise UsageError("the report has no footer: the run that wrote it did not come to its end")
    if kinds[1:-1] != ["verdict"] * (len(kinds) - 2):
        raise UsageError("not a report: between header and footer stand other lines than verdicts")
    header, footer = parsed[0], parsed[-1]
    try:
        report = Report(
            target=header["target"],
            corpus=header["corpus"],
            started=header["started"],
            verdicts=[Verdict.from_json(line) for line in parsed[1:-1]],
            problems=tuple(footer["problems"]),
            versions=header["versions"],
        )
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"not a report: {error!r}") from error
    if footer.get("cases") != len(report.verdicts) or footer.get("counts") != count(report.verdicts):
        raise UsageError("the report's footer does not fit its verdicts: lines were lost or added")
    return report


def open_outputs(paths: Iterable[Path | None]) -> None:
    """Empty the files that a report goes to, before the run: none is lost at its end, no old one is taken for it.

    What is there and no file, such as a named pipe, is left closed: who reads it would take that for the report's end.
    Raises UsageError for a file that cannot be written.
    """
    for path in paths:
        if path is not None:
            try:
                if path.is_file() or not path.exists():
                    path.write_bytes(b"")
                elif path.is_dir() or not os.access(path, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EISDIR if path.is_dir() else errno.EACCES))
            except OSError as error:
                raise UsageError(f"the report {path} cannot be written: {error.strerror or error}") from error


def write_reports(
    report: Report,
    *,
    lines: Path | None = None,
    junit: Path | None = None,
    html: Path | None = None,
    badge: Path | None = None,
) -> None:
    """Write the forms that are asked for."""
    if lines is not None:
        lines.write_text("\n".join(to_lines(report)) + "\n", encoding="utf-8")
    if junit is not None:
        junit.write_text(to_junit(report), encoding="utf-8")
    if html is not None:
        html.write_text(to_html(report), encoding="utf-8")
    if badge is not None:
        badge.write_text(to_badge(report), encoding="utf-8")


def to_junit(report: Report) -> str:
    """JUnit XML (the xunit1 family): one testcase a verdict, its class the case's version and stage."""
    counts = count(report.verdicts)
    suite = ElementTree.Element(
        "testsuite",
        name="miles-ref check",
        tests=str(len(report.verdicts) + len(report.problems)),
        failures=str(counts["failed"] + counts["unexpected pass"]),
        errors=str(counts["error"] + len(report.problems)),
        skipped=str(counts["skipped"] + counts["expected failure"]),
        timestamp=report.started,
    )
    for verdict in report.verdicts:
        group, _, name = verdict.case_id.rpartition("/")
        test = ElementTree.SubElement(
            suite, "testcase", classname=group.replace("/", "."), name=name, time=f"{verdict.seconds:.4f}"
        )
        if verdict.outcome is Outcome.PASSED:
            continue
        tag = "error" if verdict.outcome is Outcome.ERROR else "failure" if verdict.bad else "skipped"
        message = verdict.details[0] if verdict.details else str(verdict.outcome)
        ElementTree.SubElement(test, tag, message=_xml(message)).text = _xml("\n".join((verdict.why, *verdict.details)))
    for problem in report.problems:
        test = ElementTree.SubElement(suite, "testcase", classname="run", name=_xml(problem))
        ElementTree.SubElement(test, "error", message=_xml(problem))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _xml(text: str) -> str:
    """`text` without the characters that XML 1.0 cannot hold."""
    return "".join(c if c in "\t\n\r" or (c >= " " and not "\ud800" <= c <= "\udfff") else "�" for c in text)


def to_badge(report: Report) -> str:
    """An SVG badge: cases that hold of cases that were judged."""
    judged = [verdict for verdict in report.verdicts if verdict.outcome is not Outcome.SKIPPED]
    holding = sum(verdict.outcome is Outcome.PASSED for verdict in judged)
    value = f"{holding} of {len(judged)} hold" if not report.problems else "run does not count"
    colour = "#2e7d32" if report.good else "#b3261e"
    left, right = 72, 14 + 6.6 * len(value)
    return _template("badge.svg").substitute(
        width=f"{left + right:.0f}",
        left=left,
        right=f"{right:.0f}",
        label_at=left / 2,
        value_at=f"{left + right / 2:.0f}",
        value=escape(value),
        colour=colour,
    )


def to_html(report: Report) -> str:
    """One self-contained page: the sentence, the figures by area, what is wrong with its reasons, then all cases."""
    order = {outcome: index for index, outcome in enumerate(_ORDER)}
    bad = [verdict for verdict in report.verdicts if verdict.outcome in BAD]
    bad.sort(key=lambda verdict: (not verdict.smoke, order[verdict.outcome]))
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in report.problems)
    failures = "".join(_failure(verdict) for verdict in bad)
    return _template("report.html").substitute(
        title=escape(f"{report.target}: {'holds' if report.good else 'does not hold'}"),
        state="good" if report.good else "bad",
        sentence=escape(report.sentence),
        target=escape(report.target),
        corpus=escape(report.corpus),
        started=escape(report.started),
        versions=escape(", ".join(f"{name} {version}" for name, version in report.versions.items())) or "—",
        bar=_bar(report.verdicts),
        problems=f"<ul class=problems>{problems}</ul>" if problems else "",
        failures=f"<h2>What to look at</h2>{failures}" if failures else "",
        areas=_areas(report.verdicts),
        skipped=_skipped(report.verdicts),
        all="".join(_row(verdict) for verdict in sorted(report.verdicts, key=lambda v: v.case_id)),
    )


_ORDER = (
    Outcome.ERROR,
    Outcome.FAILED,
    Outcome.UNEXPECTED_PASS,
    Outcome.EXPECTED_FAILURE,
    Outcome.SKIPPED,
    Outcome.PASSED,
)


def _css(outcome: Outcome) -> str:
    return str(outcome).replace(" ", "-")


def _bar(verdicts: Sequence[Verdict]) -> str:
    counts = count(verdicts)
    parts = [(outcome, counts[str(outcome)]) for outcome in reversed(_ORDER) if counts[str(outcome)]]
    bar = "".join(f'<i class="{_css(outcome)}" style="flex:{n}"></i>' for outcome, n in parts)
    legend = "".join(f'<span><b class="{_css(outcome)}"></b>{n} {outcome}</span>' for outcome, n in parts)
    return f"<div class=bar>{bar}</div><div class=legend>{legend}</div>"


def _area(verdict: Verdict) -> str:
    return "/".join(verdict.case_id.split("/")[:2])


def _areas(verdicts: Sequence[Verdict]) -> str:
    rows = []
    for area, group in groupby(sorted(verdicts, key=_area), key=_area):
        counts = count(members := list(group))
        judged = len(members) - counts["skipped"]
        bad = sum(verdict.bad for verdict in members)
        mark = "bad" if bad else "none" if not judged else "good"
        rows.append(
            f"<tr class={mark}><td>{escape(area)}</td><td>{len(members)}</td><td>{counts['passed']}</td>"
            f"<td>{bad or ''}</td><td>{counts['expected failure'] or ''}</td><td>{counts['skipped'] or ''}</td>"
            f"<td>{sum(verdict.seconds for verdict in members):.2f} s</td></tr>"
        )
    return "".join(rows)


def _failure(verdict: Verdict) -> str:
    details = "\n".join(verdict.details)
    spec = f"<span class=spec>{escape(verdict.spec)}</span>" if verdict.spec else ""
    return (
        f'<article class="{_css(verdict.outcome)}"><header><code>{escape(verdict.case_id)}</code>'
        f"<em>{verdict.outcome}{', smoke' if verdict.smoke else ''}</em></header>"
        f"<p>{escape(verdict.why)} {spec}</p><pre>{escape(details)}</pre></article>"
    )


def _skipped(verdicts: Sequence[Verdict]) -> str:
    def reason(verdict: Verdict) -> str:
        return verdict.details[0] if verdict.details else "no reason given"

    skipped = sorted((verdict for verdict in verdicts if verdict.outcome is Outcome.SKIPPED), key=reason)
    items = [f"<li>{len(list(group))} cases: {escape(why)}</li>" for why, group in groupby(skipped, key=reason)]
    return f"<h2>Not judged</h2><ul>{''.join(items)}</ul>" if items else ""


def _row(verdict: Verdict) -> str:
    return (
        f'<tr class="{_css(verdict.outcome)}"><td><code>{escape(verdict.case_id)}</code></td>'
        f"<td>{verdict.outcome}</td><td>{escape(verdict.why)}</td></tr>"
    )


def _template(name: str) -> Template:
    return Template(Path(__file__).with_name(name).read_text(encoding="utf-8"))
