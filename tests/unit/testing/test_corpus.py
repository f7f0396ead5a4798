"""The corpus is sound: closed schema, unique ids, specs, twins and mutants that exist; and its checks can fail."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from miles_ref.testing.corpus import (
    HEADINGS,
    SCHEMA,
    case_files,
    check_corpus,
    corpus_root,
    is_bad_case,
    is_case_file,
    raw_cases,
)
from tests.golden.mutants import mutants as oracle_mutants
from tests.golden.mutants.package import mutants as package_mutants

ROOT = corpus_root()
FILES = sorted(case_files([ROOT]))


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads((ROOT / SCHEMA).read_text())
    return jsonschema.Draft202012Validator({"$defs": schema["$defs"], "$ref": "#/$defs/golden_case"})


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_case_is_of_the_schema(file: Path) -> None:
    schema = validator()
    content = json.loads(file.read_text())
    for case in content if isinstance(content, list) else [content]:
        faults = [f"{fault.json_path}: {fault.message[:200]}" for fault in schema.iter_errors(case)]
        assert not faults, case["id"]


def test_ids_specs_twins_and_kills() -> None:
    names = [mutant.name for mutant in (*oracle_mutants(), *package_mutants())]
    assert len(names) == len(set(names))
    assert check_corpus(ROOT, names) == []


def test_it_is_as_large_as_it_says() -> None:
    cases = [case for _, case in raw_cases(ROOT)]
    assert len(cases) >= 900
    assert sum(case["provenance"] == "hand" for case in cases) >= 400
    assert sum(case["kind"] == "worker" for case in cases) >= 80


def test_no_two_hand_made_cases_are_the_same() -> None:
    seen: dict[str, str] = {}
    for _, case in raw_cases(ROOT):
        if case["provenance"] == "hand":
            # The order of an object's keys counts here: that it must not matter is a rule with cases of its own.
            key = json.dumps([case["kind"], case["config"], case["input"], case.get("version")])
            assert key not in seen, (case["id"], seen[key])
            seen[key] = case["id"]


def test_bad_cases_of_data_have_a_good_twin() -> None:
    hand = [case for _, case in raw_cases(ROOT) if case["provenance"] == "hand" and is_bad_case(case)]
    assert hand
    assert [case["id"] for case in hand if "twin" not in case] == []


def one_case(**changes: Any) -> dict[str, Any]:
    case = json.loads((ROOT / "v2/laws/forests.json").read_text())[0]
    return {**case, "twin": case["id"], **changes}


def corpus(folder: Path, *cases: dict[str, Any]) -> Path:
    for name in (SCHEMA, HEADINGS):
        shutil.copy(ROOT / name, folder / name)
    (folder / "v2").mkdir()
    (folder / "v2" / "cases.json").write_text(json.dumps(list(cases)))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spec": "pipeline.md#no such heading"}, "no heading"),
        ({"spec": "other.md#fold"}, "no heading"),
        ({"twin": "v2/laws/nothing"}, "does not exist"),
        ({"kills": ["no-such-mutant"]}, "no mutant"),
    ],
)
def test_an_unsound_case_is_found(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (problem,) = check_corpus(corpus(tmp_path, one_case(**({"kills": ["some-mutant"]} | changes))), ["some-mutant"])
    assert said in problem


def test_a_repeated_id_is_found(tmp_path: Path) -> None:
    (problem,) = check_corpus(corpus(tmp_path, one_case(), one_case()))
    assert "used twice" in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"surprise": 1},
        {"why": "short"},
        {"provenance": "recorded from the reference"},
        {"config": {"tokeniser": "bytes"}},
        {"input": {"nodes": [], "more": 1}},
        {"expect": {"laws": ["no-such-law"]}},
        {"expect": {"samples": []}},
        {"expect": {"error": 422}},
        {"kind": "match", "input": {"stored": {}, "replayed": {}}, "expect": {"match": True}},
        {"kind": "encode", "input": {"samples": []}, "expect": {"payload": ""}},
    ],
)
def test_the_schema_is_closed(changes: dict[str, Any]) -> None:
    schema = validator()
    assert schema.is_valid(one_case())
    assert not schema.is_valid(one_case(**changes))


def test_what_a_case_file_is() -> None:
    assert is_case_file(ROOT / "v2" / "laws" / "forests.json")
    assert not is_case_file(ROOT / SCHEMA)
    assert not is_case_file(ROOT / "oracle" / "x.json")
    assert not is_case_file(Path("/elsewhere/x.json"))
