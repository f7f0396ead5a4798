"""Cases: the closed format, the exact comparison, and `miles-ref case run` (cases.md)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from miles_ref.errors import CaseError
from miles_ref.testing.cases import CONFIG_DEFAULTS, load_cases, parse_case
from miles_ref.testing.command import case as case_group
from miles_ref.testing.compare import expectation_difference, first_difference

STORED = {"role": "user", "content": "a"}


def match_case(case_id: str = "match/a", matches: bool = True, **changed: Any) -> dict[str, Any]:
    case = {
        "id": case_id,
        "kind": "match",
        "input": {"stored": STORED, "replayed": STORED, "matcher": "strict"},
        "expect": {"match": matches},
    }
    return case | changed


def test_what_a_case_leaves_out_are_the_defaults() -> None:
    case = parse_case(match_case(config={"max_nodes": 3}))
    assert (case.version, case.why, case.tags) == ("v1", "", ())
    assert case.config == {**CONFIG_DEFAULTS, "max_nodes": 3}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([], "a case is an object"),
        ({}, "a case has no id"),
        (match_case(surprise=1), "match/a: unknown key 'surprise'"),
        (match_case(kind="guess"), "kind is 'guess'"),
        (match_case(version="v3"), "version is 'v3'"),
        (match_case(why=3), "why is 3"),
        (match_case(tags="a"), "tags is 'a'"),
        (match_case(kills=[1]), "kills is"),
        (match_case(config={"tokeniser": "bytes"}), "config: unknown key 'tokeniser'"),
        (match_case(config=None), "config is None"),
        (match_case(input={"stored": STORED, "replayed": STORED}), "input has no matcher"),
        (match_case(input={**match_case()["input"], "note": 1}), "input: unknown key 'note'"),
        (match_case(input=[]), r"input is \[\]"),
        (match_case(expect={}), "expect has no match"),
        (match_case(expect={"match": True, "error": 1}), "expect: unknown key 'match'"),
        (match_case(expect={"error": "refused"}), "expect has no mentions"),
        (match_case(kind="assemble", input={"nodes": []}), "unknown key 'nodes'"),
        (match_case(kind="assemble", version="v2", input={"records": []}), "unknown key 'records'"),
    ],
)
def test_what_is_not_of_the_format_is_an_error_that_names_the_case_and_the_key(raw: Any, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        parse_case(raw)


def test_files_hold_one_case_or_a_list_also_packed(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(match_case("match/one")))
    (tmp_path / "more").mkdir()
    packed = gzip.compress(json.dumps([match_case("match/two"), match_case("match/three")]).encode())
    (tmp_path / "more" / "packed.json.gz").write_bytes(packed)
    (tmp_path / "README.md").write_text("no case")
    assert [case.id for case in load_cases([tmp_path])] == ["match/two", "match/three", "match/one"]
    with pytest.raises(CaseError, match="'match/one' is used twice"):
        load_cases([tmp_path, tmp_path / "one.json"])


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[1]", b"[" * 100_000])
def test_a_file_that_holds_no_cases_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(CaseError, match=r"broken\.json"):
        load_cases([file])
    with pytest.raises(CaseError, match="no such file"):
        load_cases([tmp_path / "missing.json"])


@pytest.mark.parametrize(
    ("expected", "observed"),
    [(0, 0.0), (2**53, float(2**53)), (None, None), ("a", "a"), ([], []), ({"a": 1, "b": 2}, {"b": 2, "a": 1.0})],
)
def test_numbers_compare_by_value_and_keys_in_any_order(expected: Any, observed: Any) -> None:
    assert first_difference(expected, observed) is None


@pytest.mark.parametrize(
    ("expected", "observed", "said"),
    [
        (1, True, "the whole: expected 1, got true"),
        (0, False, "expected 0, got false"),
        (None, 0, "expected null, got 0"),
        ("1", 1, 'expected "1", got 1'),
        (2**53 + 1, float(2**53), "expected 9007199254740993"),
        ({"a": None}, {}, "a: missing, expected null"),
        ({}, {"a": None}, "a: unexpected, got null"),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "a[1].b: expected 2, got 3"),
        ([1, 2], [1], "expected 2 entries, got 1"),
        ([1], {"0": 1}, "expected [1], got"),
    ],
)
def test_the_first_difference_is_named_with_its_path(expected: Any, observed: Any, said: str) -> None:
    found = first_difference(expected, observed)
    assert found is not None
    assert said in found


def test_a_refusal_must_be_of_its_kind_and_mention_what_it_must() -> None:
    refusal = {"error": 422, "message": "turn 3: trim 2, allowed 1"}
    assert expectation_difference({"error": 422, "mentions": ["trim 2", "allowed"]}, refusal) is None
    for expected, said in (
        ({"error": 422, "mentions": ["Trim"]}, "does not mention ['Trim']"),
        ({"error": "refused", "mentions": []}, "expected refused, got 422"),
        ({"match": True}, "refused (422): turn 3"),
    ):
        found = expectation_difference(expected, refusal)
        assert found is not None
        assert said in found
    found = expectation_difference({"error": 422, "mentions": []}, {"match": True})
    assert found is not None
    assert "expected a refusal (422)" in found


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(case_group, ["run", *map(str, arguments)])


def test_the_command_prints_a_line_a_failure_and_the_count(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(
        json.dumps([match_case("match/a"), match_case("match/b", matches=False, why="Equal messages differ.")])
    )
    result = run(file)
    assert result.exit_code == 1
    assert result.stdout == "match/b: Equal messages differ. match: expected false, got true\n1 passed, 1 failed\n"
    file.write_text(json.dumps([match_case("match/a")]))
    assert (run(file).exit_code, run(file).stdout) == (0, "1 passed, 0 failed\n")


def test_the_command_speaks_json(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([match_case("match/a", matches=False)]))
    verdict, counts = (json.loads(line) for line in run(file, "--json").stdout.splitlines())
    assert (verdict["id"], verdict["outcome"]) == ("match/a", "failed")
    assert counts == {"passed": 0, "failed": 1}


def test_no_case_at_all_is_no_success(tmp_path: Path) -> None:
    assert (run(tmp_path).exit_code, run(tmp_path).stdout) == (1, "0 passed, 0 failed\n")
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(match_case(surprise=1)))
    result = run(file)
    assert result.exit_code == 1
    assert "unknown key 'surprise'" in result.stderr
