"""The comparison reaches every stage, and finds an implementation that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_ref.testing.cases import load_cases
from miles_ref.testing.check import judge
from miles_ref.testing.targets import ReferenceTarget
from tests.golden.oracle import compare, run_case

STAGES = ["v1/assemble", "v1/encode", "v1/decode", "v1/match", "v2/assemble", "v2/encode", "v2/decode", "v2/match"]


def test_the_count_is_spread_over_the_stages_and_seeds_share_no_case() -> None:
    numbers: dict[str, list[int]] = {}
    for chunk in compare.chunks(3, 4003):
        numbers.setdefault(chunk.stage, []).extend(chunk.numbers)
    assert list(numbers) == STAGES
    assert [len(of_stage) for of_stage in numbers.values()] == [501, 501, 501, 500, 500, 500, 500, 500]
    assert all(len(set(of_stage)) == len(of_stage) for of_stage in numbers.values())
    other = {number for chunk in compare.chunks(4, 4003) for number in chunk.numbers}
    assert not other & set(numbers["v1/assemble"])


def test_the_package_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--count", "160", "--processes", "1", "--out", str(tmp_path)]
    assert compare.main(arguments) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"160 cases compared ({', '.join(f'{stage} 20' for stage in STAGES)}): none disagree")
    assert list(tmp_path.iterdir()) == []


def test_a_disagreement_fails_and_becomes_a_case_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(case: dict[str, Any]) -> dict[str, Any]:
        expect = run_case(case)
        return {"match": not expect["match"]} if case["kind"] == "match" and case["version"] == "v2" else expect

    monkeypatch.setattr(compare, "run_case", wrong)
    (tmp_path / "v1-match-random-999999.json").write_text("{}", encoding="utf-8")
    assert compare.main(["--count", "240", "--processes", "1", "--out", str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "v1/match 30, " in last
    assert "v2/match 30 (30 disagree)): 30 disagree" in last
    cases = load_cases([tmp_path])
    assert len(cases) == compare.MOST_FILES
    target = ReferenceTarget()
    assert all(judge(case, target).bad for case in cases)


def test_files_of_others_stay(tmp_path: Path) -> None:
    other = tmp_path / "bench.json"
    other.write_text("{}", encoding="utf-8")
    (path,) = compare.write([compare.expected_case("match", "v1", 0)], tmp_path)
    assert compare.write([], tmp_path) == []
    assert other.exists()
    assert not path.exists()


def test_a_refusal_that_names_another_fault_agrees_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = next(compare.chunks(0, 800))
    refused = [
        number for number in chunk.numbers if "error" in compare.expected_case("assemble", "v1", number)["expect"]
    ]
    assert refused

    def other_words(case: dict[str, Any]) -> dict[str, Any]:
        expect = run_case(case)
        return {**expect, "mentions": ["no message says this"]} if "error" in expect else expect

    monkeypatch.setattr(compare, "run_case", other_words)
    assert compare.compare(chunk) == compare.Compared([], len(refused))


def test_a_refusal_beside_an_answer_is_a_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = [n for n in range(12) if "error" not in compare.expected_case("encode", "v1", n)["expect"]]
    assert answered
    monkeypatch.setattr(compare, "run_case", lambda case: {"error": "refused", "mentions": ["never said"]})
    found = compare.compare(compare.Chunk("v1", "encode", range(12)))
    assert [case["id"] for case in found.disagreeing] == [f"v1/encode/random-{number:06}" for number in answered]
    assert found.named_otherwise == 12 - len(answered)
