"""Running the cases that need no server: assemble, encode, decode and match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_ref.errors import CaseError
from miles_ref.testing.cases import Case
from miles_ref.testing.kinds import assemble, codec, match

RUNNERS: dict[str, Callable[[Case, str | None], dict[str, Any]]] = {
    "assemble": assemble.run_case,
    "encode": codec.encode,
    "decode": lambda case, plugin_set: codec.decode(case),
    "match": lambda case, plugin_set: match.run_case(case),
}


def run_case(case: Case, plugin_set: str | None = None) -> dict[str, Any]:
    """What this implementation does, in the form of the case's expect; a refusal has a `message`.

    `plugin_set` names a plugin whose hooks come before our own. Raises CaseError for a kind that needs a server.
    """
    runner = RUNNERS.get(case.kind)
    if runner is None:
        raise CaseError(f"{case.id}: kind {case.kind} runs against a server, by `miles-ref check` or pytest")
    return runner(case, plugin_set)
