"""The tokenizers: bytes by its definition, folders through transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_ref.data import tokenizer_names, tokenizer_path
from miles_ref.errors import MessageValidationError, TokenizationError, UsageError
from miles_ref.tokens import tokenizer as tokenizer_module
from miles_ref.tokens.tokenizer import BytesTokenizer, HFTokenizer, Tokenizer, load_tokenizer


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([104, 105], "hi"),
        ([0xC3, 0xA9], "é"),
        ([0xC3], "\ufffd"),
        ([0xC3, 256, 0xA9], "\ufffd<|256|>\ufffd"),
        ([256, 257, 65], "<|256|><|257|>A"),
        ([0xF0, 0x9F, 0x98, 65], "\ufffdA"),
        ([0xE0, 0x80, 0x80], "\ufffd\ufffd\ufffd"),
        ([0xFF, 0xFE], "\ufffd\ufffd"),
        ([255, 255, 0x41, 2**40], "\ufffd\ufffdA<|1099511627776|>"),
    ],
)
def test_bytes_decodes_runs_of_bytes_as_utf8(ids: list[int], text: str) -> None:
    tokenizer = BytesTokenizer()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.array(ids, dtype=np.int64)) == text


def test_bytes_has_no_template_no_specials_and_no_negative_ids() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("é<|256|>") == list("é<|256|>".encode())
    assert tokenizer.special_ids == frozenset()
    with pytest.raises(MessageValidationError, match="no chat template"):
        tokenizer.render([{"role": "user"}], tools=None, add_generation_prompt=True, template_kwargs={})
    with pytest.raises(TokenizationError, match="-1"):
        tokenizer.decode([65, -1])
    with pytest.raises(MessageValidationError, match="surrogate"):
        tokenizer.encode("\ud800")


def test_a_folder_keeps_special_tokens_both_ways(chatml: HFTokenizer) -> None:
    assert isinstance(chatml, Tokenizer)
    ids = chatml.encode("<|im_start|>user\nhé <think><|im_end|>")
    assert ids[0] == 1
    assert ids[-2:] == [2048, 2]
    assert chatml.decode(ids) == chatml.decode(np.array(ids)) == "<|im_start|>user\nhé <think><|im_end|>"
    assert chatml.special_ids == {0, 1, 2}
    assert chatml.encode("") == []
    assert chatml.decode([]) == ""


def test_decoding_ids_that_do_not_exist(chatml: HFTokenizer) -> None:
    letter = chatml.encode("A")
    assert chatml.decode([5000, *letter]) == "A"
    for bad, shown in (
        ([-1], r"1 ids \[-1\]"),
        ([2**40], r"1 ids \[1099511627776\]"),
        ([-1] * 8, r"8 ids \[-1(, -1){7}\]"),
        ([-1] * 9, r"9 ids \[-1(, -1){7}\]\.\.\."),
    ):
        with pytest.raises(TokenizationError, match=f"cannot decode {shown}: "):
            chatml.decode(bad)


def test_a_lone_surrogate_is_refused(chatml: HFTokenizer) -> None:
    with pytest.raises(MessageValidationError, match="surrogate"):
        chatml.encode("a\ud800")


def test_names_paths_and_what_is_neither(tmp_path: Path) -> None:
    assert tokenizer_names() == ["tiny-chatml", "tiny-glm"]
    assert load_tokenizer(tokenizer_path("tiny-glm")).name == "tiny-glm"
    with pytest.raises(KeyError, match="tiny-chatml"):
        tokenizer_path("none")
    with pytest.raises(UsageError, match="bytes, tiny-chatml, tiny-glm"):
        load_tokenizer("none")
    with pytest.raises(UsageError, match="cannot read"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_of_a_training_are_off(variant: Callable[..., HFTokenizer]) -> None:
    def cut(state: dict[str, Any]) -> None:
        state["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        state["padding"] = {
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
        }  # fmt: skip

    tokenizer = variant(cut)
    assert tokenizer.decode(tokenizer.encode("one two three four")) == "one two three four"


def render(tokenizer: HFTokenizer, messages: list[Any], **kwargs: Any) -> str:
    return tokenizer.render(messages, tools=None, add_generation_prompt=True, template_kwargs=kwargs)


def test_a_template_sees_what_transformers_shows(variant: Callable[..., HFTokenizer]) -> None:
    template = "{{ [messages, tools, documents, add_generation_prompt, extra, eos_token] | tojson }}"
    tokenizer = variant(template=template)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None},
        {
            "role": "assistant",
            "content": "é",
            "reasoning": "r",
            "tool_calls": [{"function": {"arguments": {"b": 1.5}}}],
        },
        {"role": "assistant", "thinking": "t", "reasoning_content": " "},
    ]
    by_transformers = tokenizer._hf.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, extra={"x": None}
    )
    assert render(tokenizer, messages, extra={"x": None}) == by_transformers
    assert '"thinking": "r"' in by_transformers
    documents = [{"title": "t", "text": "x"}]
    assert '"title"' in render(tokenizer, messages, documents=documents, extra=1)


def test_the_installed_transformers_allows_the_direct_call(
    variant: Callable[..., HFTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = variant(template="{{ messages | length }}{{ eos_token }}{{ bos_token }}")
    assert render(tokenizer, [{"role": "user"}]) == "1<|im_end|>"
    monkeypatch.setattr(tokenizer._hf, "apply_chat_template", None, raising=False)
    assert render(tokenizer, [{"role": "user"}]) == "1<|im_end|>"


@pytest.mark.parametrize("shown", [dict, lambda message: {"zone": "written first", **message}])
def test_another_preparation_by_transformers_is_not_bypassed(
    variant: Callable[..., HFTokenizer], monkeypatch: pytest.MonkeyPatch, shown: Callable[[Any], dict[str, Any]]
) -> None:
    monkeypatch.setattr(tokenizer_module, "_as_transformers_shows", shown)
    tokenizer = variant(template="{{ messages | tojson }}")
    assert render(tokenizer, [{"role": "user", "name": None}]) == '[{"role": "user"}]'


def test_a_template_that_raises_gives_its_message(variant: Callable[..., HFTokenizer]) -> None:
    tokenizer = variant(template="{{ raise_exception('only one user, ' + messages[0].role) }}")
    with pytest.raises(MessageValidationError, match="only one user, tool") as caught:
        render(tokenizer, [{"role": "tool"}])
    assert caught.value.status_code == 400


def test_a_missing_template_and_broken_messages_are_the_requests_fault(variant: Callable[..., HFTokenizer]) -> None:
    with pytest.raises(MessageValidationError):
        render(variant(template=""), [{"role": "user", "content": 3}], tokenize=True)
    tokenizer = variant(template="{{ messages | tojson }}")
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(MessageValidationError, match="too deeply"):
        render(tokenizer, [{"role": "user", "content": deep}])


@pytest.mark.parametrize("text", ["", "a", "<|im_end|>", "x<|im_start|><|im_end|>\ny<think>é</think>", "<|im_end|"])
def test_pieces_are_cut_as_the_tokenizer_cuts(chatml: HFTokenizer, text: str) -> None:
    assert chatml.pieces is not None
    pieces = chatml.pieces.split(text)
    assert "".join(piece for _, piece in pieces) == text
    ids = [[token] if token is not None else chatml.encode(piece) for token, piece in pieces]
    assert [token for one in ids for token in one] == chatml.encode(text)
    assert {one[0] for one in ids if one[0] in chatml.special_ids} == {
        token for token, _ in pieces if token is not None
    }


def _first_special(**flags: bool) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["added_tokens"][1].update(flags)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(normalizer={"type": "Lowercase"}),
        lambda state: state["pre_tokenizer"].update(add_prefix_space=True),
        lambda state: state["model"]["vocab"].pop("\u00f5"),  # a letter that no merge makes anything of
        lambda state: state.update(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                ],
            }
        ),
        lambda state: state.update(pre_tokenizer=None),
        lambda state: state.update(decoder=None),
        lambda state: state["added_tokens"][3].update(content="caf\u00e9"),
        lambda state: state["added_tokens"][3].update(content="\u0120x"),  # decodes to " x"
        _first_special(lstrip=True),
        _first_special(rstrip=True),
        _first_special(single_word=True),
        _first_special(normalized=True),
    ],
)
def test_a_tokenizer_that_may_change_a_text_has_no_pieces_and_is_left_to_the_library(
    variant: Callable[..., HFTokenizer], change: Callable[[dict[str, Any]], None]
) -> None:
    tokenizer = variant(change)
    assert tokenizer.pieces is None
    ids = tokenizer.encode("Two <|im_start|> words")
    assert ids == tokenizer._backend.encode("Two <|im_start|> words", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=False)


def test_loading_a_folder_does_not_import_torch() -> None:
    code = (
        "import sys; from miles_ref.tokens.tokenizer import load_tokenizer; "
        "load_tokenizer('tiny-chatml'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_a_folder_without_transformers_says_what_to_install(
    variant: Callable[..., HFTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"needs transformers: pip install 'miles-ref\[serve\]'"):
        variant()
