"""Matchers, pickers and mergers for cases: each well behaved, or wrong in exactly one way.

A case's config names them as `miles_ref.testing.doubles.NAME`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from miles_ref.sample import Sample

# Matchers (session-http.md, Matching messages)


def caseless_matcher(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> bool:
    """Role and content, whatever their case."""
    return _folded(stored) == _folded(replayed)


def _folded(message: Mapping[str, Any]) -> tuple[str, str]:
    return str(message.get("role")).casefold(), str(message.get("content") or "").casefold()


def refusing_matcher(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> bool:
    """Refuses what a user says again, even the same."""
    return stored["role"] != "user" and stored == replayed


def raising_matcher(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> bool:
    raise RuntimeError("this matcher always raises")


def unsure_matcher(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> Any:
    return "maybe"


# Pickers (pipeline.md, v2)


def latest_first(leaf_samples: list[Sample]) -> list[Sample]:
    """All of them, the latest committed first."""
    return leaf_samples[::-1]


def pick_nothing(leaf_samples: list[Sample]) -> list[Sample]:
    return []


def raising_picker(leaf_samples: list[Sample]) -> list[Sample]:
    raise RuntimeError("this picker always raises")


def exiting_picker(leaf_samples: list[Sample]) -> list[Sample]:
    raise SystemExit("this picker wants to leave")


def forgetful_picker(leaf_samples: list[Sample]) -> Any:
    return None


def repeating_picker(leaf_samples: list[Sample]) -> list[Sample]:
    return [*leaf_samples, leaf_samples[0]]


def inventing_picker(leaf_samples: list[Sample]) -> list[Sample]:
    return [copy.deepcopy(leaf_samples[0])]


def rewriting_picker(leaf_samples: list[Sample]) -> list[Sample]:
    leaf_samples[0].tokens[0] += 1
    return leaf_samples


def generating_picker(leaf_samples: list[Sample]) -> Iterator[Sample]:
    return iter(leaf_samples)


# Mergers (pipeline.md, v2)


def tagging_merger(leaf_samples: list[Sample]) -> list[Sample]:
    """Numbers the samples in their metadata."""
    for number, sample in enumerate(leaf_samples):
        sample.metadata["tagged"] = number
    return leaf_samples


def merge_nothing(leaf_samples: list[Sample]) -> list[Sample]:
    return []


def raising_merger(leaf_samples: list[Sample]) -> list[Sample]:
    raise RuntimeError("this merger always raises")


def forgetful_merger(leaf_samples: list[Sample]) -> Any:
    return None


def short_mask_merger(leaf_samples: list[Sample]) -> list[Sample]:
    for sample in leaf_samples:
        sample.loss_mask = list(sample.loss_mask)[:-1]
    return leaf_samples


def key_dropping_merger(leaf_samples: list[Sample]) -> list[Sample]:
    for sample in leaf_samples:
        sample.metadata["accumulated_token_ids"] = []
    return leaf_samples


def train_all_merger(leaf_samples: list[Sample]) -> list[Sample]:
    """Shared completions are trained in every sample."""
    return leaf_samples


def train_nothing_merger(leaf_samples: list[Sample]) -> list[Sample]:
    for sample in leaf_samples:
        sample.loss_mask = [0] * sample.response_length
    return leaf_samples


_CALLS = itertools.count()


def counting_merger(leaf_samples: list[Sample]) -> list[Sample]:
    """The result depends on how often it was asked."""
    leaf_samples[0].metadata["calls"] = next(_CALLS)
    return leaf_samples


def unwritable_merger(leaf_samples: list[Sample]) -> list[Sample]:
    leaf_samples[0].metadata["reason"] = float("nan")
    return leaf_samples
