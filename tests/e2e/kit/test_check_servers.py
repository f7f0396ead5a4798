"""`miles-ref check` on servers: a good one that it starts, wrong ones, one that runs already, a program on Node."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from miles_ref.cli import main
from miles_ref.process import ReadyProcess
from miles_ref.testing.programs import free_port

REPO = Path(__file__).parents[3]
SERVER = f"{sys.executable} -m miles_ref serve --port {{port}} --backend-url {{backend}}"
WRONG = """
import sys
from miles_ref.server import turns
from miles_ref import cli
{patch}
sys.argv = ["miles-ref", "serve", *sys.argv[1:]]
cli.main()
"""
BREAKS = {
    "a turn that moved on is committed": (
        "from miles_ref.trajectory.linear import LinearTrajectory\n"
        "LinearTrajectory.can_commit = lambda self, attachment: True",
        "v1/http/two-turns-at-once",
    ),
    "nothing is stored": (
        "from miles_ref.server.sessions import Session\nSession.commit = lambda self, attachment, node: True",
        "v1/http/stream-turn-is-recorded",
    ),
}

pytestmark = pytest.mark.timeout(240)


def check(*arguments: str) -> Result:
    """The command in this process, which has the tokenizers' libraries: what is started by it are the servers."""
    return CliRunner().invoke(main, ["check", *arguments], catch_exceptions=False)


def last(output: str) -> str:
    return output.splitlines()[-1]


def test_a_good_server_holds() -> None:
    cases = ["-k", "v1/http/get-shows-the-record", "-k", "v2/http/chain-of-turns"]
    argv = [sys.executable, "-m", "miles_ref", "check", "--target", f"server:{SERVER}", *cases]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert last(done.stdout).endswith("holds in all 2 judged cases.")


@pytest.mark.parametrize("name", BREAKS)
def test_a_wrong_server_does_not(name: str, tmp_path: Path) -> None:
    patch, case = BREAKS[name]
    (tmp_path / "wrong.py").write_text(WRONG.format(patch=patch))
    command = f"server:{sys.executable} {tmp_path}/wrong.py --port {{port}} --backend-url {{backend}}"
    done = check("--target", command, "-k", case)
    assert done.exit_code == 1
    assert f"failed: {case}" in done.stdout
    assert "does not hold: 1 of 1 cases" in last(done.stdout)


def test_a_miswired_harness_is_told_apart() -> None:
    command = f"server:{sys.executable} -m http.server {{port}} --bind 127.0.0.1 {{flags}} {{backend}}"
    done = check("--target", command, "-k", "v1/http/health")
    assert done.exit_code == 1
    assert "do not understand each other" in last(done.stdout)


def test_a_server_that_runs_already() -> None:
    port = free_port()
    argv = ["serve", "--port", "0", "--backend-url", f"http://127.0.0.1:{port}", "--tito-model", "qwen3"]
    with ReadyProcess([sys.executable, "-m", "miles_ref", *argv]) as server:
        config = '{"tokenizer": "tiny-chatml", "family": "qwen3"}'
        where = ["--target", server.url, "--backend-listen", f"127.0.0.1:{port}", "--server-config", config]
        done = check(*where, "-k", "v1/http/get-shows-the-record", "-k", "v2/http/chain-of-turns")
    assert done.exit_code == 0, done.stdout + done.stderr
    assert last(done.stdout) == f"{server.url} holds in all 1 judged cases (1 skipped)."


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_an_implementation_in_another_language() -> None:
    adapter = REPO / "examples" / "adapter-node" / "adapter.mjs"
    paths = [str(REPO / "tests" / "golden" / name) for name in ("v1/compute", "v1/fold", "wire/decode", "tokens/match")]
    done = check("--target", f"program:node {adapter}", *paths)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "holds in all" in last(done.stdout)
    assert "skipped" in last(done.stdout)
