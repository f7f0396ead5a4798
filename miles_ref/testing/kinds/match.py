"""Cases of kind match: whether a replayed message equals a stored one (cases.md, match)."""

from __future__ import annotations

from typing import Any

from miles_ref.testing.cases import Case
from miles_ref.tokens.matching import get_matcher


def run_case(case: Case) -> dict[str, Any]:
    """The matcher's verdict, in the form of the case's expect."""
    matches = get_matcher(case.input["matcher"])
    return {"match": matches(case.input["stored"], case.input["replayed"])}
