"""The table of tokens.md, row by row, and families of third parties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from miles_ref.errors import PluginLoadError, UsageError
from miles_ref.tokens import families
from miles_ref.tokens.families import Family, family_names, get_family, register_family
from miles_ref.tokens.tokenizer import BytesTokenizer, HFTokenizer

EVERY_ROLE = ("tool", "user", "system", "assistant")


@pytest.mark.parametrize(
    ("name", "trim", "fixed", "tail", "opener", "roles"),
    [
        ("default", 0, {}, (), None, EVERY_ROLE),
        ("qwen3", 0, {"clear_thinking": False}, ("\n",), "<|im_start|>assistant", EVERY_ROLE),
        ("qwen35", 0, {"clear_thinking": False}, ("\n",), "<|im_start|>assistant", ("tool", "user", "assistant")),
        ("nemotron3", 0, {"truncate_history_thinking": False}, ("\n",), "<|im_start|>assistant\n", EVERY_ROLE),
        ("glm47", 1, {"clear_thinking": False}, ("<|user|>", "<|observation|>"), "<|assistant|>", EVERY_ROLE),
    ],
)
def test_the_table(
    name: str, trim: int, fixed: dict[str, Any], tail: tuple[str, ...], opener: str | None, roles: tuple[str, ...]
) -> None:
    family = get_family(name)
    assert family.name == name
    assert family.max_trim_tokens == trim
    assert dict(family.fixed_template_kwargs) == fixed
    assert family.tail_tokens == tail
    assert family.assistant_opener == opener
    assert set(family.append_roles) == set(roles)
    assert family.supports_midpath_assistant_rerender


def join(name: str, tokenizer: HFTokenizer, snapshot: str, suffix: str) -> str:
    bound = get_family(name).bind(tokenizer)
    ids = np.array(tokenizer.encode(snapshot), dtype=np.int64)
    kept, tail = bound.join(ids, np.array(tokenizer.encode(suffix), dtype=np.int64))
    assert tail.dtype == np.int64
    return tokenizer.decode(np.concatenate([ids[:kept], tail]))


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "nemotron3"])
def test_chatml_families_write_the_newline_that_the_model_does_not(chatml: HFTokenizer, name: str) -> None:
    assert join(name, chatml, "a<|im_end|>", "<|im_start|>") == "a<|im_end|>\n<|im_start|>"
    assert join(name, chatml, "a<|im_end|>\n", "<|im_start|>") == "a<|im_end|>\n<|im_start|>"
    assert join(name, chatml, "a", "<|im_start|>") == "a<|im_start|>"
    assert join(name, chatml, "a<|im_end|>b", "<|im_start|>") == "a<|im_end|>b<|im_start|>"
    assert join(name, chatml, "", "b") == "b"
    assert join(name, chatml, "a<|im_end|>", "") == "a<|im_end|>\n"


def test_glm_drops_one_stop_token_that_opens_the_next_message(glm: HFTokenizer) -> None:
    assert join("glm47", glm, "a<|user|>", "<|observation|>b") == "a<|observation|>b"
    assert join("glm47", glm, "a<|observation|>", "<|user|>b") == "a<|user|>b"
    assert join("glm47", glm, "a<|user|><|user|>", "<|user|>b") == "a<|user|><|user|>b"
    assert join("glm47", glm, "a<|endoftext|>", "<|user|>b") == "a<|endoftext|><|user|>b"
    assert join("glm47", glm, "a", "<|user|>b") == "a<|user|>b"
    assert join("glm47", glm, "", "b") == "b"


def test_default_joins_without_a_rule(chatml: HFTokenizer) -> None:
    assert join("default", chatml, "a<|im_end|>", "<|im_start|>") == "a<|im_end|><|im_start|>"


def test_a_tokenizer_without_the_familys_tokens_is_refused(chatml: HFTokenizer) -> None:
    with pytest.raises(UsageError, match=r"glm47.*<\|user\|>.*tiny-chatml"):
        get_family("glm47").bind(chatml)
    with pytest.raises(UsageError, match=r"qwen3.*bytes"):
        get_family("qwen3").bind(BytesTokenizer())
    assert get_family("default").bind(BytesTokenizer()).tail_ids == frozenset()

    class OfNothing(Family):
        name = "of-nothing"
        tail_tokens = ("",)

    with pytest.raises(UsageError, match=r"of-nothing.*encodes it to 0 ids \[\]"):
        OfNothing().bind(chatml)


def test_an_unknown_family_lists_the_choices() -> None:
    with pytest.raises(UsageError, match="default, glm47, nemotron3, qwen3, qwen35"):
        get_family("qwen")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))


@pytest.mark.usefixtures("registry")
def test_a_third_party_registers_a_family(chatml: HFTokenizer) -> None:
    @register_family
    class Stub(Family):
        name = "stub"
        boundary_tokens = ("<think>",)
        supports_midpath_assistant_rerender = False

        def join(self, snapshot: Any, suffix: Any, ids: Mapping[str, int]) -> tuple[int, Any]:
            return len(snapshot) - 1, np.array([ids["<think>"], *suffix], dtype=np.int64)

    assert register_family(Stub) is Stub
    assert "stub" in family_names()
    assert isinstance(get_family("stub"), Stub)
    assert join("stub", chatml, "a<|im_end|>", "b") == "a<think>b"

    class Other(Family):
        name = "stub"

    with pytest.raises(PluginLoadError, match="stub"):
        register_family(Other)
