"""Encode: whatever form a field has, it is written unchanged or refused (wire.md, Encode)."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ref.errors import EncodeError
from miles_ref.records import Payload, RowView
from miles_ref.sample import Sample
from miles_ref.wire import (
    COMPUTED_FIELDS,
    SAMPLES_VALUE_SPEC,
    SAMPLES_VALUE_SPEC_V2,
    decode_samples_and_merge_input_sample,
    encode_samples,
)

MakeSample = Callable[..., Sample]


def encode(*samples: Any, fields: Any = SAMPLES_VALUE_SPEC) -> bytes:
    return encode_samples(list(samples), {}, fields=fields)


def rewritten(sample: Any) -> Sample:
    reply = decode_samples_and_merge_input_sample(encode(sample), Sample(), fields=SAMPLES_VALUE_SPEC)
    decoded: Sample = reply.samples[0]
    return decoded


@pytest.mark.parametrize(
    "mask",
    [
        [1, 0],
        [1.0, 0.0],
        [1, 0.0],
        (1, 0),
        np.array([1, 0], dtype=np.uint8),
        np.array([1, 0], dtype=np.int64),
        np.array([1.0, 0.0]),
        np.array([1, 0], dtype=object),
        np.array([1, 9, 0, 9])[::2],
        [np.int32(1), np.float64(0.0)],
    ],
)
def test_a_mask_in_any_form_that_means_the_same_is_written_the_same(sample: MakeSample, mask: Any) -> None:
    assert encode(sample(loss_mask=mask)) == encode(sample(loss_mask=[1, 0]))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("loss_mask", [-1, 1], r"loss_mask\[0\] is -1"),
        ("loss_mask", [1, 300], r"loss_mask\[1\] is 300"),
        ("loss_mask", np.array([1, 256]), r"loss_mask\[1\] is 256"),
        ("loss_mask", [0.5, 1], r"loss_mask\[0\] is 0\.5"),
        ("loss_mask", [None, 1], r"loss_mask\[0\] is None"),
        ("loss_mask", [math.nan, 1], r"loss_mask\[0\] is nan"),
        ("loss_mask", [[1], [1]], "loss_mask"),
        ("loss_mask", np.ones((2, 1), dtype=np.uint8), "not rank 1"),
        ("loss_mask", "11", "not a list of numbers"),
        ("loss_mask", 1, "not a list of numbers"),
        ("loss_mask", [1], "loss_mask has 1 entries, response_length is 2"),
        ("tokens", [1, 2, 2**63], r"tokens\[2\] is 9223372036854775808"),
        ("tokens", [1, 2, -(2**63) - 1], r"tokens\[2\]"),
        ("tokens", np.array([1, 2, 2**63], dtype=np.uint64), r"tokens\[2\] is 9223372036854775808"),
        ("tokens", np.array([1.0, 2.0, 2.0**63]), r"tokens\[2\]"),
        ("tokens", [1, 2.0, 2**63], r"tokens\[2\]"),
        ("tokens", ["1", 2, 3], r"tokens\[0\] is '1'"),
        ("tokens", [1], "response_length is 2, but tokens has 1"),
        ("tokens", None, "response_length is 2, but tokens has 0"),
        ("rollout_log_probs", [math.nan, 0.0], r"rollout_log_probs\[0\] is nan"),
        ("rollout_log_probs", [0.0, math.inf], r"rollout_log_probs\[1\] is inf"),
        ("rollout_log_probs", [2**53 + 1, 0], r"rollout_log_probs\[0\] is 9007199254740993"),
        ("rollout_log_probs", [10**400, 0], r"rollout_log_probs\[0\]"),
        ("rollout_log_probs", [0.0], "rollout_log_probs has 1 entries"),
        ("rollout_routed_experts", np.zeros((2, 1, 1), dtype=np.int64), "has dtype int64"),
        ("rollout_routed_experts", np.zeros((2, 1), dtype=np.int32), r"shape \(2, 1\)"),
        ("rollout_routed_experts", [[[1]], [[2]]], "is a list, not an array"),
        ("rollout_indexer_topk", np.zeros((2, 1, 1), dtype=np.uint32), "has dtype uint32"),
        ("response", None, "response is None"),
        ("response", "\ud800", "lone surrogate"),
        ("response_length", True, "response_length is True"),
        ("response_length", -1, "response_length is -1"),
        ("response_length", 2.0, r"response_length is 2\.0"),
        ("status", "done", "status is 'done'"),
        ("status", None, "status is None"),
        ("weight_versions", ["1", 2], r"weight_versions\[1\] is 2"),
        ("weight_versions", ["a" * 100, 2], r"weight_versions\[1\] is 2"),
        ("weight_versions", None, "weight_versions is None"),
        ("prefix_cache_info", {"cached_tokens": 1}, r"prefix_cache_info is \{'cached_tokens': 1\}"),
        ("prefix_cache_info", None, "prefix_cache_info is None"),
        ("metadata", [], r"metadata is \[\]"),
        ("metadata", {"a": [{"b": math.nan}]}, r"metadata\.a\[0\]\.b is nan"),
    ],
)
def test_what_cannot_be_written_unchanged_is_refused_with_sample_field_and_value(
    sample: MakeSample, field: str, value: Any, said: str
) -> None:
    with pytest.raises(EncodeError, match=f"sample 1.*{said}"):
        encode(sample(), sample(**{field: value}))


def test_an_array_wins_over_no_conversion_only_where_no_value_changes(sample: MakeSample) -> None:
    single = np.array([-0.1, -0.2], dtype=np.float32)
    assert rewritten(sample(rollout_log_probs=single)).rollout_log_probs == [float(single[0]), float(single[1])]
    with pytest.raises(EncodeError):
        encode(sample(rollout_log_probs=np.array([2**53 + 1, 0])))


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= np.finfo(np.float64).nmant, reason="no float wider than float64")
def test_a_wider_float_is_written_where_float64_holds_it(sample: MakeSample) -> None:
    wide = np.array([-0.5, -math.inf], dtype=np.longdouble)
    assert rewritten(sample(rollout_log_probs=wide)).rollout_log_probs == [-0.5, -math.inf]
    assert encode(sample(loss_mask=np.ones(2, dtype=np.longdouble))) == encode(sample())
    third, beyond = np.longdouble(1) / 3, -(np.longdouble(10) ** 400)
    for field, value in (
        ("loss_mask", third),
        ("rollout_log_probs", -third),
        ("rollout_log_probs", beyond),
        ("rollout_log_probs", np.nan),
        ("tokens", 2**63),
    ):
        with pytest.raises(EncodeError, match=rf"sample 0: {field}\[1\] is "):
            encode(sample(**{field: np.array([0, value], dtype=np.longdouble)}))


def test_minus_infinity_is_a_log_prob(sample: MakeSample) -> None:
    assert rewritten(sample(rollout_log_probs=[-math.inf, 0])).rollout_log_probs == [-math.inf, 0.0]


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.none(), st.text(max_size=2))))
def test_tokens_are_written_exactly_or_refused(tokens: list[Any]) -> None:
    made = Sample(tokens=tokens, response_length=0, status="aborted")  # type: ignore[arg-type]
    try:
        decoded = rewritten(made).tokens
    except EncodeError:
        exact = all(type(token) in (int, float) and token == token and abs(token) < 2**63 for token in tokens)
        assert not exact or not all(float(token).is_integer() for token in tokens)
    else:
        assert decoded == tokens


class Torchlike:
    """An array of another library, known by its __array__."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.array, dtype=dtype)


