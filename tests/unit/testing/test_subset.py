"""The expectation language of http and worker steps."""

from __future__ import annotations

from typing import Any

import pytest

from miles_ref.errors import CaseError
from miles_ref.testing.compare import first_difference
from miles_ref.testing.references import References
from miles_ref.testing.subset import exact_differences, subset_differences

HOLDS = [
    ({}, {"more": 1}),
    ({"a": {"b": 1}}, {"a": {"b": 1.0, "c": 2}, "d": 3}),
    ([1, {"a": 1}], [1, {"a": 1, "b": 2}]),
    ({"a": {"$any": True}}, {"a": None}),
    ({"a": {"$absent": True}}, {}),
    ({"a": {"$exact": {"b": [{"c": 1}]}}}, {"a": {"b": [{"c": 1}]}, "d": 1}),
    ({"a": {"$not": 1}}, {"a": 2}),
    ({"$unordered": [1, {"a": 2}]}, [{"a": 2, "b": 3}, 1]),
]
BREAKS = [
    ({"a": 1}, {}),
    ({"a": None}, {}),
    ({"a": 1}, {"a": True}),
    ({"a": 0}, {"a": False}),
    ({"a": 1}, {"a": "1"}),
    ({"a": None}, {"a": 0}),
    ([1], [1, 2]),
    ([1, 2], [1]),
    ([], {}),
    ({}, []),
    ({"a": {"$any": True}}, {}),
    ({"a": {"$absent": True}}, {"a": None}),
    ({"a": {"$exact": {"b": [{"c": 1}]}}}, {"a": {"b": [{"c": 1, "d": 2}]}}),
    ({"a": {"$not": 1}}, {"a": 1.0}),
    ({"a": {"$not": 1}}, {}),
    ({"$unordered": [1, 1]}, [1, 2]),
    ({"$unordered": [1]}, [1, 1]),
    ({"$other": 1}, 1),
]


@pytest.mark.parametrize(("expected", "actual"), HOLDS)
def test_holds(expected: Any, actual: Any) -> None:
    assert subset_differences(expected, actual) == []


@pytest.mark.parametrize(("expected", "actual"), BREAKS)
def test_breaks(expected: Any, actual: Any) -> None:
    assert subset_differences(expected, actual)


def test_exact_refuses_further_keys() -> None:
    assert exact_differences({"a": 1}, {"a": 1}) == []
    assert exact_differences({"a": 1}, {"a": 1, "b": 2}) == ["$.b: got 2, expected no such key"]


def test_a_difference_says_where() -> None:
    assert subset_differences({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, "body") == ["body.a[0].b: got 2, expected 1"]


def test_references_lead_to_saved_replies() -> None:
    references = References()
    references.save("first", {"choices": [{"id": 7}]})
    assert references.resolve({"x": [{"$ref": "first.choices.0.id"}]}) == {"x": [7]}
    for wrong in ("second", "first.nothing", "first.choices.4"):
        with pytest.raises(CaseError):
            references.resolve({"$ref": wrong})


def test_texts_become_token_ids() -> None:
    references = References(lambda text: list(text.encode()))
    assert references.resolve({"$ids": ["ab", 300, "c"]}) == [97, 98, 300, 99]
    assert references.resolve({"$tokens": "ab", "completion_tokens": 2}) == {
        "completion_tokens": 2,
        "output_token_logprobs": [[0.0, 97], [-1 / 128, 98]],
    }
    with pytest.raises(CaseError):
        References().resolve({"$ids": ["ab"]})


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("<i4", "int32", True),
        ("i4", "int32", True),
        ("u1", "uint8", True),
        (">i4", "int32", False),
        ("int64", "int32", False),
        ("word", "int32", False),
        (None, "float64", False),
    ],
)
def test_a_dtype_has_several_names(left: Any, right: str, same: bool) -> None:
    array = {"shape": [1], "data": [1]}
    expected, observed = {"a": {"dtype": left, **array}}, {"a": {"dtype": right, **array}}
    assert (first_difference(expected, observed) is None) == same
    assert (exact_differences(expected, observed) == []) == same
    # Elsewhere a name is a text.
    assert first_difference({"dtype": left}, {"dtype": right}) is not None
    assert subset_differences({"dtype": left}, {"dtype": right}) != []
