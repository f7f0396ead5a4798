"""The built-in plugin set of linear sessions (pipeline.md, v1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_ref.assembly import compute as compute_rules
from miles_ref.assembly import truncate as truncate_rules
from miles_ref.hookspecs import hookimpl
from miles_ref.plugins.abort import abort
from miles_ref.records import AssemblySettings, Chain
from miles_ref.sample import Sample
from miles_ref.wire import SAMPLES_VALUE_SPEC, encode_samples

__all__ = ["abort", "compute", "encode", "merge", "pick", "truncate"]


@hookimpl
def compute(chain: Chain, settings: AssemblySettings) -> list[Sample]:
    """pipeline.md, compute."""
    return compute_rules.compute(chain, settings)


@hookimpl
def truncate(turns: Sequence[Sample], max_seq_len: int | None, settings: AssemblySettings) -> list[Sample]:
    """pipeline.md, truncate."""
    return truncate_rules.truncate(turns, max_seq_len, settings)


@hookimpl
def pick(leaf_samples: list[Sample]) -> list[Sample]:
    """The one leaf sample."""
    return leaf_samples


@hookimpl
def merge(leaf_samples: list[Sample]) -> list[Sample]:
    """The one leaf sample is the result."""
    return leaf_samples


@hookimpl
def encode(samples: list[Sample], session_metadata: dict[str, Any], empty_reason: str | None) -> bytes:
    """The samples payload with the fields of v1."""
    return encode_samples(samples, session_metadata, empty_reason, fields=SAMPLES_VALUE_SPEC)
