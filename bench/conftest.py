"""Benches run alone (`-n 0`, `make bench`): each asserts that its result is right before it times anything."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.episode import backend
from miles_ref.process import ReadyProcess
from miles_ref.tokens.tokenizer import Tokenizer, load_tokenizer


def sizes(*all_sizes: int) -> list[int]:
    """The sizes to measure, up to MILES_REF_BENCH_MAX (a quick run: `MILES_REF_BENCH_MAX=32 make bench`)."""
    most = int(os.environ.get("MILES_REF_BENCH_MAX", max(all_sizes)))
    return [size for size in all_sizes if size <= most]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny-chatml")


@pytest.fixture(scope="module")
def plain_backend() -> Iterator[ReadyProcess]:
    """200 output tokens a turn, no replay rows."""
    with backend() as process:
        yield process


@pytest.fixture(scope="module")
def replay_backend() -> Iterator[ReadyProcess]:
    """200 output tokens a turn, replay rows of 8 layers x 32 experts: 1024 bytes a token."""
    with backend(layers=8, topk=32) as process:
        yield process
