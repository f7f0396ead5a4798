"""The oracle agrees with the handed vectors, and its random cases are a pure function of the seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.oracle import run_case, verdict
from tests.golden.oracle.generate import generate

VECTORS = Path(__file__).parent.parent / "vectors"


def _cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((VECTORS / name).read_text(encoding="utf-8"))
    return cases


@pytest.mark.parametrize("name", ["assemble.json", "codec.json"])
def test_agrees_with_the_vectors(name: str) -> None:
    cases = _cases(name)
    assert cases
    assert {case["id"]: problem for case in cases if (problem := verdict(case)) is not None} == {}


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("kind", ["assemble", "encode", "decode", "match"])
def test_random_cases_are_reproducible_and_reach_both_verdicts(kind: str, version: str) -> None:
    results = []
    for seed in range(120):
        case = generate(kind, version, seed)
        assert case == generate(kind, version, seed)
        result = run_case(case)
        results.append("error" in result or result.get("match") is False)
    assert True in results
    assert False in results
