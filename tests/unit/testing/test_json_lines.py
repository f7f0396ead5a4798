"""A program of the protocol: what it is sent, and what becomes of one that leaves it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_ref.testing import json_lines, programs
from miles_ref.testing.json_lines import MOST_FAULTS, JsonLinesProgram
from miles_ref.testing.programs import ProgramError

PROGRAM = """
import json, pathlib, sys
log = pathlib.Path({log!r})
def note(what):
    with log.open("a") as file:
        file.write(json.dumps(what) + "\\n")
def say(answer):
    print(answer if isinstance(answer, str) else json.dumps(answer), flush=True)
note("start")
for line in sys.stdin:
    said = json.loads(line)
    if "hello" in said:
        say({hello!r})
        continue
    case = said["case"]
    note(case)
    do = case["input"].get("do", "answer")
    if do == "hang":
        sys.stdin.read()
    elif do == "deaf":
        say({{"id": case["id"], "observed": {{"match": True}}}})
        import threading
        threading.Event().wait()
    elif do == "leave":
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
        note(child.pid)
        say("no JSON")
    elif do == "end":
        sys.exit(3)
    elif do == "noise":
        say("no JSON")
    elif do == "other":
        say({{"id": "other", "observed": {{}}}})
    elif do == "late":
        say({{"id": "other", "observed": {{}}}})
        say({{"id": case["id"], "observed": {{"match": False}}}})
    elif do == "empty":
        say({{"id": case["id"]}})
    else:
        say({{"id": case["id"], "observed": {{"match": True}}}})
"""
HELLO = {"hello": 1, "name": "test", "kinds": ["match"]}


class Asked:
    """A program under test and what it wrote down."""

    def __init__(self, folder: Path, hello: Any = HELLO) -> None:
        self.log = folder / "log"
        script = folder / "program.py"
        script.write_text(PROGRAM.format(log=str(self.log), hello=hello))
        self.program = JsonLinesProgram([sys.executable, str(script)])

    def run(self, name: str, do: str = "answer", **more: Any) -> dict[str, Any]:
        case = {"id": name, "kind": "match", "input": {"do": do}, **more}
        assert self.program.refusal(case) is None
        return self.program.observe(case)

    @property
    def notes(self) -> list[Any]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    @property
    def starts(self) -> int:
        return self.notes.count("start")

    @property
    def asked(self) -> list[str]:
        return [note["id"] for note in self.notes if note != "start"]


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    made = Asked(tmp_path)
    yield made
    made.program.close()


def test_a_program_gets_what_it_needs_and_no_more(asked: Asked) -> None:
    people = {"why": "w", "tags": [], "kills": [], "twin": "t", "provenance": "hand", "spec": "s", "requires": []}
    asked.run("a", **people, expect={"match": True}, config={"family": "qwen3"}, version="v2")
    asked.run("b", **people, expect={"match": True})
    sent = {"kind": "match", "input": {"do": "answer"}}
    assert asked.notes[1:] == [
        {"id": "a", "version": "v2", "config": {"family": "qwen3"}, **sent},
        {"id": "b", "version": "v1", "config": {}, **sent},
    ]


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("end", "ended, or closed its input"),
        ("noise", "a line that is no JSON: b'no JSON"),
        ("other", "asked 'bad', the program answered 'other'"),
        ("late", "asked 'bad', the program answered 'other'"),
    ],
)
def test_after_a_fault_the_next_case_meets_a_new_program(asked: Asked, do: str, said: str) -> None:
    assert asked.run("first") == {"match": True}
    with pytest.raises(ProgramError, match=said):
        asked.run("bad", do)
    assert asked.run("next") == {"match": True}
    assert asked.starts == 2
    assert asked.asked == ["first", "bad", "next"]


def test_an_answer_that_does_not_come_costs_one_case(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked.run("first") == {"match": True}
    with monkeypatch.context() as patch:
        patch.setattr(json_lines, "ANSWER_TIMEOUT", 0.1)
        with pytest.raises(ProgramError, match=r"no answer within 0\.1 s"):
            asked.run("slow", "hang")
    assert asked.run("next") == {"match": True}
    assert asked.starts == 2
    assert asked.asked.count("slow") <= 1  # it may have been ended before it had read the case


def test_a_program_that_reads_no_more_does_not_hold_the_run(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.run("first", "deaf")
    with monkeypatch.context() as patch:
        patch.setattr(json_lines, "ANSWER_TIMEOUT", 0.1)
        with pytest.raises(ProgramError, match="no answer within"):
            asked.run("large", input={"text": "x" * 1_000_000})
    assert asked.run("next") == {"match": True}


def test_a_process_that_left_the_group_with_the_pipes_does_not_hold_the_run(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_STREAM_SECONDS", 0.1)
    answers: list[Any] = []

    def use() -> None:
        with pytest.raises(ProgramError, match="a line that is no JSON"):
            asked.run("bad", "leave")
        answers.append(asked.run("next"))

    # In a thread: nothing interrupts who waits for the lock of a stream.
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(60)
    held = thread.is_alive()
    (left,) = (note for note in asked.notes if isinstance(note, int))
    os.kill(left, signal.SIGKILL)
    thread.join()
    assert not held, "the run went on only when the process that left had ended"
    assert answers == [{"match": True}]


def test_an_answer_without_an_observation_is_an_error_of_its_case_alone(asked: Asked) -> None:
    for name in "abcd":
        with pytest.raises(ProgramError, match=f"{name}: the answer holds no observation"):
            asked.run(name, "empty")
    assert asked.run("next") == {"match": True}
    assert asked.starts == 1


def test_a_program_that_keeps_failing_is_given_up(asked: Asked) -> None:
    for name in map(str, range(MOST_FAULTS)):
        with pytest.raises(ProgramError, match="answered 'other'"):
            asked.run(name, "other")
    for _ in range(3):
        with pytest.raises(ProgramError, match=r"given up after 3 faults, the last: asked '2'"):
            asked.run("late")
    assert asked.starts == MOST_FAULTS
    assert asked.asked == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        ({"hello": 1, "kinds": [["match"]]}, r"names the kind \['match'\]; .*known are"),
        ({"hello": 1, "kinds": ["match", "decode/v3"]}, "names the kind 'decode/v3'; did you mean 'decode/v"),
        ({"hello": 1, "kinds": ["matsch"]}, "names the kind 'matsch'; did you mean 'match'"),
        ({"hello": 1, "kinds": "match"}, "greeting is not of protocol 1"),
        ({"hello": 2, "kinds": ["match"]}, "greeting is not of protocol 1"),
        (["hello"], "no object"),
    ],
)
def test_a_greeting_names_kinds_that_exist(tmp_path: Path, hello: Any, said: str) -> None:
    asked = Asked(tmp_path, hello)
    with pytest.raises(ProgramError, match=said):
        asked.run("a")
    asked.program.close()


def test_a_program_that_cannot_be_started_is_given_up_too() -> None:
    program = JsonLinesProgram(["/no/such/program"])
    case = {"id": "a", "kind": "match", "input": {}}
    for _ in range(MOST_FAULTS):
        with pytest.raises(ProgramError, match="cannot be started"):
            program.refusal(case)
    with pytest.raises(ProgramError, match=r"given up after 3 faults, the last: .*cannot be started"):
        program.refusal(case)
