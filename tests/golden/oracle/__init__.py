"""A second implementation of the pipeline, from the contract only: slow, plain, standard library only.

It shares no code with the package. ``run_case`` fills the expectation of a case; ``python -m tests.golden.oracle
FILE...`` runs files of cases.
"""

from __future__ import annotations

import base64
from typing import Any

from .assemble import assemble
from .decode import decode
from .encode import encode
from .match import messages_match
from .values import BYTES, Fault, first_difference

__all__ = ["run_case", "verdict"]


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """What the contract expects of ``case``: the value of its key ``expect``, by kind (cases.md)."""
    kind, given = case["kind"], case["input"]
    tokenizer = case.get("config", {}).get("tokenizer", BYTES)
    if tokenizer != BYTES:
        raise ValueError(f"the oracle knows the tokenizer {BYTES!r}, not {tokenizer!r}: reason it out by hand")
    try:
        if kind == "assemble":
            return assemble(case)
        if kind == "encode":
            return {"payload": base64.b64encode(encode(case)).decode("ascii")}
        if kind == "decode":
            return decode(base64.b64decode(given["payload"]), given["input_sample"], case["version"])
        if kind == "match":
            return {"match": messages_match(given["stored"], given["replayed"], given["matcher"])}
    except Fault as fault:
        return {"error": 422 if kind == "assemble" else "refused", "mentions": fault.mentions}
    raise ValueError(f"the oracle does not know the kind {kind!r}")


def verdict(case: dict[str, Any]) -> str | None:
    """None when the oracle agrees with the case's own expectation, else what differs."""
    expected, got = case["expect"], run_case(case)
    if "error" not in expected or "error" not in got:
        return first_difference(expected, got)
    if expected["error"] != got["error"]:
        return f"expected error {expected['error']!r}, got {got['error']!r}"
    said = "; ".join(got["mentions"])
    missing = [mention for mention in expected["mentions"] if mention not in said]
    return f"mentions {missing!r} are not in {said!r}" if missing else None
