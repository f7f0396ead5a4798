"""The value table: the sole allowlist of what of a sample crosses the wire (wire.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from miles_ref.errors import UsageError

META_TENSOR = "_samples_meta"
"""Name of the tensor that holds the JSON part of a payload."""

EMPTY_REASONS = ("no_records", "all_truncated")

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"I64": np.dtype("<i8"), "F64": np.dtype("<f8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}
)
"""The container's dtype names in the order in which tensors are laid out."""


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """How one field crosses the wire.

    `dtype` is the container's name for tensors, None for JSON. A strict tensor is never converted, has rank 3 and stays
    an array; the others have rank 1 and become lists. `null_is_empty`: null decodes to a fresh [], otherwise to None.
    """

    codec: Literal["tensor", "json"]
    dtype: str | None = None
    strict: bool = False
    null_is_empty: bool = False

    @property
    def rank(self) -> int:
        return 3 if self.strict else 1

    @property
    def null(self) -> list[int] | None:
        """What a null decodes to; the list is a fresh one."""
        return [] if self.null_is_empty else None


_JSON = ValueSpec("json")

SAMPLES_VALUE_SPEC: Mapping[str, ValueSpec] = MappingProxyType(
    {
        "tokens": ValueSpec("tensor", "I64", null_is_empty=True),
        "response": _JSON,
        "response_length": _JSON,
        "loss_mask": ValueSpec("tensor", "U8"),
        "rollout_log_probs": ValueSpec("tensor", "F64"),
        "rollout_routed_experts": ValueSpec("tensor", "I32", strict=True),
        "rollout_indexer_topk": ValueSpec("tensor", "I32", strict=True),
        "status": _JSON,
        "weight_versions": _JSON,
        "prefix_cache_info": _JSON,
        "metadata": _JSON,
    }
)
"""v1: field -> ValueSpec, in the table's order."""

SAMPLES_VALUE_SPEC_V2: Mapping[str, ValueSpec] = MappingProxyType({**SAMPLES_VALUE_SPEC, "reward": _JSON})
"""v2: v1 and the reward."""

COMPUTED_FIELDS: tuple[str, ...] = tuple(SAMPLES_VALUE_SPEC)
COMPUTED_FIELDS_V2: tuple[str, ...] = tuple(SAMPLES_VALUE_SPEC_V2)


def select(fields: Iterable[str]) -> dict[str, ValueSpec]:
    """The rows of the table that `fields` names, in the table's order. Raises UsageError for any other name."""
    names = set(fields)
    unknown = names - SAMPLES_VALUE_SPEC_V2.keys()
    if unknown:
        raise UsageError(
            f"fields {sorted(unknown)} are not in the value table; it has {', '.join(SAMPLES_VALUE_SPEC_V2)}"
        )
    return {name: spec for name, spec in SAMPLES_VALUE_SPEC_V2.items() if name in names}
