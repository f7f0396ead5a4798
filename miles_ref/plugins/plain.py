"""Samples as plugin authors meet them: plain lists and numpy arrays, copies that nothing else looks at."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np

from miles_ref.records import RowView, TokenView
from miles_ref.sample import Sample

_FIELDS = tuple(field.name for field in fields(Sample))


def plain_sample(sample: Sample) -> Sample:
    """A copy: per-token fields as lists, replay rows as read-only int32 arrays (rows, layers, topk)."""
    return replace(sample, **{name: plain(getattr(sample, name)) for name in _FIELDS})


def plain(value: Any) -> Any:
    """A copy of a field's value without views: arrays of rank 1 become lists, rows become arrays."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, TokenView):
        return value[:]
    if isinstance(value, RowView):
        return value.array()
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else value.copy()
    if type(value) is dict:
        return {key: plain(member) for key, member in value.items()}
    if type(value) is list:
        return list(value) if set(map(type, value)) <= {int, float, str} else [plain(member) for member in value]
    return copy.deepcopy(value)


def changed_field(given: Sample, original: Sample) -> str | None:
    """The first field in which a plain copy no longer is as it was made of the original."""
    for name in _FIELDS:
        left, right = getattr(given, name), getattr(original, name)
        if left is not right and not same(left, plain(right)):
            return name
    return None


def same(given: Any, expected: Any) -> bool:
    """Whether a plugin left a plain value as it was; what it put there instead may be anything."""
    try:
        if isinstance(given, np.ndarray) or isinstance(expected, np.ndarray):
            return bool(np.array_equal(given, expected))
        return bool(given == expected)
    except BaseException:  # arrays in a dict have no truth, a plugin's value raises anything: only plain is unchanged
        return False
