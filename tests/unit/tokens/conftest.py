"""The shipped tokenizers, read once a worker: they are immutable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_ref.data import tokenizer_path
from miles_ref.tokens.tokenizer import HFTokenizer, load_tokenizer


@pytest.fixture(scope="session")
def chatml() -> HFTokenizer:
    tokenizer = load_tokenizer("tiny-chatml")
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def glm() -> HFTokenizer:
    tokenizer = load_tokenizer("tiny-glm")
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


@pytest.fixture
def variant(tmp_path: Path) -> Callable[..., HFTokenizer]:
    """Make a tokenizer from tiny-chatml with its tokenizer.json or its chat template changed."""

    def make(change: Callable[[dict[str, Any]], None] = lambda state: None, template: str | None = None) -> HFTokenizer:
        source = tokenizer_path("tiny-chatml")
        state = json.loads((source / "tokenizer.json").read_text())
        change(state)
        config = json.loads((source / "tokenizer_config.json").read_text())
        if template is not None:
            config["chat_template"] = template
        (tmp_path / "tokenizer.json").write_text(json.dumps(state))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return HFTokenizer(tmp_path)

    return make
