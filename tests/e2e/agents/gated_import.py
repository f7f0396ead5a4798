"""An agent whose import waits at the gate."""

from __future__ import annotations

from miles_ref.agents import report_to_caller
from tests.e2e.agents.gated import pass_gate

pass_gate()


async def returns() -> str:
    """Return at once."""
    report_to_caller("started")
    return "done"
