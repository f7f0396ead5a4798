"""`miles-ref demo`: one episode on real parts, and figures that can be recomputed from the files it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_ref.sample import Sample
from miles_ref.wire import SAMPLES_VALUE_SPEC, SAMPLES_VALUE_SPEC_V2, decode_samples_and_merge_input_sample

KEYS = [
    "turns",
    "tokens",
    "response_length",
    "trained_tokens",
    "records_bytes",
    "samples_bytes",
    "max_logprob_error",
    "controls_failed",
    "payload_file",
    "records_file",
    "seconds",
]


def demo(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "miles_ref", "demo", "--out", str(out), "--steps", "6", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=110, check=False)


def collected(figures: dict[str, Any], version: str) -> list[Sample]:
    fields = SAMPLES_VALUE_SPEC if version == "v1" else SAMPLES_VALUE_SPEC_V2
    payload = Path(figures["payload_file"]).read_bytes()
    return list(decode_samples_and_merge_input_sample(payload, Sample(), fields=fields).samples)


@pytest.mark.parametrize(("version", "mode"), [("v1", "inline"), ("v2", "worker")])
def test_the_figures_follow_from_the_files(tmp_path: Path, version: str, mode: str) -> None:
    done = demo(tmp_path, "--json", "--version", version, "--agent-mode", mode)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert list(figures) == KEYS
    samples = collected(figures, version)
    dump = json.loads(Path(figures["records_file"]).read_bytes())
    assert figures["tokens"] == sum(len(sample.tokens) for sample in samples)
    assert figures["response_length"] == sum(sample.response_length for sample in samples)
    assert figures["trained_tokens"] == sum(sum(sample.loss_mask) for sample in samples) > 0
    assert figures["records_bytes"] == Path(figures["records_file"]).stat().st_size
    assert figures["samples_bytes"] == Path(figures["payload_file"]).stat().st_size
    assert figures["max_logprob_error"] <= 1e-4
    assert figures["controls_failed"] == 3
    assert figures["turns"] >= 6
    if version == "v1":
        assert figures["turns"] == len(dump["records"])
        assert [sample.status.value for sample in samples] == ["completed"]
        assert dump["metadata"]["tito_session_mismatch"] == []
    else:
        nodes = dump["metadata"]["tree"]["nodes"]
        assert figures["turns"] == len(nodes)
        # main line, branch and compaction; the reply that was retried is no sample
        assert len(samples) == 3
        assert {sample.reward for sample in samples} == {1.0}
        leaves = {leaf["node_id"] for leaf in dump["metadata"]["tree"]["leaves"]}
        assert len(leaves - {sample.metadata["leaf"]["node_id"] for sample in samples}) == 1
    assert_not_proven_by_another_model(figures["payload_file"])


def assert_not_proven_by_another_model(payload_file: str) -> None:
    argv = [sys.executable, "-m", "miles_ref", "prove", payload_file, "--seed", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["max_logprob_error"] > 1e-4


def test_what_is_shown_without_a_terminal_is_plain_text(tmp_path: Path) -> None:
    done = demo(tmp_path, "--agent-mode", "subproc", "--version", "v2")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stdout.split()[-2:] == ["proven", "yes"]
    assert "«<think>" in done.stdout  # what is trained is marked
    assert "given up by a retry" in done.stdout  # the tree
    assert "session server" in done.stderr  # the progress
