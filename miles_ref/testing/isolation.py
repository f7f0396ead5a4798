"""Plugins in a process of their own, so that one that ends or hangs is an error of its case and not the run's end.

The parent sends a line, the child answers with a line:

-> {"plugins": {"picker": ...}}                          <- {"loaded": true} or {"refused": "why"}
-> {"case": {...}}                                       <- {"id": "...", "outcome": "failed", "details": [...]}

The child keeps these two pipes to itself: what a plugin prints goes to standard error, and it reads nothing. A third,
silent pipe ends when the parent does, and the child's group with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

from miles_ref.agents.child_main import PACKAGE_PARENT, guard
from miles_ref.errors import MilesRefError, UsageError
from miles_ref.testing.cases import Case, parse_case
from miles_ref.testing.check import judge
from miles_ref.testing.programs import ProgramError
from miles_ref.testing.targets import PluginTarget, plugin_name, plugin_refusal
from miles_ref.testing.verdict import Outcome

CASE_SECONDS = 60.0
"""How long a plugin may take for one case, and at least to be loaded."""

MOST_LOST = 3
"""Processes that may be lost before the run is given up."""

_GRACE = 2.0  # seconds for a child that was told to end

# The path comes before the first import: the parent may know this package by its working directory, or by a path that
# was added at run time. As an argument, not as PYTHONPATH, which what a plugin starts would inherit.
_START = f"import sys, json; sys.path[:] = json.loads(sys.argv.pop()); from {__name__} import main; main()"


class IsolatedPlugins:
    """As `PluginTarget`, with the plugins in a child process, a new one after each that is lost.

    A plugin that ends the process, or takes longer than `seconds` for a case, is a ProgramError for this case; after
    MOST_LOST of them every further case is one. Raises UsageError where the plugins cannot be loaded.
    """

    provides: frozenset[str] | None = None

    def __init__(
        self,
        *,
        picker: str | None = None,
        merger: str | None = None,
        plugin_set: str | None = None,
        seconds: float = CASE_SECONDS,
    ) -> None:
        self.name = plugin_name(picker, merger, plugin_set)
        self._set = plugin_set
        self._plugins = {"picker": picker, "merger": merger, "plugin_set": plugin_set}
        self._seconds = seconds
        self._lost = 0
        # A child resolves a relative path where the run began, as its working directory is the parent's.
        try:
            self._child: _Child | None = self._start()
        except ProgramError as error:
            raise UsageError(f"{self.name} cannot be loaded: {error}") from error

    def refusal(self, case: Case) -> str | None:
        return plugin_refusal(case, self._set)

    def run(self, case: Case) -> list[str]:
        if self._lost >= MOST_LOST:
            raise ProgramError(
                f"not judged: {self.name} ended or held up its process {self._lost} times, so the run was given up"
            )
        try:
            if self._child is None:
                self._child = self._start()
            answer = self._child.ask({"case": dict(case.raw)}, self._seconds)
            if answer.get("id") != case.id:
                raise ProgramError(f"the process answered {answer!r:.200}, which is no verdict on this case")
        except (ProgramError, UsageError) as error:
            self._lost += 1
            if self._child is not None:
                self._child.close(grace=0)
                self._child = None
            raise ProgramError(f"{case.id}: {self.name} {error}") from error
        details: list[str] = answer["details"]
        if answer["outcome"] == Outcome.ERROR:
            raise ProgramError("; ".join(details))
        return details

    def _start(self) -> _Child:
        child = _Child()
        try:
            answer = child.ask({"plugins": self._plugins}, max(self._seconds, CASE_SECONDS))
            if "loaded" not in answer:
                raise UsageError(str(answer.get("refused", answer)))
        except BaseException:
            child.close(grace=0)
            raise
        return child

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class _Child:
    """The process, in a group of its own. Its standard error is ours."""

    def __init__(self) -> None:
        path = [*sys.path, *([] if PACKAGE_PARENT in sys.path else [PACKAGE_PARENT])]
        read_end, self._guard = os.pipe()
        try:
            # -P: the working directory is no place to import from unless the parent's path has it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(read_end), json.dumps(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(read_end,),
            )
        except BaseException:
            os.close(self._guard)
            raise
        finally:
            os.close(read_end)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="verdicts of a plugin", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a message. Raises ProgramError where the process ended, or gave none in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=seconds)
        except OSError:
            line = b""
        except queue.Empty as error:
            if self._process.poll() is None:
                raise ProgramError(f"gave no answer within {seconds:g} s") from error
            line = b""  # It has ended, and a child of its own holds the pipe open.
        if not line:
            raise ProgramError(_ending(self._process, seconds))
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ProgramError(f"wrote into the pipe of the verdicts: {line[:200]!r}")
        return answer

    def close(self, grace: float = _GRACE) -> None:
        """End the process and what it started in its group; `grace` (seconds) is for it to end by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._guard)
        self._reader.join(_GRACE)  # longer only where a child of its own, out of our reach, holds the pipe open
        if not self._reader.is_alive():
            self._process.stdout.close()


def _ending(process: subprocess.Popen[bytes], seconds: float) -> str:
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return "closed the pipe of the verdicts, and runs on"
    return f"ended the process {f'by signal {-status}' if status < 0 else f'with exit status {status}'}"


def serve(requests: IO[str], answers: IO[str]) -> None:
    """The child: load the plugins, then judge case by case until the parent closes its end."""

    own = os.getpid()

    def answer(message: Mapping[str, Any]) -> None:
        if os.getpid() != own:
            os._exit(0)  # A plugin forked, and this is the copy: its answer would be taken for the next case's.
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        target = PluginTarget(**json.loads(requests.readline())["plugins"])
    except MilesRefError as error:
        answer({"refused": str(error)})
        return
    answer({"loaded": True})
    for line in requests:
        verdict = judge(parse_case(json.loads(line)["case"]), target)
        answer({"id": verdict.case_id, "outcome": str(verdict.outcome), "details": list(verdict.details)})


def main() -> None:
    """Take the two pipes away from 0 and 1, where a plugin would find them, and serve."""
    silent = int(sys.argv.pop())
    os.set_inheritable(silent, False)
    guard(silent)
    with os.fdopen(os.dup(0), encoding="utf-8") as requests, os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        serve(requests, answers)
