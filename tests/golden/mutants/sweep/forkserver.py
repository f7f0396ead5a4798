"""A program that judges mutants in one copy of the repository: `python -P forkserver.py COPY`, jobs as JSON lines.

It imports what is heavy and is not under test (numpy, aiohttp, transformers, pytest), never miles_ref or a test, and
forks for each job: a job starts with clean modules and pays for no import but the package's own. It imports nothing of
this repository itself, so that a child finds the copy's modules and no others.

A job is `{"file", "source", "unit", "limits"}`: the mutated source (None: as it is), the unit tests to run, and the
seconds that each stage may take. The answer is `{"outcome", "stage", "by", "detail", "stages"}`; see `judged`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DATA_KINDS = frozenset({"assemble", "encode", "decode", "match"})
NO_CASES = frozenset({"mutants", "oracle"})
MEMORY = 12 << 30
"""Address space of a job in bytes: a mutant that never stops appending ends by itself."""
HTTP_TIMEOUT, UNTIL_TIMEOUT = 10.0, 5.0
"""Shorter than the cases' own, for mutants that never answer."""

Emit = Callable[[Mapping[str, Any]], None]


def main(root: Path) -> int:
    """Answer jobs until standard input ends."""
    # Children write to fd 1; answers go where they cannot reach.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    jobs = os.fdopen(os.dup(0), "r", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir(root)
    data, http = read_cases(root / "tests" / "golden")
    first = json.loads(next(jobs))
    preload(_modules_used(root, first["unit"]))
    gc.collect()
    gc.freeze()
    _say(answers, {"ready": True, "cases": {"data": len(data), "http": len(http)}})
    for line in jobs:
        job = json.loads(line)
        _say(answers, judged(root, job, data, http, jobs.fileno()))
    return 0


