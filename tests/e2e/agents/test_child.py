"""agents.md, The child process: real children of this process, mode subproc."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_ref.agents import AgentFunctionError, AgentSettings, InfraAbort, call_agent_function, local
from miles_ref.agents.local import LocalCall
from miles_ref.errors import UsageError
from tests.e2e.agents import odd
from tests.e2e.agents.support import (
    AGENTS,
    FORGED_FRAMES,
    ODD,
    Reports,
    children,
    descriptors,
    ends,
    lives,
    watch_frames,
)

ROOT = Path(__file__).parents[3]


async def call(agent: str, on_report: Any = None, *, settings: AgentSettings | None = None, **kwargs: Any) -> Any:
    return await call_agent_function(
        AGENTS + agent, mode="subproc", kwargs=kwargs, on_report=on_report, settings=settings
    )


async def test_a_value_comes_back_as_json() -> None:
    value = {
        "text": "ä\u2028\U0001f600\ud800",
        "numbers": [1, 1.5, -0.0, 1e300, 2**70],
        "none": None,
        "deep": {"er": [[]]},
    }
    assert await call("echo", **value) == value


async def test_a_call_has_a_fresh_process() -> None:
    first, second = await asyncio.gather(call("environ", names=[]), call("environ", names=[]))
    assert first == second == {}
    assert children() == []


async def test_ten_thousand_reports_arrive_once_each_in_order_before_the_value() -> None:
    reports = Reports()
    assert await call("report", reports.append, n=10_000) == {"reported": 10_000}
    assert [item["index"] for item in reports] == list(range(10_000))


async def test_reports_of_several_threads_are_whole_and_in_order_for_each_thread() -> None:
    reports = Reports()
    await call("threads", reports.append, n=4, each=200)
    for thread in range(4):
        assert [index for which, index in reports if which == thread] == list(range(200))


async def test_a_value_of_50_mib() -> None:
    value = await call("big", n=50)
    assert len(value["data"]) == 50 << 20


async def test_an_on_report_that_raises_is_logged_and_the_call_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def broken(item: Any) -> None:
        seen.append(item["index"])
        raise RuntimeError("the callback is broken")

    assert await call("report", broken, n=3) == {"reported": 3}
    assert seen == [0, 1, 2]
    assert caplog.text.count("on_report raised") == 3


@pytest.mark.parametrize(
    ("agent", "kwargs", "phase", "type", "mentions"),
    [
        ("fail", {"message": "boo"}, "run", "ValueError", "boo"),
        ("missing", {}, "import", "AttributeError", "missing"),
        ("Class.missing", {}, "import", "AttributeError", "Class"),
        ("__name__", {}, "import", "TypeError", "not a function"),
        ("os.system", {"command": "false"}, "import", "TypeError", "leads through the module os"),
        ("asyncio.sleep", {"delay": 0}, "import", "TypeError", "leads through the module asyncio"),
        ("not_json", {}, "result", "TypeError", "not JSON"),
        ("raises_oddly", {}, "run", "Odd", "cannot be shown"),
        ("synchronous", {}, "run", "TypeError", "must be async"),
        ("cancels_itself", {}, "run", "CancelledError", ""),
        ("returns_nan", {}, "result", "ValueError", "JSON compliant"),
        ("returns_odd_keys", {}, "result", "TypeError", "the key 1"),
        ("reports_nan", {}, "run", "ValueError", "JSON compliant"),
        ("returns_deep", {"levels": 201}, "result", "ValueError", "more than 200 levels"),
        ("returns_deep", {"levels": 100_000}, "result", "ValueError", "more than 200 levels"),
        ("reports_deep", {"levels": 201}, "run", "ValueError", "more than 200 levels"),
    ],
)
async def test_the_agent_s_own_errors(agent: str, kwargs: dict[str, Any], phase: str, type: str, mentions: str) -> None:
    module = ODD if hasattr(odd, agent) and agent != "__name__" else AGENTS
    with pytest.raises(AgentFunctionError) as caught:
        await call_agent_function(module + agent, mode="subproc", kwargs=kwargs)
    assert (caught.value.phase, caught.value.type) == (phase, type)
    assert mentions in caught.value.message
    assert type in caught.value.traceback


async def test_a_module_that_is_not_there_is_an_import_error() -> None:
    with pytest.raises(AgentFunctionError, match="no_such_module") as caught:
        await call_agent_function("no_such_module:run", mode="subproc")
    assert caught.value.phase == "import"


RAISES = """
import asyncio, os
from miles_ref.agents import InfraAbort
class Skipped(BaseException):
    def __str__(self):
        raise self
