from __future__ import annotations

import os
import select
import sys

import psutil
import pytest

from miles_ref.process import ProcessStartError, ReadyProcess

READY = "print(json.dumps({'url': 'http://x', 'pid': os.getpid()}), flush=True)"
STATUS_7 = "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))"


def python(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(["import json, os, signal, subprocess, sys", *lines])]


def test_it_is_ready_by_its_line_and_ended_by_sigterm() -> None:
    noise = """print('no json', [1], '\\n{"url": 5}\\n[]')"""
    lines = [STATUS_7, "print('words', os.environ.get('HOME'), file=sys.stderr)", noise, READY]
    with ReadyProcess(python(*lines, "signal.pause()"), env={"PATH": os.environ["PATH"]}) as process:
        assert process.url == "http://x"
        assert psutil.pid_exists(process.pid)
        assert process.returncode is None
        assert process.stderr() == "words None\n"
    assert process.returncode == 7
    assert process.stop() == 7
    assert process.stderr() == "words None\n"
    assert not psutil.pid_exists(process.pid)


def test_what_it_prints_later_does_not_block_it() -> None:
    more_than_a_pipe_holds = "print('x' * 1_000_000, flush=True)"
    process = ReadyProcess(python(READY, more_than_a_pipe_holds, "os._exit(5)"))
    descriptor = os.pidfd_open(process.pid)
    assert select.select([descriptor], [], [], 30)[0]
    os.close(descriptor)
    assert process.stop() == 5


def test_one_that_ends_before_it_is_ready_shows_its_last_words() -> None:
    with pytest.raises(ProcessStartError, match=r"(?s)ended before it was ready.*no such luck"):
        ReadyProcess(python("sys.exit('no such luck')"))


def test_one_that_is_never_ready_is_ended() -> None:
    with pytest.raises(ProcessStartError, match=r"not ready after 0.2 s"):
        ReadyProcess(python("signal.pause() # never ready"), timeout=0.2)
    left = [child for child in psutil.Process().children() if "never ready" in " ".join(child.cmdline())]
    assert left == []


def test_a_missing_program_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        ReadyProcess(["/no/such/program"])


def test_the_whole_group_ends_with_it() -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    start = f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], stdout=subprocess.PIPE)"
    told = "print(json.dumps({'url': 'http://x', 'pid': child.pid}), flush=True)"
    process = ReadyProcess(python(start, "child.stdout.readline()", told, "signal.pause()"))
    descriptor = os.pidfd_open(process.pid)
    process.stop()
    assert select.select([descriptor], [], [], 30)[0]  # readable: the grandchild ended too
    os.close(descriptor)


def test_its_input_closes_only_when_it_is_stopped() -> None:
    with ReadyProcess(python(READY, "sys.stdin.read()")) as process:
        assert process.returncode is None
