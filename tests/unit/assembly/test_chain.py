"""compute, truncate and fold on one chain: views, third parties' turns, and the work that is not done.

The values are the corpus' matter; here is what data cannot say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from miles_ref.assembly.compute import compute
from miles_ref.assembly.fold import fold
from miles_ref.assembly.replay import RowRule, additional_rows
from miles_ref.assembly.truncate import truncate
from miles_ref.errors import AssemblyError, FieldError
from miles_ref.records import AssemblySettings, Chain, Payload, TokenView
from miles_ref.sample import Sample, Status

MakeChain = Callable[..., Chain]
A, B, C = list(b"ask "), list(b"one "), list(b"two ")


@pytest.fixture
def two_turns(make_chain: MakeChain) -> Chain:
    return make_chain((A, B), (A + B + C, [97, 98]))


def test_turns_are_views_that_nobody_can_write_through(two_turns: Chain, settings: AssemblySettings) -> None:
    first, second = compute(two_turns, settings)
    assert isinstance(first.tokens, TokenView)
    assert list(second.tokens) == A + B + C + [97, 98]
    assert np.shares_memory(first.rollout_log_probs, two_turns.records[0].log_probs)
    with pytest.raises(ValueError, match="read-only"):
        first.loss_mask[0] = 0


def test_texts_that_are_known_are_not_decoded_again(make_chain: MakeChain, settings: AssemblySettings) -> None:
    chain = make_chain(
        (A, B), (A + B + C, B), prompt_tail_text=["ask ", "two "], output_text=["one ", "one "], accumulated=None
    )

    def decode(ids: Any) -> str:
        raise AssertionError("decoded")

    known = replace(settings, decode=decode)
    assert fold(compute(chain, known), known).response == "one two one "


def test_a_trimmed_or_cut_text_is_decoded_anew(make_chain: MakeChain, settings: AssemblySettings) -> None:
    trimmed = A + B[:3] + C
    chain = make_chain(
        (A, B), (trimmed, B), prompt_tail_text=["ask ", "two "], output_text=["one ", "one "], accumulated=trimmed + B
    )
    turns = compute(chain, replace(settings, max_trim_tokens=1))
    assert turns[0].response == "one"
    (cut,) = truncate(turns, len(A) + 2, settings)
    assert cut.response == "on"


def test_the_fold_lays_out_the_last_turn_only(
    two_turns: Chain, settings: AssemblySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out = []
    original = Chain._lay_out
    monkeypatch.setattr(Chain, "_lay_out", lambda chain, index: laid_out.append(index) or original(chain, index))
    fold(truncate(compute(two_turns, settings), 100, settings), settings)
    assert laid_out == [1]


def turn(prompt: list[int], response: list[int], **other: Any) -> Sample:
    """A turn as a third party's compute may give it: plain lists."""
    values: dict[str, Any] = {
        "tokens": prompt + response,
        "response": bytes(response).decode(),
        "response_length": len(response),
        "loss_mask": [1] * len(response),
        "rollout_log_probs": [-0.5] * len(response),
        "status": Status.COMPLETED,
    }
    return Sample(**{**values, **other})


def test_plain_turns_fold_like_views(settings: AssemblySettings) -> None:
    turns = [turn(A, B), turn(A + B + C, [97, 98])]
    before = [replace(one, metadata=dict(one.metadata)) for one in turns]
    sample = fold(turns, settings)
    assert list(sample.tokens) == A + B + C + [97, 98]
    assert list(sample.loss_mask) == [1] * 4 + [0] * 4 + [1] * 2
    assert list(sample.rollout_log_probs) == [-0.5] * 4 + [0.0] * 4 + [-0.5] * 2
    assert sample.response == "one two ab"
    assert turns == before


def test_optional_per_token_lists_are_filled_where_one_side_lacks_them(settings: AssemblySettings) -> None:
    turns = [
        turn(A, B, teacher_log_probs=[-1.0] * 4, metadata={"opd_student_top_logprobs": [[1], [2], [3], [4]]}),
        turn(A + B + C, [97, 98], opd_reverse_kl=[0.5, 0.25]),
    ]
    sample = fold(turns, settings)
    assert list(sample.teacher_log_probs) == [-1.0] * 4 + [0.0] * 6
    assert list(sample.opd_reverse_kl) == [0.0] * 8 + [0.5, 0.25]
    assert sample.metadata["opd_student_top_logprobs"] == [[1], [2], [3], [4]] + [[]] * 6