class Meta(type):
    def __getattr__(cls, name):
        {run}
class Class(metaclass=Meta):
    pass
async def run():
    {run}
{at_import}
"""


@pytest.mark.parametrize("where", ["at_import", "Class.attribute", "run"])
@pytest.mark.parametrize(
    ("statement", "ends"),
    [
        ("raise Skipped", "Skipped"),
        ("raise asyncio.CancelledError", "CancelledError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise ValueError", "ValueError"),
        ("raise SystemExit(5)", ("ChildExited", 5)),
        ("raise SystemExit", ("ChildExited", 0)),
        ("os._exit(6)", ("ChildExited", 6)),
        ("raise InfraAbort('SandboxLost', 7)", ("SandboxLost", 7)),
    ],
)
async def test_what_ends_the_import_and_what_ends_the_coroutine_are_told_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, statement: str, ends: str | tuple[str, int]
) -> None:
    source = RAISES.format(run=statement, at_import=statement if where == "at_import" else "")
    (tmp_path / "agent_that_raises.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    name = "run" if where == "at_import" else where
    with pytest.raises((AgentFunctionError, InfraAbort)) as caught:
        await call_agent_function(f"agent_that_raises:{name}", mode="subproc")
    if isinstance(caught.value, AgentFunctionError):
        assert (caught.value.phase, caught.value.type) == ("run" if where == "run" else "import", ends)
    else:
        assert (caught.value.reason, caught.value.exit_status) == ends


async def test_values_and_reports_as_deep_as_the_limit_arrive() -> None:
    reports = Reports()
    assert await call_agent_function(ODD + "returns_deep", mode="subproc", kwargs={"levels": 200}) == odd.deep(200)
    await call_agent_function(ODD + "reports_deep", mode="subproc", kwargs={"levels": 200}, on_report=reports.append)
    assert reports == [odd.deep(200)]


@pytest.mark.parametrize(("kind", "text", "times"), FORGED_FRAMES)
async def test_a_frame_that_cannot_be_read_ends_the_child(kind: str, text: str, times: int) -> None:
    reports = Reports()
    forged = {"kind": kind, "text": text, "times": times}
    with pytest.raises(InfraAbort) as caught:
        await call_agent_function(ODD + "forges", mode="subproc", kwargs=forged, on_report=reports.append)
    assert (caught.value.reason, caught.value.exit_status) == ("ChildExited", -9)
    assert reports == ["before"]


async def test_tasks_left_behind_take_neither_the_value_away_nor_the_cleanup_of_the_others() -> None:
    reports = Reports()
    agent = ODD + "leaves_tasks_of_which_two_interrupt"
    assert await call_agent_function(agent, mode="subproc", on_report=reports.append) == "done"
    assert reports == ["cleaned up"] * 3


@pytest.mark.parametrize(
    ("how", "reason", "exit_status"),
    [
        *(("reason", "InfraAbort", 7), ("status", "SandboxLost", None), ("signal", "SandboxLost", 15)),
        ("attributes", "InfraAbort", None),
    ],
)
async def test_an_infra_abort_of_odd_members_is_one(how: str, reason: str, exit_status: int | None) -> None:
    with pytest.raises(InfraAbort) as caught:
        await call_agent_function(ODD + "aborts_oddly", mode="subproc", kwargs={"how": how})
    assert (caught.value.reason, caught.value.exit_status) == (reason, exit_status)
    assert type(caught.value.exit_status) is not bool


async def test_arguments_that_cannot_be_written_are_a_value_error() -> None:
    for mode in ("subproc", "worker"):
        settings = AgentSettings(worker_urls=("http://127.0.0.1:9",))
        with pytest.raises(ValueError, match="nested too deeply"):
            await call_agent_function(AGENTS + "echo", mode=mode, kwargs={"x": odd.deep(100_000)}, settings=settings)


@pytest.mark.parametrize("mode", ["subproc", "worker"])
@pytest.mark.parametrize(
    ("value", "error", "mentions"),
    [
        ({1: 2}, TypeError, "the key 1"),
        ([{"x": {None: 1}}], TypeError, "the key None"),
        (float("nan"), ValueError, "JSON compliant"),
        ([-float("inf")], ValueError, "JSON compliant"),
        (object(), TypeError, "not JSON serializable"),
    ],
)
async def test_arguments_that_are_not_json_are_refused_here(
    mode: str, value: Any, error: type[Exception], mentions: str
) -> None:
    settings = AgentSettings(worker_urls=("http://127.0.0.1:9",))
    with pytest.raises(error, match=mentions):
        await call_agent_function(AGENTS + "echo", mode=mode, kwargs={"x": value}, settings=settings)


async def test_infra_abort_of_the_agent() -> None:
    with pytest.raises(InfraAbort) as caught:
        await call("infra", reason="SandboxLost", exit_status=7)
    assert (caught.value.reason, caught.value.exit_status) == ("SandboxLost", 7)


@pytest.mark.parametrize(
    ("module", "agent", "kwargs", "status"),
    [
        (AGENTS, "exit", {"code": 0}, 0),
        (AGENTS, "exit", {"code": 3}, 3),
        (AGENTS, "killed", {"signal": 9}, -9),
        (AGENTS, "killed", {"signal": 11}, -11),
        (ODD, "leaves_by_sys_exit", {"code": 5}, 5),
        (ODD, "terminates_itself", {}, -15),
    ],
)
async def test_a_child_that_ends_without_an_outcome(module: str, agent: str, kwargs: Any, status: int) -> None:
    with pytest.raises(InfraAbort) as caught:
        await call_agent_function(module + agent, mode="subproc", kwargs=kwargs)
    assert (caught.value.reason, caught.value.exit_status) == ("ChildExited", status)


async def test_a_child_that_is_killed_from_outside() -> None:
    reports = Reports()
    running = asyncio.create_task(call("wait", reports.append))
    await reports.reach(1)
    (pid,) = children()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InfraAbort) as caught:
        await running
    assert (caught.value.reason, caught.value.exit_status) == ("ChildExited", -9)


async def test_noise_on_the_streams_does_no_harm(capfd: pytest.CaptureFixture[str]) -> None:
    reports = Reports()
    assert await call("print", reports.append, lines=50) == {"lines": 50}
    assert reports == [0, 10, 20, 30, 40]
    streams = capfd.readouterr()
    assert streams.out == ""
    assert streams.err.count('"kind": "ok"') == 100


async def test_an_agent_that_closes_its_streams() -> None:
    reports = Reports()
    assert await call("close_streams", reports.append) == {"closed": True}
    assert reports == ["closed"]


# --- cancel -----------------------------------------------------------------------------------------------------------


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_cleanup_runs_and_its_last_reports_arrive() -> None:
    reports = Reports()
    running = asyncio.create_task(call("wait", reports.append, n=3, pause=0.05))
    await reports.reach(1)
    await cancelled(running)
    assert reports == ["started", "cleanup 1", "cleanup 2", "cleanup 3"]
    assert children() == []


@pytest.mark.parametrize("where", ["thread", "loop"])
async def test_an_agent_that_blocks_is_ended(where: str) -> None:
    reports = Reports()
    running = asyncio.create_task(call("block", reports.append, where=where, settings=AgentSettings(cancel_grace=0.5)))
    await reports.reach(1)
    await cancelled(running)
    assert children() == []


async def test_an_agent_that_ignores_the_cancel_is_killed_after_the_grace() -> None:
    reports = Reports()
    running = asyncio.create_task(call("stubborn", reports.append, settings=AgentSettings(cancel_grace=0.5)))
    await reports.reach(1)
    await cancelled(running)
    assert reports == ["started", "ignored a cancel"]
    assert children() == []


async def test_a_second_cancellation_does_not_wait_for_the_grace() -> None:
    reports = Reports()
    running = asyncio.create_task(call("stubborn", reports.append))
    await reports.reach(1)
    running.cancel()
    await reports.reach(2)
    await cancelled(running)
    assert children() == []


async def test_a_cancel_wins_over_an_agent_that_swallows_it() -> None:
    reports = Reports()
    local = LocalCall(AGENTS + "swallow", {}, dict(os.environ), cancel_grace=60, on_report=reports.append)
    running = asyncio.create_task(local.run())
    await reports.reach(1)
    await cancelled(running)
    assert reports == ["started", "swallowed"]


async def test_a_cancel_while_the_child_imports() -> None:
    environment = {**os.environ, "MILES_REF_SLOW_IMPORT": "3600"}
    local = LocalCall(AGENTS + "slow_import", {}, environment, cancel_grace=60)
    running = asyncio.create_task(local.run())
    await asyncio.sleep(0)
    assert local.pid is not None
    assert lives(local.pid)
    await cancelled(running)
    assert children() == []


async def test_tasks_that_the_agent_leaves_behind_still_clean_up() -> None:
    reports = Reports()
    assert await call_agent_function(ODD + "leaves_a_task", mode="subproc", on_report=reports.append) == "done"
    assert reports == ["the task began", "the task was cleaned up"]


async def test_exit_functions_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    await call_agent_function(ODD + "registers_at_exit", mode="subproc", kwargs={"path": str(trace)})
    assert trace.read_text() == "ran"


# --- grandchildren, guardians, leaks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fork", [False, True], ids=["spawned", "forked-holding-the-channel"])
async def test_grandchildren_end_with_the_call(fork: bool) -> None:
    value = await call("grandchild", fork=fork)
    assert ends(value["grandchild"])


async def test_a_grandchild_that_holds_the_channel_does_not_delay_the_end_of_a_killed_child() -> None:
    reports = Reports()
    with pytest.raises(InfraAbort) as caught:
        await call_agent_function(ODD + "forks_and_dies", mode="subproc", on_report=reports.append)
    assert caught.value.exit_status == 4
    assert ends(reports[0])


PARENT = """
import asyncio, sys
from miles_ref.agents import call_agent_function
async def main():
    await call_agent_function(sys.argv[1], mode="subproc", on_report=lambda item: print(item, flush=True))
