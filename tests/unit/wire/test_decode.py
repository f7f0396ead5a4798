"""Decode: the driver's side, on any object and with nothing half-applied (wire.md, Decode)."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ref.errors import DecodeError
from miles_ref.sample import PrefixCacheInfo, Sample, SpecInfo, Status
from miles_ref.wire import (
    SAMPLES_VALUE_SPEC,
    SAMPLES_VALUE_SPEC_V2,
    container,
    decode_samples_and_merge_input_sample,
    encode_samples,
)

MakeSample = Callable[..., Sample]


def decode(payload: bytes, into: Any = None, fields: Any = SAMPLES_VALUE_SPEC) -> list[Any]:
    return decode_samples_and_merge_input_sample(payload, Sample() if into is None else into, fields=fields).samples


def payload_of(*samples: Sample, fields: Any = SAMPLES_VALUE_SPEC) -> bytes:
    return encode_samples(list(samples), {"x": 1}, fields=fields)


ROWS = np.arange(4, dtype=np.int32).reshape(2, 2, 1)


def test_each_sample_is_a_copy_of_the_input_under_the_wires_fields(sample: MakeSample) -> None:
    into = Sample(index=7, label={"a": [1]}, reward=0.5, metadata={"task": "t", "who": "input"}, response="old")
    before = copy.deepcopy(into)
    first, second = decode(payload_of(sample(metadata={"who": "wire"}), sample(rollout_routed_experts=ROWS)), into)
    assert (first.index, first.reward, first.response) == (7, 0.5, "ok")
    assert first.metadata == {"task": "t", "who": "wire"}
    assert second.metadata == {"task": "t", "who": "input"}
    first.label["a"].append(2)
    first.metadata["task"] = "changed"
    assert into == before
    assert second.label == {"a": [1]}


def test_tensors_become_lists_or_arrays_of_their_own(sample: MakeSample) -> None:
    payload = payload_of(sample(rollout_routed_experts=ROWS, loss_mask=None))
    (decoded,) = decode(payload)
    assert decoded.tokens == [1, 2, 3]
    assert {type(token) for token in decoded.tokens} == {int}
    assert {type(value) for value in decoded.rollout_log_probs} == {float}
    assert decoded.loss_mask is None
    assert decoded.status is Status.COMPLETED
    decoded.rollout_routed_experts[0] = 9  # writable, and no part of the payload
    np.testing.assert_array_equal(decode(payload)[0].rollout_routed_experts, ROWS)


def test_null_tokens_are_a_fresh_list_each(sample: MakeSample) -> None:
    empty = sample(tokens=None, response_length=0, loss_mask=None, rollout_log_probs=[])
    first, second = decode(payload_of(empty, empty))
    first.tokens.append(1)
    assert second.tokens == []


def test_a_null_reward_leaves_the_inputs(sample: MakeSample) -> None:
    payload = payload_of(sample(reward=None), sample(reward=0), fields=SAMPLES_VALUE_SPEC_V2)
    rewards = [one.reward for one in decode(payload, Sample(reward=0.75), SAMPLES_VALUE_SPEC_V2)]
    assert rewards == [0.75, 0]


class TheirStatus(Enum):
    PENDING = "pending"
    DONE = "completed"


@dataclass(frozen=True)
class TheirCache:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0


@dataclass
class TheirSample:
    """A sample of another package, with its own types."""

    tokens: list[int] = field(default_factory=list)
    status: TheirStatus = TheirStatus.PENDING
    weight_versions: list[str] = field(default_factory=list)
    prefix_cache_info: TheirCache = field(default_factory=TheirCache)
    metadata: dict[str, Any] | None = None
    own: str = "kept"


def test_any_object_with_these_attributes_keeps_its_own_types(sample: MakeSample) -> None:
    payload = payload_of(sample(prefix_cache_info=PrefixCacheInfo(3, 4), metadata={"a": 1}))
    (theirs,) = decode(payload, TheirSample())
    assert theirs.status is TheirStatus.DONE
    assert theirs.prefix_cache_info == TheirCache(3, 4)
    assert (theirs.own, theirs.metadata, theirs.response) == ("kept", {"a": 1}, "ok")
    loose = SimpleNamespace(
        weight_versions=[], status="pending", prefix_cache_info={"cached_tokens": 0, "x": 0}, metadata={}
    )
    (named,) = decode(payload, loose)
    assert named.status == "completed"
    assert named.prefix_cache_info == {"cached_tokens": 3, "total_prompt_tokens": 4, "x": 0}


def test_a_status_that_their_type_lacks_is_refused(sample: MakeSample) -> None:
    with pytest.raises(DecodeError, match="TheirStatus"):
        decode(payload_of(sample(status="aborted")), TheirSample())


@pytest.mark.parametrize(
    "changed",
    [
        {"weight_versions": ["1"]},
        {"prefix_cache_info": PrefixCacheInfo(1, 0)},
        {"prefix_cache_info": {"cached_tokens": 1}},
        {"spec_info": SpecInfo(spec_verify_ct=1)},
        {"teacher_log_probs": []},
        {"opd_reverse_kl": [0.0]},
        {"metadata": {"opd_student_top_logprobs": None}},
        {"metadata": 5},
        {"metadata": ["opd"]},
        {"metadata": []},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_an_input_that_merging_would_corrupt_is_refused_unless_there_is_nothing_to_merge(
    sample: MakeSample, changed: dict[str, Any]
) -> None:
    into = Sample(**changed)
    before = copy.deepcopy(into)
    with pytest.raises(DecodeError, match=next(iter(changed))):
        decode(payload_of(sample()), into)
    assert into == before
    assert decode(payload_of(), into) == []


def with_meta(sample: Sample, **changed: Any) -> bytes:
    """A payload whose JSON entry of its one sample has other values; `...` leaves a key out."""
    tensors = container.read(payload_of(sample))
    meta = json.loads(bytes(tensors["_samples_meta"].raw))
    meta["samples"][0] = {key: value for key, value in (meta["samples"][0] | changed).items() if value is not ...}
    raw = json.dumps(meta).encode()
    kept = [
        container.Tensor(name, tensor.code, tensor.shape, [tensor.raw])
        for name, tensor in tensors.items()
        if name != "_samples_meta"
    ]
    return container.write([*kept, container.Tensor("_samples_meta", "U8", (len(raw),), [raw])])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("response", 1),
        ("response", None),
        ("response", ...),
        ("response_length", "2"),
        ("response_length", True),
        ("response_length", 2.0),
        ("response_length", -1),
        ("response_length", 1),
        ("response_length", 4),
        ("status", "done"),
        ("status", None),
        ("weight_versions", [1]),
        ("weight_versions", "1"),
        ("prefix_cache_info", {"cached_tokens": 1}),
        ("prefix_cache_info", {"cached_tokens": 1, "total_prompt_tokens": None}),
        ("prefix_cache_info", []),
        ("metadata", []),
        ("metadata", None),
        ("nulls", ...),
        ("nulls", None),
        ("nulls", ["response"]),
        ("nulls", ["reward"]),
        ("nulls", [["tokens"]]),
        ("nulls", ["tokens", "rollout_routed_experts", "rollout_indexer_topk"]),
        ("nulls", ["rollout_routed_experts"]),
    ],
)
def test_an_entry_that_is_not_of_the_form_is_refused(sample: MakeSample, key: str, value: Any) -> None:
    with pytest.raises(DecodeError, match="sample 0"):
        decode(with_meta(sample(), **{key: value}))


def test_keys_of_a_newer_server_are_ignored(sample: MakeSample) -> None:
    (decoded,) = decode(with_meta(sample(), reward=1.0, newer=[1]))
    assert decoded.reward is None
    assert not hasattr(decoded, "newer")


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_whatever_the_bytes_are_the_answer_is_samples_or_a_decode_error(data: st.DataObject) -> None:
    one = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1, 0], status=Status.COMPLETED, response="é")
    payload = bytearray(payload_of(one, one))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        cut = data.draw(st.integers(0, 4))
        payload[at : at + cut] = data.draw(st.binary(max_size=4))
    into = Sample()
    with contextlib.suppress(DecodeError):
        decode(bytes(payload), into)
    assert into == Sample()
