"""Plugins that end or hang their process are errors of their cases, and never a good run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import miles_ref
from miles_ref.errors import UsageError
from miles_ref.testing.check_command import check_command
from miles_ref.testing.corpus import corpus_root
from miles_ref.testing.isolation import IsolatedPlugins
from miles_ref.testing.report import from_lines

LAWS = str(corpus_root() / "v2" / "laws")
PLUGINS = """
import os
import signal
import threading


def ends(leaf_samples):
    os._exit(0)


def killed(leaf_samples):
    os.kill(os.getpid(), signal.SIGKILL)


def ends_with_two(leaf_samples):
    if len(leaf_samples) == 2:
        os._exit(7)
    return leaf_samples


def hangs(leaf_samples):
    threading.Event().wait()


def hangs_with_a_pipe(leaf_samples):
    os.open(os.environ["ALIVE"], os.O_WRONLY)
    threading.Event().wait()


FORKED = []


def forks(leaf_samples):
    if not FORKED:  # not in every call: a case has many, and each would double the processes
        FORKED.append(True)
        os.fork()
    return leaf_samples


def prints(leaf_samples):
    print("out of the plugin", flush=True)
    os.system("echo out of its child")
    assert os.read(0, 1) == b""
    return leaf_samples
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGINS)
    return path


def check(*arguments: str) -> Result:
    return CliRunner().invoke(check_command, [LAWS, *arguments], catch_exceptions=False)


def only(*names: str) -> list[str]:
    return [part for name in names for part in ("-k", f"v2/laws/{name}")]


def test_a_plugin_that_ends_the_process_is_an_error_and_the_run_is_given_up(file: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    names = ("one-leaf", "chain", "two-roots", "retry", "branches")
    done = check("--picker", f"{file}:ends", "--report", str(report), *only(*names))
    assert done.exit_code == 1
    verdicts = from_lines(report.read_text().splitlines()).verdicts
    assert [str(verdict.outcome) for verdict in verdicts] == ["error"] * len(names)
    for verdict in verdicts[:3]:
        assert verdict.details == (f"{verdict.case_id}: picker {file}:ends ended the process with exit status 0",)
    for verdict in verdicts[3:]:
        assert verdict.details == (
            f"not judged: picker {file}:ends ended or held up its process 3 times, so the run was given up",
        )


def test_a_signal_is_named(file: Path) -> None:
    done = check("--picker", f"{file}:killed", *only("one-leaf"))
    assert done.exit_code == 1
    assert "ended the process by signal 9" in done.output


def test_the_next_cases_are_judged_by_a_new_process(file: Path) -> None:
    done = check("--picker", f"{file}:ends_with_two", *only("one-leaf", "two-roots", "chain"))
    assert done.exit_code == 1
    assert "error: v2/laws/two-roots" in done.output
    assert "ended the process with exit status 7" in done.output
    assert "does not hold: 1 of 3 cases (1 error)" in done.output.splitlines()[-1]


def test_a_plugin_that_hangs_is_an_error(file: Path) -> None:
    done = check("--picker", f"{file}:hangs", "--case-timeout", "0.2", *only("one-leaf"))
    assert done.exit_code == 1
    assert f"v2/laws/one-leaf: picker {file}:hangs gave no answer within 0.2 s" in done.output


def test_what_a_plugin_prints_is_no_part_of_the_result(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = check("-q", "--picker", f"{file}:prints", *only("one-leaf"))
    assert done.output == f"picker {file}:prints holds in all 1 judged cases.\n"
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "out of the plugin\n" in captured.err
    assert "out of its child\n" in captured.err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nos._exit(0)\n", "cannot be loaded: ended the process with exit status 0"),
        ("raise RuntimeError('no')\n", "cannot import it: RuntimeError: no"),
        ("pick = 5\n", "it is int 5, not a function"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_a_mistake_in_the_command(source: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(UsageError) as caught:
        IsolatedPlugins(picker=f"{file}:pick")
    assert said in str(caught.value)
    assert "mine.py:pick" in str(caught.value)


def test_modules_are_found_where_the_parent_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def pick(leaf_samples):\n    return leaf_samples\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"give \./only_here\.py:pick"):
        IsolatedPlugins(picker="only_here:pick")
    monkeypatch.syspath_prepend(str(tmp_path))
    IsolatedPlugins(picker="only_here:pick").close()


def test_a_plugin_that_forks_answers_once_a_case(file: Path) -> None:
    done = check("-q", "--picker", f"{file}:forks", *only("one-leaf", "two-roots", "chain"))
    assert done.output == f"picker {file}:forks holds in all 3 judged cases.\n"


def test_the_package_is_found_where_the_parent_found_it(file: Path, tmp_path: Path) -> None:
    """By a path that the run itself added, in an interpreter without packages of its own."""
    added = [str(Path(miles_ref.__file__).parents[1]), sysconfig.get_path("purelib")]
    code = (
        f"import sys; sys.path += {added!r}\n"
        "from miles_ref.testing.isolation import IsolatedPlugins\n"
        f"IsolatedPlugins(picker={f'{file}:hangs'!r}).close()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    subprocess.run([python, "-S", "-c", code], env=environment, cwd=tmp_path, check=True)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_plugin_that_hangs_does_not_outlive_the_run(
    number: signal.Signals, status: int, file: Path, tmp_path: Path
) -> None:
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    command = [sys.executable, "-m", "miles_ref", "check", LAWS, "--picker", f"{file}:hangs_with_a_pipe"]
    run = subprocess.Popen([*command, *only("one-leaf")], env={**os.environ, "ALIVE": str(alive)})
    try:
        with alive.open("rb") as held:  # opens when the plugin holds the other end
            run.send_signal(number)
            assert run.wait(60) == status
            assert held.read() == b""  # the plugin's process has ended
    finally:
        run.kill()
        run.wait()


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e10", "0", "-1", "86401"])
def test_a_time_that_is_none_is_a_mistake_in_the_command(seconds: str, file: Path) -> None:
    done = check("--picker", f"{file}:hangs", "--case-timeout", seconds, *only("one-leaf"))
    assert done.exit_code == 2
    assert "more than 0 and at most 86400 seconds" in done.output


@pytest.mark.parametrize("target", [[], ["--target", "program:none"]])
def test_a_time_for_plugins_is_refused_where_there_is_none(target: list[str]) -> None:
    done = check(*target, "--case-timeout", "5", *only("one-leaf"))
    assert done.exit_code == 2
    assert "--case-timeout is for --picker" in done.output
