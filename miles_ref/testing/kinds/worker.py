"""Cases of kind worker: steps against an agent worker that is started for the case (cases.md, worker; agents.md).

A call's name is its call_id. `fn` without a colon is one of `miles_ref.testing.agents`. Beyond cases.md:
`request` sends any method, path and `raw` body; `exited` waits for the worker's end and compares `exit`, its status;
`gone` waits until the process `pid` has ended; `restart` ends a worker that still runs, and waits for its end first;
`until` repeats its `step`, or, without one, the poll of its `call`, or the listing of calls;
`start` runs a step in a thread and `join` compares it, for polls that are held; `$ref`, `save` and the markers of
`miles_ref.testing.subset` work as for http. At the end the worker is killed, and no child may outlive it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import psutil

from miles_ref.errors import CaseError
from miles_ref.process import ProcessStartError, ReadyProcess
from miles_ref.testing.cases import Case
from miles_ref.testing.compare import show
from miles_ref.testing.programs import ProgramError, free_port
from miles_ref.testing.references import References
from miles_ref.testing.subset import subset_differences

AGENTS = "miles_ref.testing.agents:"
REPLY_TIMEOUT = 40.0
UNTIL_TIMEOUT = 60.0
"""Seconds after which an `until` gives up; generous, because it only bounds a failure."""
GONE_TIMEOUT = 10.0

FLAGS = {
    "orphan_timeout": "--orphan-timeout",
    "cancel_grace": "--cancel-grace",
    "outcome_ttl": "--outcome-ttl",
    "tombstone_ttl": "--tombstone-ttl",
    "max_calls": "--max-calls",
    "report_budget_bytes": "--report-budget-bytes",
    "keep_env": "--keep-env",
    "pass_env": "--pass-env",
}

Reply = tuple[int, dict[str, str], bytes]


def worker_flags(config: Mapping[str, Any], folder: Path) -> list[str]:
    """The command line for a case's config; a token is written to a file in `folder`."""
    argv: list[str] = []
    for key, value in config.items():
        if key in FLAGS:
            argv += [FLAGS[key], ",".join(value) if isinstance(value, list) else str(value)]
        elif key == "clean_env":
            argv += ["--clean-env"] if value else []
        elif key == "allow_function":
            patterns = [value] if isinstance(value, str) else value
            argv += [part for pattern in patterns for part in ("--allow-function", pattern)]
        elif key == "token":
            (folder / "token").write_text(value)
            argv += ["--token-file", str(folder / "token")]
        elif key != "env":
            raise CaseError(f"worker config: no such key {key!r}")
    return argv


