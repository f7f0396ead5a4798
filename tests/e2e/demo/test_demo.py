"""`miles-ref demo`: one episode on real parts, and figures that can be recomputed from the files it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles_ref.sample import Sample
from miles_ref.wire import SAMPLES_VALUE_SPEC, SAMPLES_VALUE_SPEC_V2, decode_samples_and_merge_input_sample

# Each run imports torch in two processes, one after the other: seconds on a free machine, minutes on a busy one.
pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("demo")]
SECONDS = 500

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


def miles_ref(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "miles_ref", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_a_linear_episode(tmp_path: Path) -> None:
    done = miles_ref("demo", "--out", str(tmp_path), "--steps", "6", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert list(figures) == KEYS

    payload, records = Path(figures["payload_file"]), Path(figures["records_file"])
    reply = decode_samples_and_merge_input_sample(payload.read_bytes(), Sample(), fields=SAMPLES_VALUE_SPEC)
    dump = json.loads(records.read_bytes())
    [sample] = reply.samples
    assert figures["turns"] == len(dump["records"]) == 7
    assert figures["tokens"] == len(sample.tokens)
    assert figures["response_length"] == sample.response_length
    assert figures["trained_tokens"] == sum(sample.loss_mask) > 0
    assert figures["records_bytes"] == records.stat().st_size
    assert figures["samples_bytes"] == payload.stat().st_size
    assert figures["max_logprob_error"] <= 1e-4
    assert figures["controls_failed"] == 3
    assert sample.status.value == "completed"
    assert dump["metadata"]["tito_session_mismatch"] == []

    other_weights = miles_ref("prove", str(payload), "--seed", "1")
    assert other_weights.returncode == 1
    assert json.loads(other_weights.stdout)["max_logprob_error"] > 1e-4


def test_a_tree_with_its_agent_on_a_worker(tmp_path: Path) -> None:
    done = miles_ref(
        *("demo", "--out", str(tmp_path), "--steps", "5", "--version", "v2", "--agent-mode", "worker"),
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr  # no terminal, no colours
    assert "«<think>" in done.stdout  # what is trained is marked instead
    assert "given up by a retry" in done.stdout  # the tree
    assert done.stdout.split()[-2:] == ["proven", "yes"]
    assert "agent worker" in done.stderr  # the progress

    payload = (tmp_path / "demo-v2.safetensors").read_bytes()
    reply = decode_samples_and_merge_input_sample(payload, Sample(), fields=SAMPLES_VALUE_SPEC_V2)
    # main line, branch and compaction; the reply that was retried is no sample
    assert [sample.reward for sample in reply.samples] == [1.0, 1.0, 1.0]
    assert len(reply.session_metadata["tree"]["leaves"]) == 4
