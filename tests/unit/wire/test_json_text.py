"""JSON of the payload: one spelling, whatever writes it, and nothing that is not JSON."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ref.errors import EncodeError
from miles_ref.wire.json_text import dump, load

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@settings(deadline=None)
@given(VALUES)
def test_every_value_is_spelled_as_the_standard_library_spells_it_and_comes_back(value: Any) -> None:
    text = dump(value, "it")
    assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    back = load(text)
    assert back == value
    assert repr(back) == repr(value)  # 1 is not 1.0, and true is not 1


@pytest.mark.parametrize(
    "number",
    [
        *(
            sign * (edge + step)
            for edge in (2**53, 2**63, 2**64, 10**18, 10**19)
            for step in (-1, 0, 1)
            for sign in (1, -1)
        ),
        -9999999999999999999,
        10**400,
    ],
)
def test_whole_numbers_stay_exact_on_both_sides_of_64_bits(number: int) -> None:
    for value in (number, [number], {"n": [0, number]}):
        text = dump(value, "it")
        assert text == json.dumps(value, separators=(",", ":")).encode()
        assert repr(load(text)) == repr(value)


def test_an_array_of_ids_is_written_as_its_list() -> None:
    ids = np.arange(5, dtype=np.int64)
    ids.flags.writeable = False
    assert dump({"ids": ids, "tiny": 1e-9}, "it") == b'{"ids":[0,1,2,3,4],"tiny":1e-09}'
    assert dump({"ids": ids}, "it") == b'{"ids":[0,1,2,3,4]}'
    assert dump({"ids": ids[::2]}, "it") == b'{"ids":[0,2,4]}'


class Colour(enum.StrEnum):
    RED = "red"


class Pair(list[float]):
    """A list of a program's own type."""


def test_what_is_derived_from_a_json_type_is_written_as_that() -> None:
    assert dump({"c": Colour.RED, "f": np.float64(0.5), "t": (1, 2)}, "it") == b'{"c":"red","f":0.5,"t":[1,2]}'
    assert dump(Pair([1e20, 1e-9]), "it") == b"[1e+20,1e-09]"
    assert dump(OrderedDict(a=1e-9), "it") == b'{"a":1e-09}'
    assert dump([np.float64(1e-9), Colour.RED], "it") == b'[1e-09,"red"]'


LOOP: list[Any] = []
LOOP.append(LOOP)
NESTS = {"list": lambda inner: [inner], "tuple": lambda inner: (inner,), "object": lambda inner: {"a": inner}}


@pytest.mark.parametrize("outer", NESTS)
@pytest.mark.parametrize("nest", [*NESTS, "ordered object"])
def test_values_are_written_to_220_levels(nest: str, outer: str) -> None:
    value: Any = 1
    for _ in range(219):
        value = OrderedDict(a=value) if nest == "ordered object" else NESTS[nest](value)
    value = NESTS[outer](value)
    assert load(dump(value, "it")) == json.loads(json.dumps(value))
    with pytest.raises(EncodeError, match="is nested more than 220 levels deep"):
        dump([value], "it")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, math.nan]}, r"it\.a\[1\]"),
        ({"a": {"b": math.inf}}, r"it\.a\.b"),
        ([-math.inf], r"it\[0\]"),
        ({"a": {1: 2}}, r"it\.a has the key 1"),
        ({"a": "\ud800"}, r"it\.a has a lone surrogate"),
        ({"\udfff": 1}, r"it has a lone surrogate"),
        ({"a": object()}, r"it\.a is a builtins\.object"),
        ({"a": b"x"}, r"it\.a is a builtins\.bytes"),
        ({"a": {1, 2}}, r"it\.a is a builtins\.set"),
        ({"a": np.int64(3)}, r"it\.a is a numpy\.int64"),
        ({"a": np.zeros(3)}, r"it\.a is a numpy array of float64"),
        ({"a": np.zeros((2, 2), dtype=np.int64)}, r"it\.a is a numpy array"),
        (LOOP, "nested more than 220"),
    ],
)
def test_what_is_no_json_value_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(EncodeError, match=path):
        dump(value, "it")


@pytest.mark.parametrize(
    "text",
    [
        b"NaN",
        b"[Infinity]",
        b"1e999",
        b"-1E+400",
        b'{"a":1,}',
        b"\xff",
        b'"\\ud800"',
        b'["\\ud800", 123456789012345678901]',
        b"[" * 100_000,
        b"\xef\xbb\xbf1",
    ],
)
def test_what_is_not_json_is_not_read(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the parsers word it)
        load(text)


def test_integers_of_any_size_come_back_exactly() -> None:
    assert load(b"[18446744073709551616, -9223372036854775809, 1e22]") == [2**64, -(2**63) - 1, 1e22]
    assert type(load(b"[18446744073709551616]")[0]) is int
