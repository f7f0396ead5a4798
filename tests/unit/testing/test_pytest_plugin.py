"""The corpus in pytest: what is collected, what a failure says, what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import miles_ref.testing.targets  # noqa: F401 - here, so that no run has to
from miles_ref.testing import pytest_plugin
from miles_ref.testing.corpus import HEADINGS, SCHEMA, corpus_root

pytest_plugins = ["pytester"]

ROOT = corpus_root()
CASE = {
    "id": "tokens/match/one",
    "why": "A message equals itself; a wrong matcher says no.",
    "kind": "match",
    "input": {"stored": {"role": "user"}, "replayed": {"role": "user"}, "matcher": "strict"},
    "expect": {"match": True},
}


@pytest.fixture(autouse=True)
def _alone(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process, with this plugin only: others would be imported anew for each run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\n")


def corpus(folder: Path, *cases: dict[str, Any]) -> Path:
    root = folder / "golden"
    (root / "tokens").mkdir(parents=True)
    for name in (SCHEMA, HEADINGS):
        shutil.copy(ROOT / name, root / name)
    (root / "tokens" / "match.json").write_text(json.dumps(list(cases)))
    (folder / "other.json").write_text("{}")
    return root


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", pytest_plugin.__name__, *arguments)


def answering(pytester: pytest.Pytester, *, match: bool) -> str:
    """A target: a program that gives this answer to each match case."""
    program = pytester.makepyfile(
        program=f"""
        import json, sys
        for line in sys.stdin:
            said = json.loads(line)
            answer = {{"hello": 1, "kinds": ["match"]}} if "hello" in said else {{
                "id": said["case"]["id"], "observed": {{"match": {match}}}}}
            print(json.dumps(answer), flush=True)
        """
    )
    return f"program:{sys.executable} {program}"


def test_one_test_a_case_by_its_id(pytester: pytest.Pytester) -> None:
    corpus(pytester.path, CASE, {**CASE, "id": "tokens/match/two"})
    result = run(pytester, "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*match.json::tokens/match/one PASSED*", "*match.json::tokens/match/two PASSED*"])


def test_a_failure_says_why(pytester: pytest.Pytester) -> None:
    corpus(pytester.path, {**CASE, "expect": {"match": False}})
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["failed: tokens/match/one", "why: A message equals itself;*", "- match: expected false*"]
    )


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        ([{**CASE, "surprise": 1}], "*unknown key 'surprise'*"),
        ([CASE, CASE], "*'tokens/match/one' is used twice*"),
        ([{**CASE, "kind": "other"}], "*kind is 'other'*"),
    ],
)
def test_what_is_not_of_the_format_is_an_error(
    pytester: pytest.Pytester, cases: list[dict[str, Any]], said: str
) -> None:
    corpus(pytester.path, *cases)
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([said])


def test_an_id_of_two_files_is_an_error(pytester: pytest.Pytester) -> None:
    first = corpus(pytester.path, CASE) / "tokens" / "match.json"
    shutil.copy(first, first.with_name("again.json"))
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*match.json: the id 'tokens/match/one' is used twice, first in *again.json*"])
    run(pytester, str(first), str(first)).assert_outcomes(passed=1)


def test_known_failures_are_strict(pytester: pytest.Pytester) -> None:
    corpus(pytester.path, {**CASE, "expect": {"match": False}}, {**CASE, "id": "tokens/match/two"})
    known = pytester.path / "known.txt"
    known.write_text("tokens/match/one  # ours says yes\n")
    run(pytester, "--miles-expectations", str(known)).assert_outcomes(xfailed=1, passed=1)
    known.write_text("tokens/match/*  # ours says yes\n")
    run(pytester, "--miles-expectations", str(known)).assert_outcomes(xfailed=1, failed=1)
    known.write_text("tokens/other/*  # ours says yes\n")
    assert run(pytester, "--miles-expectations", str(known)).ret == pytest.ExitCode.USAGE_ERROR


def test_another_target_is_judged(pytester: pytest.Pytester) -> None:
    corpus(pytester.path, CASE)
    result = run(pytester, "--miles-target", answering(pytester, match=False), "golden")
    result.assert_outcomes(failed=1)


def test_cases_that_a_target_cannot_be_asked_are_skipped(pytester: pytest.Pytester) -> None:
    corpus(pytester.path, CASE)
    run(pytester, "--miles-picker", "miles_ref.testing.doubles.latest_first").assert_outcomes(skipped=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--miles-target", "bogus"], "*--target 'bogus' is none of*"),
        (["--miles-target", 'program:"'], "*cannot be split into words*"),
        (["--miles-picker", "./none.py:pick"], "*there is no file*none.py*"),
        (["--miles-picker", ""], "*--picker is given with an empty value*"),
        (["--miles-plugin-set", "longest"], "*give --picker longest*"),
        (["--miles-server-config", "{"], "*--miles-server-config '{' is not JSON*"),
        (["--miles-server-config", "[]"], "*--miles-server-config '[[]]' is not a JSON object*"),
        (["--miles-server-version", "v2"], "*--server-version is for a server that runs already*"),
        (["--miles-expectations", "nofile"], "*nofile cannot be read*"),
        (["--miles-target", "worker:x", "--miles-provides", "typo"], "*--miles-provides 'typo'*they require lists*"),
    ],
)
def test_a_mistake_in_the_options_is_said_once(pytester: pytest.Pytester, arguments: list[str], said: str) -> None:
    corpus(pytester.path, {**CASE, "requires": ["lists"]}, {**CASE, "id": "tokens/match/two"})
    result = run(pytester, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {said}"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert str(result.stderr).count("ERROR: ") == 1


def test_a_mistake_is_said_once_however_many_processes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus(pytester.path, CASE)
    result = run(pytester, "-p", "xdist", "-n", "1", "--miles-picker", "./none.py:pick")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *there is no file*none.py*"])


@pytest.mark.parametrize("option", ["--miles-provides", "--miles-expectations"])
def test_what_concerns_no_case_is_one_failed_test_of_many_processes(pytester: pytest.Pytester, option: str) -> None:
    corpus(pytester.path, CASE, {**CASE, "id": "tokens/match/two"})
    (pytester.path / "typo").write_text("tokens/other/*  # ours says yes\n")
    target = ["--miles-target", "program:none"] if option == "--miles-provides" else []
    result = run(pytester, "-p", "xdist", "-n", "1", *target, option, "typo", "-k", "two")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=1)
    said = "--miles-provides 'typo': no chosen case" if target else "typo:1: 'tokens/other/[*]' matches no case"
    result.stdout.fnmatch_lines([f"{said}*"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


def test_a_plugin_is_built_once_for_all_cases(pytester: pytest.Pytester) -> None:
    laws = json.loads((ROOT / "v2" / "laws" / "forests.json").read_text())[:3]
    corpus(pytester.path, *laws)
    pytester.makepyfile(
        mine="""
        from pathlib import Path

        with Path(__file__).with_name("loads").open("a") as file:
            file.write("x")

        def pick(leaf_samples):
            return leaf_samples
        """
    )
    run(pytester, "--miles-picker", "./mine.py:pick", "golden").assert_outcomes(passed=3)
    assert (pytester.path / "loads").read_text() == "x"


def test_a_case_is_skipped_where_the_target_lacks_what_it_requires(pytester: pytest.Pytester) -> None:
    corpus(pytester.path, {**CASE, "requires": ["lists"]})
    target = ["--miles-target", answering(pytester, match=True), "golden"]
    result = run(pytester, "-rs", *target)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*requires lists, which the target does not provide*"])
    run(pytester, *target, "--miles-provides", "lists").assert_outcomes(passed=1)
    run(pytester, "golden").assert_outcomes(passed=1)


def test_the_shipped_corpus_is_collected_on_demand(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--miles-corpus", "--collect-only", "-q", "-k", "v2/laws/one-leaf")
    result.stdout.fnmatch_lines(["*forests.json::v2/laws/one-leaf"])


def test_the_plugin_is_light() -> None:
    code = (
        "import sys, miles_ref.testing.pytest_plugin;"
        "heavy = {'numpy', 'aiohttp', 'torch', 'transformers', 'jsonschema'} & set(sys.modules);"
        "sys.exit(' '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
