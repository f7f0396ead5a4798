"""Exact JSON: what is refused, what is equal, and that size and depth do not matter."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_ref.tokens.exact_json import Number, exact, parse_object, same

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,}', "{,}", '{"a"}', '{"a":}', "{a:1}", "[", "{", '{"a":1', '{"a":01}', '{"a":1.}', '{"a":.5}',
        '{"a":+1}', '{"a":1e}', '{"a":-}', '{"a":NaN}', '{"a":Infinity}', '{"a":-Infinity}', "{}x", "",
        " ", '{"a":"\n"}', "{'a':1}",
        '{"a":tru}', '{"a":[1,]}', '{"a":[,1]}', '{"a":1}}', "\ufeff{}", '{"a":1 2}', '{"a":"\\x"}', '{"a":"',
        "\u00a0{}", '{"a":١}', '{"a":1,"a":1}', '{"a":{"b":1,"b":2}}', '{"a":1,"\\u0061":1}', '{"a" 1}', '{"a":[1 2]}',
        '{"a"=1}', '{"a",1}', '{"a":1;"b":2}', '{"a":[1;2]}', '{"a":[1}', "[1]", "1", '"{}"', "null",
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_none(text: str) -> None:
    assert parse_object(text) is None


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.sampled_from([None, 1, "\t"]), st.booleans())
def test_reading_text_equals_converting_the_value(value: dict[str, Any], indent: Any, escape: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escape)
    assert parse_object(text) == exact(value)


@given(JSON, JSON)
def test_same_is_python_equality_but_for_booleans(left: Any, right: Any) -> None:
    assert same(left, left)
    if json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True):
        assert same(left, right)
    if left != right:
        assert not same(left, right)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("1", "1.0", True),
        ("1", "10e-1", True),
        ("100", "1E+2", True),
        ("-0", "0.0e5", True),
        ("0.1", "0.10", True),
        ("0.1", "0.1000000000000000055511151231257827", False),
        ("9007199254740993", "9007199254740992.0", False),
        ("9007199254740993", "9007199254740993.0", True),
        ("1e999999999", "10e999999998", True),
        ("1e999999999", "1e999999998", False),
        ("1e99999999999999999999999", "10e99999999999999999999998", True),
        ("1", "-1", False),
        ("1", "true", False),
        ("0", "false", False),
        ("0", "null", False),
        ("1", '"1"', False),
        ("12", "21", False),
        ("1.5", "15", False),
    ],
)
def test_numbers_are_mathematical_values(left: str, right: str, equal: bool) -> None:
    assert (parse_object(f'{{"a":{left}}}') == parse_object(f'{{"a":{right}}}')) is equal


def test_neither_depth_nor_digits_stop_it() -> None:
    deep = '{"a":[' * 20_000 + "1" + "]}" * 20_000
    one, other = parse_object(deep), parse_object(deep.replace(":", " : ").replace("1", "1.0"))
    assert one is not None
    assert same(one, other)
    many = "9" * 200_000
    assert parse_object(f'{{"a":{many}}}') == parse_object(f'{{"a":{many}.000}}')
    assert parse_object(f'{{"a":1e{many}}}') == parse_object(f'{{"a":1.0e{many}}}') != parse_object('{"a":1}')


def test_values_convert_exactly() -> None:
    assert exact({"a": 10**5000}) == parse_object('{"a":1e5000}')
    assert exact({"a": 0.1}) == parse_object('{"a":1e-1}')
    assert exact({"a": -0.0}) == parse_object('{"a":0}') == {"a": Number("", "", Decimal(0))}
    for bad in (float("nan"), float("inf"), object()):
        with pytest.raises(ValueError, match="is not JSON"):
            exact({"a": [bad]})


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (True, 1, False),
        (0, False, False),
        ([True], [1], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": None}, {}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ([], {}, False),
        ("a", ["a"], False),
        (2**53 + 1, float(2**53), False),
    ],
)
def test_same(left: Any, right: Any, equal: bool) -> None:
    assert same(left, right) is equal
    assert same(right, left) is equal