def test_a_cut_cuts_every_per_token_field_alike(settings: AssemblySettings) -> None:
    rows = np.zeros((7, 1, 1), dtype=np.int32)
    whole = turn(
        A,
        B,
        teacher_log_probs=[-1.0, -2.0, -3.0, -4.0],
        opd_reverse_kl=np.arange(4.0),
        rollout_routed_experts=rows,
        rollout_indexer_topk=rows,
        metadata={"opd_student_top_logprobs": [1, 2, 3, 4], "lifecycle": {}},
    )
    (cut,) = truncate([whole, whole], 6, settings)
    assert (len(cut.tokens), cut.response_length, cut.response, cut.status) == (6, 2, "on", Status.TRUNCATED)
    assert (cut.loss_mask, cut.rollout_log_probs, cut.teacher_log_probs) == ([1, 1], [-0.5, -0.5], [-1.0, -2.0])
    assert cut.opd_reverse_kl.tolist() == [0.0, 1.0]
    assert (len(cut.rollout_routed_experts), len(cut.rollout_indexer_topk)) == (5, 5)
    assert cut.metadata == {"opd_student_top_logprobs": [1, 2], "lifecycle": {}}
    assert len(whole.tokens) == 8


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"label": "other"}, "label"),
        ({"reward": 1.0}, "reward"),
        ({"remove_sample": True}, "remove_sample"),
        ({"group_index": 1}, "group_index"),
        ({"train_metadata": np.zeros(2)}, "train_metadata"),
        ({"metadata": {"own": 1}}, r"metadata has other keys.*own"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries, response_length is 2"),
        ({"response_length": 99}, "response_length is 99"),
        ({"tokens": A + B + [97, 98]}, "no observation tokens"),
        ({"tokens": [9, *A[1:], *B, *C, 97, 98]}, "no prefix of its 14 tokens, they differ at index 0"),
        ({"tokens": A}, "no prefix"),
    ],
)
def test_turns_that_contradict_each_other_are_422(
    settings: AssemblySettings, second: dict[str, Any], said: str
) -> None:
    with pytest.raises(AssemblyError, match=f"turn 1: .*{said}"):
        fold([turn(A, B), turn(A + B + C, [97, 98], **second)], settings)


def test_the_first_turn_is_checked_as_the_others_are(settings: AssemblySettings) -> None:
    second = turn(A + B + C, [97, 98])
    with pytest.raises(AssemblyError, match="turn 0: loss_mask has 3 entries, response_length is 4"):
        fold([turn(A, B, loss_mask=[1] * 3), second], settings)
    with pytest.raises(AssemblyError, match="turn 0: response_length is 9, but the turn has 8 tokens"):
        fold([turn(A, B, response_length=9), second], settings)


def test_equal_values_are_joined_whatever_they_are(settings: AssemblySettings) -> None:
    same = {"train_metadata": np.arange(3), "label": [1], "metadata": {"a": np.arange(2)}}
    assert fold([turn(A, B, **same), turn(A + B + C, [97], **same)], settings).label == [1]
    with pytest.raises(AssemblyError, match=r"metadata\.a"):
        fold([turn(A, B, **same), turn(A + B + C, [97], **same | {"metadata": {"a": np.arange(3)}})], settings)


def test_values_are_equal_though_each_turn_has_its_own(settings: AssemblySettings) -> None:
    def own(value: Any) -> dict[str, Any]:
        return {"label": [[1], [2, 3]], "metadata": {"shape": [[1], [2, 3]], "weights": value}}

    turns = [turn(A, B, **own(np.arange(2))), turn(A + B + C, [97], **own(np.arange(2)))]
    assert fold(turns, settings).label == [[1], [2, 3]]
    for other in (None, [0, 2]):
        with pytest.raises(AssemblyError, match=r"turn 1: metadata\.weights"):
            fold([turns[0], turn(A + B + C, [97], **own(other))], settings)


