"""A session of two leaves that share a root, and plugins that are written to files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_ref.plugins import Pipeline
from miles_ref.records import AssemblySettings, Chain, Leaf, Payload, Record, int_array
from miles_ref.tokens.tokenizer import BytesTokenizer


class Session:
    """Two chains of one forest, with routed experts: #0 -+- #1, #2. `collect` assembles and encodes with a pipeline."""

    settings = AssemblySettings(decode=BytesTokenizer().decode, routed_experts=True, num_layers=1)

    def __init__(self) -> None:
        root = record(list(b"ask "), list(b"one "), 0)
        outputs = [list(b"left"), list(b"right")]
        leaves = [record(list(b"ask one two "), output, 8) for output in outputs]
        self.records = [root, *leaves]
        self.chains = [
            Chain([root, leaf], int_array([*b"ask one two ", *output]), Leaf(at, 0, (0, at), f"r{at}"))
            for at, (leaf, output) in enumerate(zip(leaves, outputs, strict=True), 1)
        ]

    @property
    def metadata(self) -> dict[str, Any]:
        nodes = [
            {
                "id": at,
                "parent": None if at == 0 else 0,
                "seq": at,
                "truncated": False,
                "committed_at": 0.0,
                "completion_span": [one.start, one.end],
                "num_tokens": one.end,
                "response_id": f"r{at}",
            }
            for at, one in enumerate(self.records)
        ]
        leaves = [{"node_id": at, "path_node_ids": [0, at]} for at in (1, 2)]
        ids = self.chains[-1].accumulated
        return {"accumulated_token_ids": ids, "max_trim_tokens": 0, "tree": {"nodes": nodes, "leaves": leaves}}

    def collect(self, pipeline: Pipeline, max_seq_len: int | None = None) -> bytes:
        return pipeline.collect(self.chains, self.metadata, max_seq_len, self.settings)


def record(prompt: list[int], output: list[int], shared: int) -> Record:
    end = len(prompt) + len(output)
    return Record(
        shared=shared,
        prompt_tail=int_array(prompt[shared:]),
        output_ids=int_array(output),
        log_probs=-np.arange(1.0, len(output) + 1),
        finish_reason="stop",
        timestamp=1.0,
        routed_experts=Payload(np.arange(end - 1, dtype="<i4").tobytes()),
    )


@pytest.fixture
def session() -> Session:
    """The session."""
    return Session()


@pytest.fixture
def plugin_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a plugin file and gives its path; `HEAD` comes first."""

    def write(source: str, name: str = "plugin.py") -> str:
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(source), encoding="utf-8")
        return str(path)

    return write


HEAD = "from miles_ref.hookspecs import hookimpl\n"