asyncio.run(main())
"""


@pytest.mark.parametrize("agent", [AGENTS + "stubborn", AGENTS + "hold_interpreter", ODD + "grandchild_then_waits"])
def test_the_group_ends_when_the_parent_is_killed(agent: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, agent], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    with parent, parent.stdout:
        first = parent.stdout.readline().strip()
        group = children(parent.pid)
        assert len(group) == 1
        parent.kill()
    assert all(ends(pid) for pid in group)
    if first.isdigit():
        assert ends(int(first))


FORKING_PARENT = """
import asyncio, os, signal, sys
from miles_ref.agents import call_agent_function
def fork(item):
    pid = os.fork()
    if pid == 0:
        signal.alarm(200)
        while True:
            signal.pause()
    print(pid, flush=True)
async def main():
    await call_agent_function(sys.argv[1], mode="subproc", on_report=fork)
asyncio.run(main())
"""


def test_the_group_ends_when_the_parent_is_killed_that_had_forked_during_the_call() -> None:
    argv = [sys.executable, "-c", FORKING_PARENT, AGENTS + "stubborn"]
    parent = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    with parent, parent.stdout:
        forked = int(parent.stdout.readline())
        try:
            (child,) = set(children(parent.pid)) - {forked}
            parent.kill()
            assert ends(child)
            assert lives(forked)
        finally:
            parent.kill()
            os.kill(forked, signal.SIGKILL)


def fork_keeps(descriptors: list[int]) -> bool:
    """Whether a process that this one forks has the descriptors too."""
    pid = os.fork()
    if pid == 0:
        try:
            for descriptor in descriptors:
                os.fstat(descriptor)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("env", [{}, {"LARGE": "x" * 200_000}], ids=["ended", "no process could be made"])
async def test_a_process_that_is_forked_after_a_call_keeps_its_descriptors(env: dict[str, str]) -> None:
    with contextlib.suppress(InfraAbort):
        await call_agent_function(AGENTS + "echo", mode="subproc", env=env)
    # Of the lowest numbers, thus also those that the call had.
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    try:
        assert fork_keeps(opened)
    finally:
        for descriptor in opened:
            os.close(descriptor)


async def test_the_request_is_not_kept_once_the_child_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = watch_frames(monkeypatch, local)
    reports = Reports()
    running = asyncio.create_task(call("wait", reports.append))
    await reports.reach(1)
    gc.collect()
    assert [frame() for frame in frames] == [None]
    await cancelled(running)


def test_the_guardian_thread_of_other_systems_ends_the_group_too() -> None:
    code = (
        "import os, sys, time\n"
        "from miles_ref.agents.child_main import guard\n"
        "guard(int(sys.argv[1]), by_kernel=False)\n"
        "print(flush=True)\n"
        "time.sleep(3600)\n"
    )
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(read_end)],
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(read_end)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        os.close(write_end)
    assert process.returncode == -signal.SIGKILL


async def test_nothing_leaks() -> None:
    await call("echo")
    gc.collect()  # Else what tests before this one left to it is given back meanwhile.
    before = descriptors()
    for agent in ("echo", "exit", "killed", "missing"):
        with_errors = [call(agent) for _ in range(5)]
        await asyncio.gather(*with_errors, return_exceptions=True)
    assert descriptors() <= before
    assert children() == []


async def test_a_process_that_cannot_be_made_is_an_infra_abort() -> None:
    with pytest.raises(InfraAbort, match="SpawnFailed"):
        await call_agent_function(
            AGENTS + "echo", mode="subproc", env={f"LARGE_{n}": "x" * 130_000 for n in range(100)}
        )
    assert await call("echo", again=True) == {"again": True}


# --- environment and names --------------------------------------------------------------------------------------------


async def test_the_environment_is_the_parent_s_then_the_call_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_PARENT", "parent")
    monkeypatch.setenv("OF_BOTH", "parent")
    # A worker keeps these two to itself; to this process they are variables like any other.
    monkeypatch.setenv("MILES_REF_WORKER_TOKEN", "parent")
    monkeypatch.setenv("MILES_REF_WORKER_TOKEN_FILE", "parent")
    names = ["OF_PARENT", "OF_BOTH", "OF_CALL", "OF_NOBODY", "MILES_REF_WORKER_TOKEN", "MILES_REF_WORKER_TOKEN_FILE"]
    value = await call_agent_function(
        AGENTS + "environ", mode="subproc", kwargs={"names": names}, env={"OF_BOTH": "call", "OF_CALL": "call"}
    )
    assert value == {
        "OF_PARENT": "parent",
        "OF_BOTH": "call",
        "OF_CALL": "call",
        "OF_NOBODY": None,
        "MILES_REF_WORKER_TOKEN": "parent",
        "MILES_REF_WORKER_TOKEN_FILE": "parent",
    }


async def test_modules_are_found_where_the_parent_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parents_own.py").write_text("async def run():\n    return 'of the parent'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert await call_agent_function("parents_own:run", mode="subproc") == "of the parent"


async def test_the_call_s_own_python_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("parent", "call"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "agent_of_two.py").write_text(f"async def run():\n    return {name!r}\n")
    monkeypatch.syspath_prepend(tmp_path / "parent")
    env = {"PYTHONPATH": str(tmp_path / "call")}
    assert await call_agent_function("agent_of_two:run", mode="subproc", env=env) == "call"


@pytest.mark.parametrize("fn", ["module", "a:b:c", "module:", ":function", lambda: None, int("3").__class__])
async def test_a_function_that_no_other_process_finds(fn: Any) -> None:
    if fn is int:
        with pytest.raises(AgentFunctionError):
            await call_agent_function(fn, mode="subproc")
    else:
        with pytest.raises(UsageError):
            await call_agent_function(fn, mode="subproc")


async def test_an_unknown_mode_lists_the_known() -> None:
    with pytest.raises(UsageError, match="inline, subproc or worker"):
        await call_agent_function(AGENTS + "echo", mode="thread")


# --- inline -----------------------------------------------------------------------------------------------------------


async def test_an_inline_call_runs_here_and_raises_what_the_agent_raises() -> None:
    reports: list[Any] = []
    value = await call_agent_function(AGENTS + "report", kwargs={"n": 2}, on_report=reports.append)
    assert value == {"reported": 2}
    assert [item["index"] for item in reports] == [0, 1]
    with pytest.raises(ValueError, match="the agent failed"):
        await call_agent_function(AGENTS + "fail")
    with pytest.raises(InfraAbort, match="SandboxLost"):
        await call_agent_function(AGENTS + "infra")


async def test_inline_calls_at_once_keep_their_reports_apart() -> None:
    first, second = Reports(), Reports()
    await asyncio.gather(
        call_agent_function(AGENTS + "threads", kwargs={"n": 2, "each": 50}, on_report=first.append),
        call_agent_function(AGENTS + "report", kwargs={"n": 5}, on_report=second.append),
    )
    assert len(first) == 100
    assert [item["index"] for item in second] == list(range(5))


async def test_an_inline_call_has_no_environment_of_its_own() -> None:
    with pytest.raises(UsageError, match="subproc"):
        await call_agent_function(AGENTS + "echo", env={"A": "1"})
