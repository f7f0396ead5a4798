"""Byte level BPE by dictionary gives what the tokenizers library gives, or says that it does not know."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from miles_ref.data import tokenizer_path
from miles_ref.tokens.byte_level import AsciiEncoder, TokenBytes, ascii_encoder

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt2": None,
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL,
    "marks": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cases": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
ADDED = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|im_"]
PARTS = [
    *ADDED,
    "word",
    " word",
    "'S",
    "'ll",
    "  ",
    "\n",
    " \r\n",
    "\x1c",
    "\x0b",
    "\x00",
    "123",
    "4",
    "?!",
    " a-b/",
    "\t",
]


def _state(pattern: str | None) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((tokenizer_path("tiny-chatml") / "tokenizer.json").read_text())
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, last]}
    return state


@cache
def _encoder(pattern: str | None) -> tuple[Backend, AsciiEncoder]:
    state = _state(pattern)
    backend = Backend.from_str(json.dumps(state))
    encoder = ascii_encoder(state, backend)
    assert encoder is not None
    return backend, encoder


ascii_texts = st.lists(st.sampled_from(PARTS) | st.text(st.characters(max_codepoint=127), max_size=8)).map("".join)


@pytest.mark.parametrize("name", PATTERNS)
@given(text=ascii_texts)
def test_ascii_is_encoded_as_the_library_does(name: str, text: str) -> None:
    backend, encoder = _encoder(PATTERNS[name])
    assert encoder.encode(text) == backend.encode(text, add_special_tokens=False).ids


@given(ids=st.lists(st.integers(0, 2100)))
def test_ids_are_decoded_as_the_library_does(ids: list[int]) -> None:
    backend, _ = _encoder(None)
    assert TokenBytes(backend).decode(ids) == backend.decode(ids, skip_special_tokens=False)


@given(texts=st.lists(ascii_texts, max_size=5))
def test_forgetting_words_changes_no_ids(texts: list[str]) -> None:
    backend, _ = _encoder(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("miles_ref.tokens.byte_level._MAX_WORDS", 2)
        patch.setattr("miles_ref.tokens.byte_level._MAX_WORD_LENGTH", 3)
        encoder = ascii_encoder(_state(None), backend)
        assert encoder is not None
        for text in texts:
            assert encoder.encode(text) == backend.encode(text, add_special_tokens=False).ids


def test_a_text_that_the_pattern_does_not_cover_is_left_to_the_library() -> None:
    encoder = ascii_encoder(_state(r"\p{L}+"), _encoder(None)[0])
    assert encoder is not None
    assert encoder.encode("words") is not None
    assert encoder.encode("two words") is None
    assert encoder.encode("a<think>1") is None


@pytest.mark.parametrize("pattern", [r"b*|a+", r"\p{N}?|\s+|\S+"])
def test_a_text_in_which_the_pattern_matches_nothing_is_left_to_the_library(pattern: str) -> None:
    """`re` would find a word of two letters where Oniguruma, after an empty match, skips one."""
    encoder = ascii_encoder(_state(pattern), _encoder(None)[0])
    assert encoder is not None
    assert encoder.encode("aa") is None


def test_a_long_text_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    _, encoder = _encoder(None)
    monkeypatch.setattr("miles_ref.tokens.byte_level._MAX_TEXT", 4)
    assert encoder.encode("word") is not None
    assert encoder.encode("words") is None


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{L}+?",
        r"\p{L}++",
        r"\p{L}{1,3}+",
        r"(\p{L}+)",
        r"\w+",
        r".",
        r"^a",
        r"a$",
        r"\p{Sc}",
        r"\p{M}",
        r"\p{L}\p{M}*|[^\s\p{L}]+|\s+",
        r"[\p{Lm}]+|[\S]|\s",
        r"[^\p{Lm}]+|[\S]|\s",
        r"(?:ab?)+|\S|\s",
        r"(?:ab?)*|\S|\s",
        r"(?:ab?){2}|\S|\s",
        r"[a[b]]",
        r"[a&&b]",
        r"(?<=a)b",
        r"(?>a)",
        r"(?i:\p{Lu})",
        r"\P{L}",
        r"é",
    ],
)
def test_what_re_may_read_in_another_way_is_left_to_the_library(pattern: str) -> None:
    assert ascii_encoder(_state(pattern), _encoder(None)[0]) is None


@pytest.mark.parametrize(
    "change",
    [
        *({"behavior": name} for name in ("Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")),
        {"invert": True},
        {"pattern": {"String": "a"}},
        {"type": "Punctuation"},
    ],
)
def test_other_ways_to_split_are_left_to_the_library(change: dict[str, Any]) -> None:
    state = _state(PATTERNS["qwen"])
    state["pre_tokenizer"]["pretokenizers"][0].update(change)
    assert ascii_encoder(state, _encoder(None)[0]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"added_tokens": [{"id": 2048, "content": "<think>", "normalized": True}]},
    ],
)
def test_other_tokenizers_are_left_to_the_library(change: dict[str, Any]) -> None:
    assert ascii_encoder({**_state(None), **change}, _encoder(None)[0]) is None