class WorkerRun:
    """One run of one case. `command` starts a worker; `--port N` and the case's flags are added to it."""

    def __init__(self, command: Sequence[str], config: Mapping[str, Any]) -> None:
        self._command = list(command)
        self._config = config
        self._refs = References()
        self._jobs: dict[str, tuple[Mapping[str, Any], threading.Thread, list[Reply | OSError]]] = {}
        self._children: set[psutil.Process] = set()
        self._program: ReadyProcess | None = None
        self._ended: list[ReadyProcess] = []
        self._port = 0
        self._told_to_end = False

    def run(self, steps: Sequence[Mapping[str, Any]]) -> list[str]:
        """The first step that does not hold, described; [] when all hold and no child is left."""
        with tempfile.TemporaryDirectory() as folder:
            self._flags = worker_flags(self._config, Path(folder))
            if any(step["do"] == "restart" for step in steps):
                self._port = free_port()  # Nobody gets it while it is down.
            try:
                self._launch()
                return self._walk(steps) or self._children_left()
            finally:
                self._clean_up()

    def _walk(self, steps: Sequence[Mapping[str, Any]]) -> list[str]:
        for index, step in enumerate(steps):
            found = self._step(step)
            self._note_children()
            if found:
                return [f"step {index} ({step['do']}) {line}" for line in found]
        return []

    def _step(self, step: Mapping[str, Any]) -> list[str]:
        match step["do"]:
            case "sigterm":
                self._told_to_end = True
                os.kill(self._running().pid, signal.SIGTERM)
            case "sigkill":
                self._note_children()
                self._kill_worker()
            case "restart":
                return self._restart()
            case "exited":
                return self._exited(step)
            case "gone":
                return self._gone(self._refs.resolve(step["pid"]))
            case "until":
                return self._until(repeated(step))
            case "start":
                self._start(step)
            case "join":
                return self._join(step)
            case _:
                return self._judge(step, self._call(step))
        return []

    # The worker's process

    def _launch(self) -> None:
        if self._program is not None:
            self._ended.append(self._program)
        argv = [*self._command, "--port", str(self._port), *self._flags]
        self._program = ReadyProcess(argv, env={**os.environ, **self._config.get("env", {})})
        self._port = urlsplit(self._program.url).port or 0
        self._told_to_end = False

    def _running(self) -> ReadyProcess:
        assert self._program is not None
        return self._program

    def _restart(self) -> list[str]:
        """Start it anew on its port, which the old one holds until it has drained its calls and ended."""
        running = self._running()
        if running.returncode is None and not self._told_to_end:
            os.kill(running.pid, signal.SIGTERM)
        found = self._await_end()
        if not found:
            self._launch()
        return found

    def _await_end(self) -> list[str]:
        end = time.monotonic() + UNTIL_TIMEOUT
        while self._running().returncode is None:
            self._note_children()
            if time.monotonic() > end:
                return [f"the worker still runs after {UNTIL_TIMEOUT:.0f} s"]
            time.sleep(0.02)
        return []

    def _exited(self, step: Mapping[str, Any]) -> list[str]:
        found = self._await_end()
        return found or subset_differences(
            step.get("expect", {}).get("exit", 0), self._running().returncode, "exit status"
        )

    @staticmethod
    def _gone(pid: int) -> list[str]:
        end = time.monotonic() + GONE_TIMEOUT
        while _runs(pid):
            if time.monotonic() > end:
                return [f"process {pid} still runs after {GONE_TIMEOUT:.0f} s"]
            time.sleep(0.02)
        return []

    def _kill_worker(self) -> None:
        """SIGKILL to the worker alone: its children have to notice by themselves."""
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self._running().pid).kill()
        while self._running().returncode is None:
            time.sleep(0.01)

    def _note_children(self) -> None:
        for program in (self._running(), *self._ended):
            try:
                self._children.update(psutil.Process(program.pid).children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def _children_left(self) -> list[str]:
        if self._running().returncode is None:
            self._kill_worker()
        end = time.monotonic() + GONE_TIMEOUT
        while left := [child.pid for child in self._children if _lives(child)]:
            if time.monotonic() > end:
                return [f"children {left} still run {GONE_TIMEOUT:.0f} s after their worker was killed"]
            time.sleep(0.02)
        return []

    def _clean_up(self) -> None:
        for child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for program in (self._program, *self._ended):
            if program is not None:
                program.stop(grace=0)
        for _, thread, _ in self._jobs.values():
            thread.join(REPLY_TIMEOUT)

    # Steps

    def _start(self, step: Mapping[str, Any]) -> None:
        result: list[Reply | OSError] = []

        def work() -> None:
            try:
                result.append(self._call(step["step"]))
            except OSError as error:
                result.append(error)

        thread = threading.Thread(target=work, daemon=True)
        self._jobs[step["as"]] = (step["step"], thread, result)
        thread.start()

    def _join(self, step: Mapping[str, Any]) -> list[str]:
        inner, thread, result = self._jobs.pop(step["job"])
        thread.join(REPLY_TIMEOUT)
        if not result:
            return [f"job {step['job']!r}: no reply within {REPLY_TIMEOUT:.0f} s"]
        reply = result[0]
        if isinstance(reply, OSError):
            return [f"job {step['job']!r}: the connection broke: {reply}"]
        merged = {**inner, "expect": {**inner.get("expect", {}), **step.get("expect", {})}}
        return self._judge(merged, reply)

    def _until(self, step: Mapping[str, Any]) -> list[str]:
        end = time.monotonic() + UNTIL_TIMEOUT
        while True:
            reply = self._call(step)
            found = self._judge(step, reply)
            self._note_children()
            if not found:
                return []
            if time.monotonic() > end:
                status, _, raw = reply
                last = f"the last reply was {status} {show(raw.decode('utf-8', 'replace'), 400)}"
                return [*(f"after {UNTIL_TIMEOUT:.0f} s still: {line}" for line in found), last]
            time.sleep(0.02)

    def _call(self, step: Mapping[str, Any]) -> Reply:
        method, path, body = self._request_of(step)
        headers = {"content-type": "application/json", **self._refs.resolve(step.get("headers", {}))}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REPLY_TIMEOUT)
        try:
            raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else _json(body)
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            data = response.read()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, data
        except http.client.HTTPException as error:
            raise OSError(repr(error)) from error
        finally:
            connection.close()

    def _request_of(self, step: Mapping[str, Any]) -> tuple[str, str, Any]:
        call = quote(str(step.get("call", "")), safe="")
        match step["do"]:
            case "submit":
                return "POST", "/calls", step["raw"] if "raw" in step else self._submission(step)
            case "poll":
                names = [name for name in ("after", "wait") if name in step]
                query = {name: str(self._refs.resolve(step[name])) for name in names}
                if step.get("cancel"):
                    query["cancel"] = "1"
                return "GET", f"/calls/{call}" + (f"?{urlencode(query)}" if query else ""), None
            case "delete":
                return "DELETE", f"/calls/{call}", None
            case "calls":
                return "GET", "/calls", None
            case "health":
                return "GET", "/health", None
            case "request":
                return step["method"], step["path"], step.get("raw")
            case other:
                raise CaseError(f"no such worker step: {other!r}")

    def _submission(self, step: Mapping[str, Any]) -> dict[str, Any]:
        body = {key: self._refs.resolve(step[key]) for key in ("kwargs", "env", "scope", "boot_id") if key in step}
        fn = step.get("fn")
        name = AGENTS + fn if isinstance(fn, str) and ":" not in fn else fn
        return {"call_id": step.get("call"), "fn": name, "kwargs": {}, **body}

    def _judge(self, step: Mapping[str, Any], reply: Reply) -> list[str]:
        status, headers, raw = reply
        text = raw.decode("utf-8", "replace")
        try:
            value = json.loads(raw)
        except ValueError:
            value = text
        if "save" in step:
            self._refs.save(step["save"], value)
        expect = self._refs.resolve(step.get("expect", {}))
        found = []
        if "status" in expect and status != expect["status"]:
            found.append(f"status: got {status} {show(text)}, expected {expect['status']}")
        if "body" in expect:
            found += subset_differences(expect["body"], value, "body")
        for name, wanted in expect.get("headers", {}).items():
            got = [headers[name]] if name in headers else []
            found += subset_differences([] if wanted is None else [wanted], got, f"header {name}")
        found += [
            f"body: {show(part)} is not in {show(text)}" for part in expect.get("text_mentions", []) if part not in text
        ]
        return found


def repeated(until: Mapping[str, Any]) -> dict[str, Any]:
    """The step that an `until` repeats: its `step`, or itself as a poll of its `call`, else as a listing of calls.

    What it expects beside its `step` counts like what the step expects.
    """
    if "step" in until:
        inner = until["step"]
        kept = {"save": until["save"]} if "save" in until else {}
        return {**inner, **kept, "expect": {**inner.get("expect", {}), **until.get("expect", {})}}
    return {**until, "do": "poll" if "call" in until else "calls"}


def _runs(pid: int) -> bool:
    try:
        return _lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def _lives(process: psutil.Process) -> bool:
    """Whether it runs. A zombie does not, however long its new parent takes to reap it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _json(body: Any) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def run_worker_case(case: Case, command: Sequence[str]) -> list[str]:
    """The differences of one worker case. Raises ProgramError when the worker cannot be started."""
    try:
        return WorkerRun(command, case.input.get("config", {})).run(case.input["steps"])
    except (OSError, ProcessStartError) as error:
        raise ProgramError(f"the worker does not answer: {error}") from error