@pytest.mark.parametrize(
    "error", [ValueError("on a device"), SystemExit("leaves")], ids=lambda error: type(error).__name__
)
def test_a_conversion_of_another_library_that_fails_is_refused(sample: MakeSample, error: BaseException) -> None:
    class Unreachable:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            raise error

    with pytest.raises(EncodeError, match=rf"is a Unreachable that is no numpy array: {type(error).__name__}: {error}"):
        encode(sample(rollout_routed_experts=Unreachable()))


def test_arrays_of_other_libraries_and_views_are_written_as_arrays(sample: MakeSample) -> None:
    rows = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    parent = Payload(rows[:1].tobytes())
    view = RowView(Payload(rows[1:].tobytes() + b"more", parent, parent.size), 2, 2, 2)
    expected = encode(sample(rollout_routed_experts=rows))
    assert encode(sample(rollout_routed_experts=Torchlike(rows))) == expected
    assert encode(sample(rollout_routed_experts=view)) == expected
    assert encode(sample(rollout_routed_experts=np.repeat(rows, 2, axis=0)[::2])) == expected
    assert encode(sample(tokens=Torchlike(np.array([1, 2, 3])))) == encode(sample())


def test_any_object_with_the_attributes_is_a_sample(sample: MakeSample) -> None:
    named = SimpleNamespace(**{name: getattr(sample(), name) for name in SAMPLES_VALUE_SPEC})
    assert encode(named) == encode(sample())
    del named.metadata
    with pytest.raises(EncodeError, match="sample 0 has no field metadata"):
        encode(named)


def test_only_the_fields_of_the_table_cross_the_wire(sample: MakeSample) -> None:
    plain = encode(sample())
    assert encode(sample(reward=1.0, label="x", teacher_log_probs=[0.0, 0.0])) == plain
    assert encode(sample(), fields=COMPUTED_FIELDS) == plain
    assert b'"reward":1.0' in encode(sample(reward=1.0), fields=SAMPLES_VALUE_SPEC_V2)
    with pytest.raises(ValueError, match="label"):
        encode(sample(), fields=["tokens", "label"])


def test_tensors_are_named_in_text_order(sample: MakeSample) -> None:
    payload = encode(*(sample(tokens=[at, 1, 2]) for at in range(11)))
    places = [payload.index(f'"tokens.{at}"'.encode()) for at in range(11)]
    assert places[10] < places[2]
    decoded = decode_samples_and_merge_input_sample(payload, Sample(), fields=SAMPLES_VALUE_SPEC).samples
    assert [one.tokens[0] for one in decoded] == list(range(11))


def test_the_session_is_checked_too(sample: MakeSample) -> None:
    with pytest.raises(EncodeError, match=r"session_metadata\.x is nan"):
        encode_samples([], {"x": math.nan}, "no_records", fields=SAMPLES_VALUE_SPEC)
    with pytest.raises(EncodeError, match="empty_reason is 'gone'"):
        encode_samples([], {}, "gone", fields=SAMPLES_VALUE_SPEC)
    with pytest.raises(EncodeError, match="session_metadata is None"):
        encode_samples([], None, fields=SAMPLES_VALUE_SPEC)  # type: ignore[arg-type]
