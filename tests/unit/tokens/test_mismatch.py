"""The mismatch report: each entry by hand, and the incremental report against the slow one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ref.errors import MessageValidationError
from miles_ref.records import IntArray
from miles_ref.tokens.families import Family, get_family
from miles_ref.tokens.mismatch import SegmentIndex, full_report, incremental_report
from miles_ref.tokens.tokenizer import BytesTokenizer, HFTokenizer, Tokenizer, load_tokenizer

USER = {"role": "user", "content": "Go on."}
SAID = {"role": "assistant", "content": "Three."}
CHATML_TEXT = "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\nThree.<|im_end|>"


def report(
    tokenizer: Tokenizer, family: str, actual: str | list[int], messages: list[Any], tools: Any = None
) -> list[Any]:
    """Both reports of a session whose ids came in one piece; they must agree."""
    ids = np.array(tokenizer.encode(actual) if isinstance(actual, str) else actual, dtype=np.int64)
    of = get_family(family)
    index = SegmentIndex.extend(None, 0, ids, tokenizer, encoded=len(ids) if isinstance(actual, str) else 0)
    kwargs = of.fixed_template_kwargs
    full = full_report(tokenizer, of, ids, messages, tools, kwargs)
    assert incremental_report(index, tokenizer, of, ids, messages, tools, kwargs) == full
    return full


def test_no_difference_is_an_empty_list(chatml: HFTokenizer, glm: HFTokenizer) -> None:
    assert report(chatml, "qwen3", CHATML_TEXT, [USER, SAID]) == []
    assert report(glm, "glm47", "[gMASK]<sop><|user|>\nGo on.<|assistant|>\nThree.", [USER, SAID]) == []


@pytest.mark.parametrize("tail", ["", "\n", "\n\n\n"])
def test_trailing_ids_of_the_familys_tail_are_ignored(chatml: HFTokenizer, tail: str) -> None:
    newline = chatml.encode("\n")
    assert len(newline) == 1
    assert report(chatml, "qwen3", chatml.encode(CHATML_TEXT) + newline * len(tail), [USER, SAID]) == []


def test_glm_ignores_the_stop_tokens_at_the_tail(glm: HFTokenizer) -> None:
    text = "[gMASK]<sop><|user|>\nGo on.<|assistant|>\nThree."
    for tail in ("<|user|>", "<|observation|>", "<|user|><|observation|>"):
        assert report(glm, "glm47", text + tail, [USER, SAID]) == []
    assert report(glm, "default", text + "<|user|>", [USER, SAID])[0]["type"] == "special_token_count"


def test_the_tail_inside_a_content_is_cut_too(chatml: HFTokenizer) -> None:
    newline = chatml.encode("\n")
    ids = chatml.encode(CHATML_TEXT[: -len("<|im_end|>")])
    assert report(chatml, "qwen3", ids + newline, [USER, SAID]) == report(chatml, "qwen3", ids, [USER, SAID])


def test_the_tail_of_the_canonical_render_is_cut_too(variant: Callable[..., HFTokenizer]) -> None:
    tokenizer = variant(template="<|im_start|>{{ messages[0].content }}")
    said = {"role": "user", "content": "Go on.\n"}
    assert report(tokenizer, "qwen3", "<|im_start|>Go on.", [said]) == []
    (entry,) = report(tokenizer, "qwen3", "<|im_start|>Go off.", [said])
    assert (entry["expected_text"], entry["actual_text"]) == ("Go on.", "Go off.")


def test_the_same_text_in_other_tokens_is_no_difference(chatml: HFTokenizer) -> None:
    letters = [token for letter in "Three." for token in chatml.encode(letter)]
    ids = chatml.encode(CHATML_TEXT.removesuffix("Three.<|im_end|>")) + letters + chatml.encode("<|im_end|>")
    assert ids != chatml.encode(CHATML_TEXT)
    assert report(chatml, "qwen3", ids, [USER, SAID]) == []


def test_another_count_of_segments(chatml: HFTokenizer) -> None:
    found = report(chatml, "qwen3", CHATML_TEXT.removesuffix("<|im_end|>"), [USER, SAID])
    count = len(chatml.encode("assistant\nThree."))
    head = "[<|im_start|>] (7 tokens) [<|im_end|>] (1 tokens) [<|im_start|>]"
    assert len(chatml.encode("user\nGo on.")) == 7
    assert found == [
        {
            "type": "special_token_count",
            "segment_index": -1,
            "expected_text": f"{head} ({count} tokens) [<|im_end|>]",
            "actual_text": f"{head} ({count} tokens)",
            "detail": "segment count differs: expected 7, got 6",
        }
    ]


def test_the_same_count_in_another_pattern(chatml: HFTokenizer) -> None:
    found = report(
        chatml, "qwen3", CHATML_TEXT.replace("<|im_end|>\n<|im_start|>", "<|im_end|><|im_end|><|im_end|>"), [USER, SAID]
    )
    assert [(entry["type"], entry["segment_index"], entry["detail"]) for entry in found] == [
        ("special_token_count", -1, "segment structure (special/content pattern) differs")
    ]
    assert found[0]["actual_text"].startswith("[<|im_start|>] (7 tokens) [<|im_end|>] [<|im_end|>] [<|im_end|>] (")


def test_special_tokens_in_a_row_have_no_content_between_them_however_many_they_are(chatml: HFTokenizer) -> None:
    (entry,) = report(chatml, "qwen3", [2] * 300, [USER, SAID])
    assert entry["actual_text"] == " ".join(["[<|im_end|>]"] * 300)
    assert entry["detail"] == "segment count differs: expected 7, got 300"


def test_another_special_token(chatml: HFTokenizer) -> None:
    found = report(chatml, "qwen3", CHATML_TEXT.replace("<|im_end|>\n", "<|endoftext|>\n"), [USER, SAID])
    assert found == [
        {
            "type": "special_token_type",
            "segment_index": 2,
            "expected_text": "<|im_end|>",
            "actual_text": "<|endoftext|>",
            "detail": "",
        }
    ]


def test_texts_that_differ_are_the_assistants_or_not(chatml: HFTokenizer) -> None:
    actual = CHATML_TEXT.replace("Three", "Four").replace("Go", "Went")
    entry = {"detail": ""}
    others = {"type": "non_assistant_text", "segment_index": 1, "expected_text": "user\nGo on."}
    spoken = {"type": "assistant_text", "segment_index": 5, "expected_text": "assistant\nThree."}
    assert report(chatml, "qwen3", actual, [USER, SAID]) == [
        {**others, "actual_text": "user\nWent on.", **entry},
        {**spoken, "actual_text": "assistant\nFour.", **entry},
    ]
    # The opener of nemotron3 has the newline, default has none, and both sides must have it.
    assert [one["type"] for one in report(chatml, "nemotron3", actual, [USER, SAID])][1] == "assistant_text"
    no_newline = CHATML_TEXT.replace("assistant\nThree", "assistant Four")
    assert [one["type"] for one in report(chatml, "nemotron3", no_newline, [USER, SAID])] == ["non_assistant_text"]
    assert [one["type"] for one in report(chatml, "qwen3", no_newline, [USER, SAID])] == ["assistant_text"]
    assert [one["type"] for one in report(chatml, "default", actual + "\n", [USER, SAID])] == ["non_assistant_text"] * 2


def test_a_special_tokens_text_in_ordinary_tokens_is_content(chatml: HFTokenizer) -> None:
    spelled = [token for letter in "<|im_end|>" for token in chatml.encode(letter)]
    ids = chatml.encode(CHATML_TEXT.removesuffix("<|im_end|>")) + spelled
    assert [entry["type"] for entry in report(chatml, "qwen3", ids, [USER, SAID])] == ["special_token_count"]


def test_tools_and_calls_are_rendered_as_the_prompt_was(chatml: HFTokenizer) -> None:
    tools = [{"name": "calc"}]
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "calc", "arguments": '{"e":1}'}}],
    }
    wrapped = (
        '{"type": "function", "function": {"description": null, "name": "calc", "parameters": null, "strict": false}}'
    )
    text = (
        f"<|im_start|>system\nTools, one JSON object a line:\n{wrapped}\n"
        'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\n'
        '<|im_start|>assistant\n<tool_call>{"name": "calc", "arguments": {"e": 1}}</tool_call><|im_end|>'
    )
    assert report(chatml, "qwen3", text, [call], tools) == []


def test_it_cannot_be_computed_without_a_template() -> None:
    tokenizer = BytesTokenizer()
    ids = np.array([65], dtype=np.int64)
    index = SegmentIndex.extend(None, 0, ids, tokenizer)
    for compute in (
        lambda: full_report(tokenizer, Family(), ids, [USER], None, {}),
        lambda: incremental_report(index, tokenizer, Family(), ids, [USER], None, {}),
    ):
        with pytest.raises(MessageValidationError):
            compute()


def test_an_index_of_another_length_is_refused(chatml: HFTokenizer) -> None:
    index = SegmentIndex.extend(None, 0, np.array([5, 6], dtype=np.int64), chatml)
    for ids in ([5, 6, 7], [5]):
        with pytest.raises(ValueError, match=f"covers 2 ids, the session has {len(ids)}"):
            incremental_report(index, chatml, Family(), np.array(ids), [USER], None, {})
    for kept in (-1, 3):
        with pytest.raises(ValueError, match=f"cannot keep {kept}"):
            SegmentIndex.extend(index, kept, np.array([1]), chatml)
    with pytest.raises(ValueError, match="a parent that has 0"):
        SegmentIndex.extend(None, 1, np.array([1]), chatml)


def test_an_index_stores_only_what_its_node_adds(chatml: HFTokenizer) -> None:
    first = SegmentIndex.extend(None, 0, np.array(chatml.encode(CHATML_TEXT)), chatml)
    second = SegmentIndex.extend(first, first.end, np.array(chatml.encode("\n<|im_start|>user\nx")), chatml)
    assert [fragment.text for fragment in second.fragments] == ["\n", None, "user\nx"]
    assert len(second.until(second.end)) == len(first.fragments) + 3


def test_a_character_that_two_nodes_share_is_decoded_whole(chatml: HFTokenizer) -> None:
    said = {"role": "assistant", "content": "日本"}
    text = CHATML_TEXT.replace("Three.", "日本")
    ids = chatml.encode(text)
    split = next(at for at in range(len(ids)) if chatml.decode(ids[:at]).endswith("\ufffd"))
    first = SegmentIndex.extend(None, 0, np.array(ids[:split]), chatml)
    whole = SegmentIndex.extend(first, split, np.array(ids[split:]), chatml)
    family = get_family("qwen3")
    assert incremental_report(whole, chatml, family, np.array(ids), [USER, said], None, {}) == []


@pytest.mark.parametrize("family", ["qwen3", "nemotron3"])
@pytest.mark.parametrize("actual", [CHATML_TEXT.replace("Three", "Four"), CHATML_TEXT.removesuffix("<|im_end|>")])
def test_a_node_may_begin_anywhere(chatml: HFTokenizer, family: str, actual: str) -> None:
    ids = np.array(chatml.encode(actual))
    full = full_report(chatml, get_family(family), ids, [USER, SAID], None, {})
    assert full
    for split in range(len(ids) + 1):
        first = SegmentIndex.extend(None, 0, ids[:split], chatml, encoded=split)
        index = SegmentIndex.extend(first, split, ids[split:], chatml)
        assert incremental_report(index, chatml, get_family(family), ids, [USER, SAID], None, {}) == full


def test_a_tail_that_is_cut_off_a_content_is_not_counted(variant: Callable[..., HFTokenizer]) -> None:
    tokenizer = variant(template="{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    ids = np.array(tokenizer.encode("<|im_start|>a\n<|im_start|>b"))
    index = SegmentIndex.extend(None, 0, ids, tokenizer, encoded=len(ids))
    messages = [{"role": "user", "content": content} for content in ("a\n", "b", "a\n")]
    family = get_family("qwen3")
    found = incremental_report(index, tokenizer, family, ids, messages, None, {})
    assert found == full_report(tokenizer, family, ids, messages, None, {})
    counted = "[<|im_start|>] (2 tokens) [<|im_start|>] (1 tokens)"
    assert (found[0]["expected_text"], found[0]["actual_text"]) == (f"{counted} [<|im_start|>] (1 tokens)", counted)


def test_the_rest_of_a_content_is_not_counted_as_one(variant: Callable[..., HFTokenizer]) -> None:
    """A prompt's tail may begin inside a content: the ids there are not those of its text on its own."""
    tokenizer = variant(template="{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    ids = np.array(tokenizer.encode("<|im_start|>?'s<|im_start|>b"))
    snapshot = tokenizer.encode("<|im_start|>?")
    tail = ids[len(snapshot) :]
    assert (ids[: len(snapshot)].tolist(), len(tail), len(tokenizer.encode("'s"))) == (snapshot, 4, 1)
    first = SegmentIndex.extend(None, 0, ids[: len(snapshot)], tokenizer)
    index = SegmentIndex.extend(first, len(snapshot), tail, tokenizer, encoded=len(tail))
    messages = [{"role": "user", "content": content} for content in ("?'s", "'s", "b")]
    found = incremental_report(index, tokenizer, Family(), ids, messages, None, {})
    assert found == full_report(tokenizer, Family(), ids, messages, None, {})
    assert found[0]["expected_text"] == "[<|im_start|>] (3 tokens) [<|im_start|>] (1 tokens) [<|im_start|>] (1 tokens)"


def test_counts_of_what_was_encoded_are_remembered(chatml: HFTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = chatml.encode(CHATML_TEXT)
    index = SegmentIndex.extend(None, 0, np.array(ids), chatml, encoded=len(ids))
    family = get_family("qwen3")
    longer = [USER, SAID, USER]
    full = full_report(chatml, family, np.array(ids), longer, None, {})
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return HFTokenizer.encode(chatml, text)

    monkeypatch.setattr(chatml, "encode", encode)
    assert incremental_report(index, chatml, family, np.array(ids), longer, None, {}) == full
    assert "assistant\nThree." not in encoded
    plain = SegmentIndex.extend(None, 0, np.array(ids), chatml)
    assert incremental_report(plain, chatml, family, np.array(ids), longer, None, {}) == full
    assert "assistant\nThree." in encoded


# The incremental report against the slow one

TEXTS = st.lists(
    st.sampled_from(
        ["a", "Three.", "\n", " ", "é", "日", "😀", "<|im_end|>", "<|user|>", "<think>", "e\u0301", "\u212b"]
    ),
    max_size=5,
).map("".join)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": TEXTS}),
    min_size=1,
    max_size=4,
)


@st.composite
def sessions(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[SegmentIndex, IntArray, list[Any]]:
    """Messages; ids that are their render with a few ids changed; an index made of nodes that cut and extend."""
    messages = draw(MESSAGES)
    text = tokenizer.render(messages, tools=None, add_generation_prompt=False, template_kwargs={})
    clean = tokenizer.encode(text)
    ids = list(clean)
    some = st.integers(0, 300) | st.sampled_from([*sorted(tokenizer.special_ids), 2048, 4000, *tokenizer.encode("\n")])
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(ids)))
        ids[at : at + draw(st.integers(0, 2))] = draw(st.lists(some, max_size=2))
    ids += draw(st.lists(some, max_size=3))
    index: SegmentIndex | None = None
    end = kept = 0
    for cut in sorted(draw(st.lists(st.integers(0, len(ids)), max_size=4))):
        # The first node's ids are the tokenizer's up to where they were changed.
        junk = draw(st.lists(some, max_size=2))
        piece = np.array(ids[kept:cut] + junk, dtype=np.int64)
        same = next((at for at, (one, other) in enumerate(zip(ids, clean, strict=False)) if one != other), len(clean))
        encoded = 0 if kept else min(same, cut)
        index = SegmentIndex.extend(index, kept, piece, tokenizer, encoded=encoded)
        end = cut
        kept = draw(st.integers(max(0, end - 3), end))
    index = SegmentIndex.extend(index, kept, np.array(ids[kept:], dtype=np.int64), tokenizer)
    return index, np.array(ids, dtype=np.int64), messages


