"""Records and chains to assemble, small enough to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from miles_ref.records import AssemblySettings, Chain, IntArray, Record, int_array
from miles_ref.tokens.tokenizer import BytesTokenizer

Turn = tuple[Sequence[int], Sequence[int]]
MakeChain = Callable[..., Chain]


def record(prompt: Sequence[int], output: Sequence[int], before: Sequence[int] = (), **other: Any) -> Record:
    """A record stored against prompt + output of the one before it."""
    shared = 0
    while shared < min(len(prompt), len(before)) and prompt[shared] == before[shared]:
        shared += 1
    values: dict[str, Any] = {
        "log_probs": -np.arange(1, len(output) + 1) / 8,
        "finish_reason": "stop",
        "timestamp": 10.0,
    }
    return Record(
        shared=shared,
        prompt_tail=int_array(list(prompt[shared:])),
        output_ids=int_array(list(output)),
        **{**values, **other},
    )


@pytest.fixture
def make_chain() -> MakeChain:
    """Makes a chain of (prompt, output) turns; `accumulated` defaults to the last prompt + output."""

    def make(*turns: Turn, accumulated: Sequence[int] | None = (), **other: Any) -> Chain:
        records = []
        before: list[int] = []
        for at, (prompt, output) in enumerate(turns):
            records.append(record(prompt, output, before, **{key: values[at] for key, values in other.items()}))
            before = [*prompt, *output]
        ids: IntArray | None = None if accumulated is None else int_array(list(accumulated) or before)
        return Chain(records, ids)

    return make


@pytest.fixture
def settings() -> AssemblySettings:
    """The defaults, with the tokenizer "bytes"."""
    return AssemblySettings(decode=BytesTokenizer().decode)
