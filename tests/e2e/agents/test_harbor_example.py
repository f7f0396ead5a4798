"""examples/harbor: the same trials inline, in child processes and on a worker; both launcher paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.agents.support import worker_process

HARBOR = Path(__file__).parents[3] / "examples" / "harbor"
PROVIDER_FREE = {name: value for name, value in os.environ.items() if not name.startswith(("E2B", "HARBOR"))}


def launch(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "run.py", *flags],
        cwd=HARBOR,
        env=PROVIDER_FREE | {"HOME": "/nonexistent"} | env,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("mode", ["inline", "subproc", "worker"])
def test_the_trials_give_the_same_rewards_in_every_mode(mode: str) -> None:
    with worker_process("--allow-function", "harbor_agent:*", env={"PYTHONPATH": str(HARBOR)}) as worker:
        ended = launch("--agent-worker-url", worker.url) if mode == "worker" else launch("--mode", mode)
    assert ended.returncode == 0, ended.stderr
    trials = {row["prompt"]: row for row in map(json.loads, ended.stdout.splitlines())}
    assert [trials[prompt]["reward"] for prompt in sorted(trials)] == [1.0, 0.0, 1.0]
    for row in trials.values():
        assert row["reports"][0] == {"sandbox": "started"}
        assert row["reports"][-1] == {"sandbox": "finished"}
        assert len(row["reports"]) == row["turns"] + 1


def test_trials_on_this_host_need_the_provider_s_key_and_say_so() -> None:
    ended = launch("--mode", "subproc", "--provider", "e2b")
    assert ended.returncode == 1
    assert "E2B_API_KEY" in ended.stderr
    assert ended.stdout == ""


def test_trials_on_a_worker_do_not() -> None:
    with worker_process(env={"PYTHONPATH": str(HARBOR)}) as worker:
        ended = launch("--agent-worker-url", worker.url, "--provider", "e2b", E2B_DOMAIN="sandboxes.example")
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 3


def test_the_turns_are_bounded_by_a_variable_that_travels() -> None:
    with worker_process(env={"PYTHONPATH": str(HARBOR)}) as worker:
        ended = launch("--agent-worker-url", worker.url, "--max-turns", "1")
    assert [json.loads(line)["turns"] for line in ended.stdout.splitlines()] == [1, 1, 1]


def test_a_worker_elsewhere_cannot_reach_a_model_on_loopback() -> None:
    ended = launch("--agent-worker-url", "http://192.0.2.1:8700")
    assert ended.returncode == 1
    assert "loopback" in ended.stderr
