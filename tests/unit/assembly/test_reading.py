"""Reading: the rules on single values, which server and assembler share (pipeline.md, Record)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from miles_ref.assembly.reading import (
    read_layers,
    read_meta,
    read_output,
    read_payload,
    read_record,
    read_status,
    shown_ids,
)
from miles_ref.errors import AssemblyError, FieldError
from miles_ref.records import AssemblySettings, int_array
from miles_ref.sample import SpecInfo, Status


def test_pairs_become_two_read_only_arrays_and_more_items_are_ignored() -> None:
    ids, log_probs = read_output([[-0.5, 7, "text"], [-1, 8, None, 3], ["-inf", 9], [-math.inf, 2**63 - 1]])
    assert ids.tolist() == [7, 8, 9, 2**63 - 1]
    assert log_probs.tolist() == [-0.5, -1.0, -math.inf, -math.inf]
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        log_probs[0] = 1
    assert [len(array) for array in read_output([])] == [0, 0]
    assert read_output([(-0.5, 7), [-1, 8]])[0].tolist() == [7, 8]


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (None, "is absent"),
        ({}, "not a list"),
        ([[-0.5, 7], 3], r"\[1\] is 3"),
        ([[-0.5]], r"\[0\] is \[-0\.5\]"),
        ([[-0.5, 7, "text"], [-0.5, 7], [-0.5], []], r"\[2\] is \[-0\.5\]"),
        (["ab"], r"\[0\] is 'ab'"),
        ([[None, 7]], r"\[0\] has the log prob null"),
        ([[-0.5, 7], [math.nan, 7]], r"\[1\] has the log prob nan"),
        ([[math.inf, 7]], r"\[0\] has the log prob inf"),
        ([["inf", 7]], r"\[0\] has the log prob 'inf'"),
        ([["-0.5", 7]], r"\[0\] has the log prob '-0\.5'"),
        ([[True, 7]], r"\[0\] has the log prob True"),
        ([[-(10**400), 7]], "beyond float64"),
        ([[-0.5, None]], r"\[0\] has the token id None"),
        ([[-0.5, True]], r"\[0\] has the token id True"),
        ([[-0.5, 7.0]], r"\[0\] has the token id 7\.0"),
        ([[-0.5, 0], [-0.5, 2**63 - 1], [-0.5, -1]], r"\[2\] has the token id -1"),
        ([[-0.5, 0], [-0.5, 2**63 - 1], [-0.5, 2**63]], r"\[2\] has the token id 9223372036854775808"),
        ([[-0.5, 0], [-0.5, 2**64]], r"\[1\] has the token id 18446744073709551616"),
    ],
)
def test_a_broken_pair_is_refused_with_its_place(pairs: Any, said: str) -> None:
    with pytest.raises(FieldError, match=f"output_token_logprobs.*{said}|output_token_logprobs {said}") as error:
        read_output(pairs)
    assert error.value.field.startswith("output_token_logprobs")


@pytest.mark.parametrize(("version", "text"), [("7", "7"), (7, "7"), (1.5, "1.5"), (None, None), ("", "")])
def test_weight_versions_are_text(settings: AssemblySettings, version: Any, text: str | None) -> None:
    assert read_meta({"output_token_logprobs": [], "weight_version": version}, settings).weight_version == text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_version", True),
        ("weight_version", math.nan),
        ("weight_version", ["1"]),
        ("cached_tokens", -1),
        ("cached_tokens", 1.5),
        ("cached_tokens", -1.0),
        ("cached_tokens", 2.0**63),
        ("cached_tokens", math.inf),
        ("cached_tokens", math.nan),
        ("cached_tokens", True),
        ("cached_tokens", 2**63),
        ("cached_tokens", 2**64),
        ("prompt_tokens", "3"),
        ("e2e_latency", "1"),
        ("e2e_latency", math.nan),
        ("e2e_latency", math.inf),
        ("e2e_latency", False),
        ("e2e_latency", 10**400),
    ],
)
def test_a_value_of_another_type_is_refused(settings: AssemblySettings, key: str, value: Any) -> None:
    with pytest.raises(FieldError, match=key):
        read_meta({"output_token_logprobs": [], key: value}, settings)


def test_a_count_may_be_written_as_a_float(settings: AssemblySettings) -> None:
    meta = read_meta({"output_token_logprobs": [], "cached_tokens": 3.0, "prompt_tokens": -0.0}, settings)
    assert (repr(meta.cached_tokens), repr(meta.prompt_tokens)) == ("3", "0")


def test_a_count_is_any_int64_from_0(settings: AssemblySettings) -> None:
    for count in (0, 1, 2**63 - 1):
        assert read_meta({"output_token_logprobs": [], "cached_tokens": count}, settings).cached_tokens == count


def test_counters_of_speculation_are_read_only_where_it_is_configured(settings: AssemblySettings) -> None:
    meta = {"output_token_logprobs": [], "spec_verify_ct": 2, "completion_tokens": 5, "spec_accept_token_num": None}
    assert read_meta(meta, settings).spec_info == SpecInfo()
    speculative = replace(settings, speculative=True)
    assert read_meta(meta, speculative).spec_info == SpecInfo(spec_verify_ct=2, completion_token_num=5)
    broken = {"output_token_logprobs": [], "spec_verify_ct": "2"}
    assert read_meta(broken, settings).spec_info == SpecInfo()
    with pytest.raises(FieldError, match="spec_verify_ct"):
        read_meta(broken, speculative)


def test_finish_reasons_mean_statuses() -> None:
    reasons = ["stop", "tool_calls", "length", "abort"]
    assert [read_status(reason) for reason in reasons] == [
        Status.COMPLETED,
        Status.COMPLETED,
        Status.TRUNCATED,
        Status.ABORTED,
    ]
    for unknown in (None, "content_filter", "", ["stop"], {"type": "stop"}):
        with pytest.raises(FieldError, match="finish_reason"):
            read_status(unknown)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "[]"),
        (8, "[0, 1, 2, 3, 4, 5, 6, 7]"),
        (9, "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        (99, "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
    ],
)
def test_of_many_ids_a_message_shows_the_first(count: int, shown: str) -> None:
    assert shown_ids(int_array(list(range(count)))) == shown


@pytest.mark.parametrize("text", ["*", "AA", "AAAA AAAA", "AAA=AAAA", "ÄÄÄÄ", 3, None])
def test_base64_is_read_strictly(text: Any) -> None:
    with pytest.raises(FieldError, match="routed_experts"):
        read_payload("routed_experts", text)


def test_base64_may_be_text_or_bytes() -> None:
    assert read_payload("x", "AQID") == read_payload("x", memoryview(b"AQID")) == b"\x01\x02\x03"


@pytest.mark.parametrize("layers", [None, "2", 0, -1, True, 1.0, 2**31])
def test_layers_are_a_number_of_layers(layers: Any) -> None:
    with pytest.raises(FieldError, match="indexer_topk_num_layers"):
        read_layers({"indexer_topk_num_layers": layers})


def raw_record(**changed: Any) -> dict[str, Any]:
    meta = {"output_token_logprobs": [[-0.5, 7]]} | changed.pop("meta", {})
    choice = {"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop", "meta_info": meta}
    record = {
        "timestamp": 10,
        "request_timestamp": None,
        "request": {"messages": [{"role": "user", "content": "q"}], "input_ids": [1, 2, 3]},
        "response": {"id": "r", "choices": [choice]},
    }
    return record | changed


def test_a_record_is_stored_against_the_one_before_it(settings: AssemblySettings) -> None:
    record = read_record(raw_record(), turn=0, before=int_array([1, 2, 9, 9]), settings=settings)
    assert (record.shared, record.prompt_tail.tolist(), record.start, record.end) == (2, [3], 3, 4)
    assert [message["content"] for message in record.messages()] == ["q", "a"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"request": None}, "request is None"),
        ({"request": {"input_ids": None}}, "input_ids is absent"),
        ({"request": {"input_ids": [1, "2"]}}, r"input_ids\[1\]"),
        ({"response": {"choices": []}}, "choices"),
        ({"response": {"choices": [None]}}, "choices"),
        ({"response": {"choices": [{"finish_reason": "stop"}]}}, "meta_info"),
        ({"timestamp": None}, "timestamp is absent"),
        ({"timestamp": "now"}, "timestamp"),
        ({"request_timestamp": True}, "request_timestamp"),
    ],
)
def test_a_broken_record_is_422_naming_turn_and_field(
    settings: AssemblySettings, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(AssemblyError, match=f"turn 4: .*{said}") as error:
        read_record(raw_record(**changed), turn=4, before=None, settings=settings)
    assert error.value.status_code == 422


def test_replay_is_read_only_where_it_is_configured(settings: AssemblySettings) -> None:
    broken = {"routed_experts": "*", "indexer_topk": "*"}
    record = read_record(raw_record(meta=broken), turn=0, before=None, settings=settings)
    assert (record.routed_experts, record.indexer_topk) == (None, None)
    for configured in (replace(settings, routed_experts=True), replace(settings, indexer_topk=True)):
        with pytest.raises(AssemblyError, match="base64"):
            read_record(raw_record(meta=broken), turn=0, before=None, settings=configured)
