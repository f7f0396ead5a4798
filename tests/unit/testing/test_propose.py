"""Expectations come from the oracle, with a reason."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from miles_ref.errors import CaseError
from miles_ref.testing.command import case as case_group
from miles_ref.testing.corpus import corpus_root
from miles_ref.testing.propose import accept, dump, load_oracle, propose, read

ROOT = corpus_root()
ORACLE = load_oracle()


def cases(tmp_path: Path, *given: dict[str, Any]) -> Path:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(list(given)))
    return file


def good() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "v1" / "compute" / "cache-info.json").read_text())[0]
    return copy.deepcopy(found)


def test_a_right_expectation_needs_no_change(tmp_path: Path) -> None:
    assert propose(cases(tmp_path, good()), ORACLE) == []


def test_a_missing_expectation_is_filled(tmp_path: Path) -> None:
    case = good()
    wanted = case.pop("expect")
    file = cases(tmp_path, case)
    (one,) = propose(file, ORACLE)
    assert one.after == wanted
    assert one.ours is None
    accept(file, [one], "it is the sum", tmp_path)
    assert read(file)[0]["expect"] == wanted
    assert (tmp_path / "changes.md").read_text() == f"- {case['id']}: it is the sum\n"


def test_a_wrong_expectation_is_shown(tmp_path: Path) -> None:
    case = good()
    case["expect"]["samples"][0]["response_length"] = 7
    (one,) = propose(cases(tmp_path, case), ORACLE)
    assert '-   "response_length": 7,' in one.difference()
    assert '+   "response_length": 5,' in one.difference()


def test_kinds_that_the_oracle_does_not_play(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="by hand"):
        propose(cases(tmp_path, {**good(), "kind": "http"}), ORACLE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no case"),
        ("[3]", "entry 0 is no case with an id"),
        ("{}", "entry 0 is no case with an id"),
        ('{"id": "a", "id": "b"}', "the key 'id' stands twice"),
        ('[{"id": "a", "kind": "match"}, {"id": "a", "kind": "match"}]', "the id 'a' is used twice"),
    ],
)
def test_a_file_without_cases_is_no_file_where_all_is_well(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cases.json"
    file.write_text(text)
    with pytest.raises(CaseError, match=said):
        propose(file, ORACLE)
    done = CliRunner().invoke(case_group, ["propose", str(file)])
    assert done.exit_code != 0
    assert said in done.output


def test_a_packed_file_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "cases.json.gz"
    file.write_bytes(gzip.compress(json.dumps([good()]).encode()))
    with pytest.raises(CaseError, match="is packed"):
        propose(file, ORACLE)


def test_what_is_written_reads_back_the_same() -> None:
    value = json.loads((ROOT / "v1" / "compute" / "trim.json").read_text())
    assert json.loads(dump(value)) == value
    assert max(map(len, dump(value).splitlines())) < 400
