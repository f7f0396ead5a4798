"""v1's payloads are pinned byte for byte, whatever v2 and other plugins learn (wire.md, Encode).

The digests are frozen: a change here is a change of the protocol that drivers of v1 speak.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from miles_ref.plugins import Pipeline
from miles_ref.testing.cases import Case, load_cases
from miles_ref.testing.kinds.assemble import assemble

DIGESTS = json.loads((Path(__file__).parent / "v1-digests.json").read_text())
VECTORS = Path(__file__).parents[2] / "golden" / "vectors" / "assemble.json"


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    """The handed vectors by id."""
    return {case.id: case for case in load_cases([VECTORS])}


@pytest.mark.parametrize("case_id", DIGESTS)
def test_not_one_byte_of_v1_differs_with_v2_loaded(cases: dict[str, Case], case_id: str) -> None:
    Pipeline("v2", picker="longest", merger="tree-advantage")
    pipeline = Pipeline("v1")
    payload = pipeline.encode(assemble(cases[case_id], pipeline))
    assert hashlib.sha256(payload).hexdigest() == DIGESTS[case_id]
