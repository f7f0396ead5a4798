"""Verdicts, expectation files and reports."""

from __future__ import annotations

import os
import select
from pathlib import Path
from xml.etree import ElementTree

import pytest

from miles_ref.errors import UsageError
from miles_ref.testing.expectations import apply_expectations, read_expectations
from miles_ref.testing.report import Report, from_lines, open_outputs, to_badge, to_html, to_junit, to_lines
from miles_ref.testing.verdict import Outcome, Verdict

GOOD = Verdict("v1/fold/one", Outcome.PASSED, "assemble", "why one", "pipeline.md#fold", (), 0.5)
BAD = Verdict("v2/merge/two", Outcome.FAILED, "assemble", "why <two>", "pipeline.md#v2: tree", ("got 1, expected 0",))
LEFT = Verdict("v1/http/three", Outcome.SKIPPED, "http", "why three", "", ("needs a server",))


def report(*verdicts: Verdict, problems: tuple[str, ...] = ()) -> Report:
    return Report("the target", "a corpus", "2026-01-01T00:00:00+00:00", list(verdicts), problems, {"x": "1"})


def test_a_report_survives_its_lines() -> None:
    one = report(GOOD, BAD, LEFT, problems=("a problem",))
    assert from_lines(to_lines(one)) == one


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: lines[:-1],
        lambda lines: lines[1:],
        lambda lines: [*lines[:1], *lines[2:]],
        lambda lines: [*lines, lines[1]],
        lambda lines: [lines[0], lines[1], lines[1], *lines[2:]],
        lambda lines: [lines[0], "{", *lines[1:]],
        lambda lines: [],
    ],
    ids=["no footer", "no header", "a verdict lost", "a line after the footer", "a line twice", "no JSON", "empty"],
)
def test_a_report_that_is_not_whole_is_refused(spoil: object) -> None:
    lines = to_lines(report(GOOD, BAD))
    with pytest.raises(UsageError):
        from_lines(spoil(lines))  # type: ignore[operator]


def test_what_is_good() -> None:
    assert report(GOOD, LEFT).good
    assert not report(GOOD, BAD).good
    assert not report(LEFT).good
    assert not report().good
    assert not report(GOOD, problems=("a pattern matches nothing",)).good


def test_sentences() -> None:
    assert report(GOOD, LEFT).sentence == "the target holds in all 1 judged cases (1 skipped)."
    assert "1 of 2 cases (1 failed), first v2/merge/two" in report(GOOD, BAD).sentence
    assert "Nothing was judged" in report(LEFT).sentence
    assert "1 chosen cases need (1 cases: needs a server)." in report(LEFT).sentence
    others = [Verdict(f"v1/http/{at}", Outcome.SKIPPED, details=(f"reason {at}",)) for at in range(4)]
    assert report(LEFT, LEFT, *others).sentence.endswith(
        "(2 cases: needs a server; 1 cases: reason 0; 1 cases: reason 1; 2 further reasons)."
    )
    smoke = Verdict("v1/http/health", Outcome.ERROR, smoke=True, details=("no answer",))
    assert "do not understand each other" in report(smoke, GOOD).sentence
    assert "does not count: a pattern" in report(GOOD, problems=("a pattern matches nothing",)).sentence


def test_junit_counts_and_escapes() -> None:
    (suite,) = ElementTree.fromstring(to_junit(report(GOOD, BAD, LEFT)))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped"), suite.get("errors")) == (
        "3",
        "1",
        "1",
        "0",
    )
    assert [case.get("classname") for case in suite] == ["v1.fold", "v2.merge", "v1.http"]
    assert "why <two>" in (suite[1][0].text or "")


def test_junit_holds_any_text() -> None:
    strange = Verdict("v1/a/b", Outcome.FAILED, details=("nul \x00, surrogate \ud800",))
    ElementTree.fromstring(to_junit(report(strange)))


def test_the_page_shows_the_failure_and_escapes_it() -> None:
    page = to_html(report(GOOD, BAD, LEFT))
    assert "why &lt;two&gt;" in page
    assert "got 1, expected 0" in page
    assert "needs a server" in page
    assert "why <two>" not in page


def test_the_badge_counts_what_was_judged() -> None:
    assert "1 of 2 hold" in to_badge(report(GOOD, BAD, LEFT))
    assert "does not count" in to_badge(report(GOOD, problems=("x",)))


def expectations(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "known.txt"
    path.write_text(text)
    return path


def test_a_known_failure_is_expected(tmp_path: Path) -> None:
    entries = read_expectations(expectations(tmp_path, "# ours\n\nv2/merge/*  # masks per node; issue 41\n"))
    verdicts, problems = apply_expectations([GOOD, BAD], entries)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.PASSED, Outcome.EXPECTED_FAILURE]
    assert problems == []
    assert report(*verdicts).good


def test_an_expected_failure_that_passes_is_bad(tmp_path: Path) -> None:
    entries = read_expectations(expectations(tmp_path, "v1/fold/*  # broken\n"))
    verdicts, problems = apply_expectations([GOOD], entries)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.UNEXPECTED_PASS]
    assert problems == []
    assert not report(*verdicts).good


def test_a_pattern_that_matches_nothing_is_a_problem(tmp_path: Path) -> None:
    entries = read_expectations(expectations(tmp_path, "v9/*  # gone\nv1/http/*  # only skipped\n"))
    _, problems = apply_expectations([GOOD, LEFT], entries)
    assert len(problems) == 2


def test_a_smoke_failure_is_never_expected(tmp_path: Path) -> None:
    smoke = Verdict("v1/http/health", Outcome.FAILED, smoke=True)
    entries = read_expectations(expectations(tmp_path, "v1/http/*  # known\n"))
    verdicts, _ = apply_expectations([smoke], entries)
    assert verdicts[0].outcome is Outcome.FAILED


@pytest.mark.parametrize("text", ["v1/fold/*\n", "v1/fold/*  #\n", "a  # b\na  # c\n"])
def test_entries_need_a_reason_and_stand_once(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"known\.txt:"):
        read_expectations(expectations(tmp_path, text))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_expectations(tmp_path / "none.txt")


def test_outputs_are_emptied_and_a_pipe_is_left_alone(tmp_path: Path) -> None:
    file, pipe, new = (tmp_path / name for name in ("file", "pipe", "new"))
    file.write_text("an old report")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        open_outputs([file, pipe, None, new])
        # Opened and closed by a writer, the pipe would be at its end: poll then says so.
        seen = select.poll()
        seen.register(reader)
        assert seen.poll(0) == []
    finally:
        os.close(reader)
    assert file.read_bytes() == new.read_bytes() == b""
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        open_outputs([tmp_path])
    with pytest.raises(UsageError, match="none/report cannot be written: No such file"):
        open_outputs([tmp_path / "none" / "report"])


@pytest.mark.parametrize("line", ['{"a": 1}', "[1]", "1", "no JSON"])
def test_a_file_that_is_no_report_is_told_what_one_is(line: str) -> None:
    with pytest.raises(UsageError, match="not a report: a file that check --report wrote"):
        from_lines([line])
