"""The table of the samples payload (wire.md): the sole allowlist of what crosses the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from miles_ref.sample import Status

Codec = Literal["json", "tensor", "tensor -> list"]
Fields = Mapping[str, "ValueSpec"] | Iterable[str]
"""The fields of a payload: a table, or names of the table."""

META = "_samples_meta"
"""Name of the tensor that holds the JSON."""

NULLS = "nulls"
"""Key of a sample's JSON that lists its tensor fields that are null."""

NO_RECORDS = "no_records"
ALL_TRUNCATED = "all_truncated"
EMPTY_REASONS = (NO_RECORDS, ALL_TRUNCATED)

STATUSES = frozenset(str(status) for status in Status)
CACHE_KEYS = ("cached_tokens", "total_prompt_tokens")
PER_RESPONSE_TOKEN = ("loss_mask", "rollout_log_probs")
"""Fields with one entry for each token of the response."""


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """How one field of a sample travels.

    `dtype` is numpy's name of a tensor's type. A strict tensor has rank 3 and is never converted, the others have rank
    1. `null` is what a null tensor decodes to; a list stands for a fresh one.
    """

    codec: Codec
    dtype: str | None = None
    strict: bool = False
    null: list[int] | None = None

    @property
    def rank(self) -> int:
        return 3 if self.strict else 1

    @property
    def is_tensor(self) -> bool:
        return self.codec != "json"


_JSON = ValueSpec("json")
_ROWS = ValueSpec("tensor", "int32", strict=True)

SAMPLES_VALUE_SPEC: Mapping[str, ValueSpec] = MappingProxyType(
    {
        "tokens": ValueSpec("tensor -> list", "int64", null=[]),
        "response": _JSON,
        "response_length": _JSON,
        "loss_mask": ValueSpec("tensor -> list", "uint8"),
        "rollout_log_probs": ValueSpec("tensor -> list", "float64"),
        "rollout_routed_experts": _ROWS,
        "rollout_indexer_topk": _ROWS,
        "status": _JSON,
        "weight_versions": _JSON,
        "prefix_cache_info": _JSON,
        "metadata": _JSON,
    }
)
"""The fields of v1."""

SAMPLES_VALUE_SPEC_V2: Mapping[str, ValueSpec] = MappingProxyType({**SAMPLES_VALUE_SPEC, "reward": _JSON})
"""The fields of v2."""

COMPUTED_FIELDS: tuple[str, ...] = tuple(SAMPLES_VALUE_SPEC)
COMPUTED_FIELDS_V2: tuple[str, ...] = tuple(SAMPLES_VALUE_SPEC_V2)


def table(fields: Fields) -> Mapping[str, ValueSpec]:
    """The table of `fields`. Raises ValueError for a name that the table does not have."""
    if isinstance(fields, Mapping):
        return fields
    names = list(fields)
    unknown = [name for name in names if name not in SAMPLES_VALUE_SPEC_V2]
    if unknown:
        raise ValueError(f"no such fields in the samples payload: {unknown}; it has {list(SAMPLES_VALUE_SPEC_V2)}")
    return {name: SAMPLES_VALUE_SPEC_V2[name] for name in names}
