"""The built-in plugin set of tree sessions (pipeline.md, v2): retry trim, exactly-once merge, rewards."""

from __future__ import annotations

from typing import Any

from miles_ref.assembly import merge as merge_rules
from miles_ref.assembly import pick as pick_rules
from miles_ref.hookspecs import hookimpl
from miles_ref.plugins.abort import abort
from miles_ref.plugins.v1 import compute, truncate
from miles_ref.sample import Sample
from miles_ref.wire import SAMPLES_VALUE_SPEC_V2, encode_samples

__all__ = ["abort", "compute", "encode", "merge", "pick", "truncate"]


@hookimpl
def pick(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Retry trim."""
    return pick_rules.pick(leaf_samples, session_metadata)


@hookimpl
def merge(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Exactly-once masks, rewards by response id, metadata layers."""
    return merge_rules.merge(leaf_samples, session_metadata)


@hookimpl
def encode(samples: list[Sample], session_metadata: dict[str, Any], empty_reason: str | None) -> bytes:
    """The samples payload with the fields of v2."""
    return encode_samples(samples, session_metadata, empty_reason, fields=SAMPLES_VALUE_SPEC_V2)