def test_a_turn_that_is_folded_alone_keeps_its_lists_as_they_are(settings: AssemblySettings) -> None:
    alone = turn(A, B, teacher_log_probs=(-1.0, -2.0, -3.0, -4.0), metadata={"own": 1})
    sample = fold([alone], settings)
    assert sample.loss_mask is alone.loss_mask
    assert sample.teacher_log_probs is alone.teacher_log_probs
    assert sample.metadata == alone.metadata
    assert sample.metadata is not alone.metadata


def test_lifecycles_join_as_lists_or_objects_and_messages_are_the_last_turns(settings: AssemblySettings) -> None:
    turns = [
        turn(A, B, metadata={"lifecycle": [{"turn": 1}, {"turn": 2}], "messages": ["old"]}),
        turn(A + B + C, [97], metadata={"lifecycle": {"turn": 3}}),
    ]
    assert fold(turns, settings).metadata == {"lifecycle": [{"turn": 1}, {"turn": 2}, {"turn": 3}]}


def int32(count: int) -> Payload:
    return Payload(np.arange(count, dtype="<i4").tobytes())


def test_rows_of_a_chain_agree_in_their_topk() -> None:
    rule = RowRule("routed_experts")
    assert rule.rows(int32(0), 0, 3).shape == (0, 3, 0)
    assert rule.rows(int32(12), 2, 3).shape == (2, 3, 2)
    with pytest.raises(FieldError, match=r"topk 1.*topk 2"):
        rule.rows(int32(6), 2, 3)
    with pytest.raises(FieldError, match="2 rows of 3 layers"):
        rule.rows(int32(7), 2, 3)
    with pytest.raises(FieldError, match="0 bytes"):
        rule.rows(int32(0), 2, 3)
    assert RowRule("routed_experts", 4).rows(int32(0), 0, 3).shape == (0, 3, 4)
    with pytest.raises(FieldError, match="topk 1"):
        RowRule("routed_experts", 1).rows(int32(12), 2, 3)


@pytest.mark.parametrize(("layers", "topk"), [(2**61 - 1, 0), (2**61 - 1, 1), (2**60 - 1, 2)])
def test_a_row_is_as_large_as_an_array_can_be(layers: int, topk: int) -> None:
    rule = RowRule("routed_experts", topk)
    assert rule.rows(int32(0), 0, layers).shape == (0, layers, topk)
    assert np.empty((0, layers, max(topk, 1)), dtype=np.int32).shape[1] == layers
    with pytest.raises(AssemblyError, match="beyond any memory"):
        rule.rows(int32(0), 0, layers + 1)


def test_additional_rows_are_joined_without_copying_the_patches(
    make_chain: MakeChain, settings: AssemblySettings
) -> None:
    patches = [int32(7), int32(6), int32(3)]
    chain = make_chain(
        (A, B),
        (A + B + C, [97, 98]),
        (A + B + C + [97, 98, 99], [100, 101]),
        routed_experts=patches,
        routed_experts_start=[0, 7, 13],
    )
    configured = replace(settings, num_layers=1, routed_experts=True, additional_r3=True)
    rows = additional_rows(chain, 14, configured)
    assert rows is not None
    assert rows.shape == (13, 1, 1)
    assert rows.array().ravel().tolist() == [*range(7), *range(6)]
    first, second = (chunk for chunk in rows.chunks() if len(chunk))
    assert first is patches[0].tail
    assert second is patches[1].tail


def test_a_patch_may_share_its_beginning_with_other_bytes(make_chain: MakeChain, settings: AssemblySettings) -> None:
    shared = Payload.of(int32(6).to_bytes(), int32(2))
    assert len(shared.tail) == 4 * 4
    chain = make_chain(
        (A, B), (A + B + C, [97, 98]), routed_experts=[int32(7), shared], routed_experts_start=[0, 7], accumulated=None
    )
    rows = additional_rows(chain, 14, replace(settings, num_layers=1, routed_experts=True, additional_r3=True))
    assert rows is not None
    assert rows.array().ravel().tolist() == [*range(7), *range(6)]