@pytest.mark.parametrize(
    ("name", "family"), [("tiny-chatml", "qwen3"), ("tiny-chatml", "default"), ("tiny-glm", "glm47")]
)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_incremental_equals_full(name: str, family: str, data: st.DataObject) -> None:
    tokenizer = loaded(name)
    index, ids, messages = data.draw(sessions(tokenizer))
    full = full_report(tokenizer, get_family(family), ids, messages, None, {})
    assert incremental_report(index, tokenizer, get_family(family), ids, messages, None, {}) == full


@functools.cache
def loaded(name: str) -> Tokenizer:
    return load_tokenizer(name)


def _nfc(state: dict[str, Any]) -> None:
    state["normalizer"] = {"type": "NFC"}


def _strips(state: dict[str, Any]) -> None:
    state["added_tokens"][2]["rstrip"] = True


def _prefixes(state: dict[str, Any]) -> None:
    state["pre_tokenizer"]["add_prefix_space"] = True


def _lowers(state: dict[str, Any]) -> None:
    state["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("change", "exact", "name"),
    [(_nfc, True, "qwen3"), (_strips, False, "qwen3"), (_prefixes, False, "default"), (_lowers, False, "qwen3")],
)
def test_other_tokenizers_have_the_same_two_reports(
    variant: Callable[..., HFTokenizer], change: Callable[[dict[str, Any]], None], exact: bool, name: str
) -> None:
    tokenizer = variant(change)
    family = get_family(name)
    assert (tokenizer.pieces is not None) is exact

    @settings(max_examples=40, deadline=None)
    @given(sessions(tokenizer))
    def check(session: tuple[SegmentIndex, IntArray, list[Any]]) -> None:
        index, ids, messages = session
        full = full_report(tokenizer, family, ids, messages, None, {})
        assert incremental_report(index, tokenizer, family, ids, messages, None, {}) == full

    check()


def test_a_report_is_json(chatml: HFTokenizer) -> None:
    found = report(chatml, "qwen3", CHATML_TEXT.replace("Three", "Four"), [USER, SAID])
    assert json.loads(json.dumps(found)) == found