def _say(answers: Any, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def read_cases(golden: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The raw cases that need no server, and those of a session server; hand-made ones first."""
    cases: list[dict[str, Any]] = []
    for file in sorted(golden.rglob("*.json")):
        place = file.relative_to(golden).parts
        if len(place) > 1 and place[0] not in NO_CASES:
            loaded = json.loads(file.read_text(encoding="utf-8"))
            cases += loaded if isinstance(loaded, list) else [loaded]
    cases.sort(key=lambda case: case.get("provenance") != "hand")
    # Cases that one server can serve come together.
    http = sorted(
        (case for case in cases if case["kind"] == "http"),
        key=lambda case: (
            case.get("provenance") != "hand",
            case["version"],
            json.dumps(case["config"], sort_keys=True),
        ),
    )
    return [case for case in cases if case["kind"] in DATA_KINDS], http


# Modules


def _modules_used(root: Path, unit: Sequence[str]) -> list[str]:
    """The modules from outside of the repository that a job imports, as a child that collects all tests finds them.

    The child also leaves the compiled tests behind, which jobs read and do not write again.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            _import_runner(root)
            _pytest(root, ["--collect-only", *unit], None)
            with os.fdopen(write, "w") as pipe:
                json.dump([name for name, module in list(sys.modules.items()) if _is_foreign(root, name, module)], pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    if not text:
        raise RuntimeError(f"{root}: the tests cannot even be collected")
    names: list[str] = json.loads(text)
    return names


def _is_foreign(root: Path, name: str, module: Any) -> bool:
    if name.split(".")[0] in ("miles_ref", "tests", "conftest", "__main__", "__mp_main__"):
        return False
    spec = getattr(module, "__spec__", None)
    if spec is None or spec.name != name:
        return False
    return not str(getattr(module, "__file__", None) or "").startswith(f"{root}{os.sep}")


def preload(names: Sequence[str]) -> None:
    """Import modules in the order in which the child met them."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # A module that some other module puts there by hand: the job imports it its own way.
            continue
    if any(name.split(".")[0] in ("miles_ref", "tests") for name in sys.modules):
        raise RuntimeError("the preloaded modules import the package under test")
    # The same examples for every mutant, and no search for a smaller one that fails.
    import hypothesis

    hypothesis.settings.register_profile(
        "mutation-sweep",
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.target),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("mutation-sweep")


# Jobs


def judged(root: Path, job: Mapping[str, Any], data: Sequence[Any], http: Sequence[Any], parent: int) -> dict[str, Any]:
    """Run one job in a child of its own, and put the file back.

    The outcome is "survived", "killed" or "timed out"; `stage` and `by` say what ended it, `stages` the seconds of each
    stage. A child that dies is killed by "crash". An "error" is not the mutant's doing.
    """
    file = root / job["file"] if job["file"] else None
    original = file.read_bytes() if file else b""
    if file:
        file.write_text(job["source"], encoding="utf-8")
    try:
        return _in_child(root, job, data, http, parent)
    finally:
        if file:
            file.write_bytes(original)


def _in_child(
    root: Path, job: Mapping[str, Any], data: Sequence[Any], http: Sequence[Any], parent: int
) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.setsid()
            _child(root, job, data, http, lambda message: _emit(write, message))
        except BaseException as error:
            _emit(write, {"outcome": "killed", "by": "crash", "detail": f"{type(error).__name__}: {error}"[:300]})
        finally:
            os._exit(0)
    os.close(write)
    try:
        return _awaited(read, job["limits"], parent)
    finally:
        os.close(read)
        # The group has the job's own processes; a child that was only just forked has no group yet.
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _awaited(pipe: int, limits: Mapping[str, float], parent: int) -> dict[str, Any]:
    """Read what a child says until it is done, dies, or a stage takes too long."""
    stages: dict[str, float] = {}
    stage, since = "start", time.monotonic()
    buffer = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    poll.register(parent, 0)  # says only that whoever asked is gone

    def end(outcome: str, by: str = "", detail: str = "") -> dict[str, Any]:
        seconds = {**stages, stage: time.monotonic() - since}
        rounded = {name: round(value, 3) for name, value in seconds.items()}
        return {"outcome": outcome, "stage": stage, "by": by, "detail": detail, "stages": rounded}

    while True:
        left = limits[stage] - (time.monotonic() - since)
        events = dict(poll.poll(max(0.0, left) * 1000))
        if parent in events:
            sys.exit(0)
        if not events:
            return end("timed out", detail=f"no end of stage {stage} within {limits[stage]:.0f} s")
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return end("killed", by="crash")
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "begin" not in message:
                return end(**message)
            now = time.monotonic()
            stages[stage] = now - since
            stage, since = message["begin"], now


def _emit(pipe: int, message: Mapping[str, Any]) -> None:
    os.write(pipe, (json.dumps(message) + "\n").encode())


def _child(root: Path, job: Mapping[str, Any], data: Sequence[Any], http: Sequence[Any], emit: Emit) -> None:
    """The stages, up to the first thing that fails."""
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    emit({"begin": "import"})
    try:
        judge = _import_runner(root)
    except Exception as error:
        emit({"outcome": "killed", "by": "import", "detail": f"{type(error).__name__}: {error}"[:300]})
        return
    import miles_ref

    if not str(miles_ref.__file__).startswith(f"{root}{os.sep}"):
        emit({"outcome": "error", "by": "", "detail": f"miles_ref was imported from {miles_ref.__file__}, not {root}"})
        return
    for stage, cases in (("data cases", data), ("unit tests", None), ("http cases", http)):
        emit({"begin": stage})
        failure = _unit(root, job["unit"]) if cases is None else judge(cases)
        if failure is not None:
            emit({"outcome": "killed", "by": failure[0], "detail": failure[1][:300]})
            return
    emit({"outcome": "survived", "by": "", "detail": ""})


def _import_runner(root: Path) -> Callable[[Sequence[Any]], tuple[str, str] | None]:
    """What runs cases up to the first that fails; its id and what is wrong."""
    from miles_ref.testing.cases import parse_case
    from miles_ref.testing.check import judge
    from miles_ref.testing.kinds import http
    from miles_ref.testing.targets import ReferenceTarget

    http.TIMEOUT, http.UNTIL_TIMEOUT = HTTP_TIMEOUT, UNTIL_TIMEOUT
    target = ReferenceTarget()

    def run(cases: Sequence[Any]) -> tuple[str, str] | None:
        for case in cases:
            verdict = judge(parse_case(case), target)
            if verdict.bad:
                return verdict.case_id, verdict.details[0] if verdict.details else ""
        return None

    return run


class _FirstFailure:
    """A pytest plugin that keeps the first test, or file, that fails."""

    def __init__(self) -> None:
        self.found: tuple[str, str] | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._keep(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._keep(report)

    def _keep(self, report: Any) -> None:
        if report.failed and self.found is None:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.found = report.nodeid, str(crash.message if crash is not None else report.longrepr)


def _unit(root: Path, paths: Sequence[str]) -> tuple[str, str] | None:
    first = _FirstFailure()
    code = _pytest(root, paths, first)
    return None if code == 0 else first.found or ("pytest", f"exit status {code}")


def _pytest(root: Path, arguments: Sequence[str], plugin: Any) -> int:
    import pytest

    options = ["-x", "-q", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider", "--rootdir", str(root)]
    return int(
        pytest.main([*options, "--basetemp", str(root / "tmp" / "pytest"), *arguments], [plugin] if plugin else [])
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
