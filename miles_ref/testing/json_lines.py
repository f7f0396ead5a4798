"""Talk with an implementation in any language: a case a line in, an observation a line out (docs/adapter-protocol.md).

-> {"hello": 1}
<- {"hello": 1, "name": "...", "kinds": ["assemble/v1", "decode"]}
-> {"case": {...}}                        the case's id, kind, version, config and input
<- {"id": "...", "observed": {...}}       in the form of expect; a refusal is {"error": ..., "message": text}
<- {"id": "...", "skip": "reason"}        where the program does not do this one
"""

from __future__ import annotations

import json
import queue
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from miles_ref.testing.programs import Program, ProgramError
from miles_ref.testing.schema import nearest

ANSWER_TIMEOUT = 60.0
"""Seconds that a program has for its greeting and for each answer."""
MOST_FAULTS = 3
"""Times that a program is ended because it left the protocol; then it is started no more."""
PROTOCOL = 1

ASKED = ("id", "kind", "version", "config", "input")
"""What of a case a program is sent. The rest is for who judges it, and expectations would be answers."""

_DATA = ("assemble", "encode", "decode", "match")
KINDS = frozenset(_DATA) | {f"{kind}/{version}" for kind in _DATA for version in ("v1", "v2")}
"""The kinds that a greeting may name."""


class JsonLinesProgram:
    """A program of the protocol, started at the first use. Raises ProgramError for anything off it.

    One that gives no answer in time, or another than the protocol's, is ended: what it says next could be the answer to
    an earlier case. The next case starts it anew. After MOST_FAULTS it is given up, and every further case says so at
    once. No case is asked twice.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._program: Program | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._kinds: frozenset[str] = frozenset()
        self._answers: dict[str, dict[str, Any]] = {}
        self._faults: list[str] = []

    def refusal(self, case: Mapping[str, Any]) -> str | None:
        """Why the program is not asked this case: its kind is not among those that it said, or it skips it."""
        self._start()
        kind, versioned = case["kind"], f"{case['kind']}/{case.get('version', 'v1')}"
        if not {kind, versioned} & self._kinds:
            return f"the program does not do {versioned}"
        answer = self._answers.get(case["id"]) or self._ask(case)
        return f"skipped by the program: {answer['skip']}" if "skip" in answer else None

    def observe(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What the program did with a case that it does not refuse."""
        answer = self._answers.pop(case["id"], None)
        if answer is None:
            self._start()
            answer = self._ask(case)
        observed: Any = answer.get("observed")
        if not isinstance(observed, dict) or ("error" in observed and not isinstance(observed.get("message"), str)):
            raise ProgramError(f"{case['id']}: the answer holds no observation: {str(answer)[:300]}")
        return observed

    def close(self) -> None:
        """End the program."""
        self._end(grace=5)

    def _ask(self, case: Mapping[str, Any]) -> dict[str, Any]:
        asked = {"version": "v1", "config": {}} | {key: case[key] for key in ASKED if key in case}
        answer = self._exchange({"case": asked})
        if answer.get("id") != case["id"]:
            raise self._fault(f"asked {case['id']!r}, the program answered {answer.get('id')!r}")
        self._answers[case["id"]] = answer
        return answer

    def _start(self) -> None:
        if self._program is not None:
            return
        if len(self._faults) >= MOST_FAULTS:
            raise ProgramError(f"the program was given up after {MOST_FAULTS} faults, the last: {self._faults[-1]}")
        try:
            self._program = Program(self._argv, stdin=True)
        except ProgramError as error:
            self._faults.append(str(error))
            raise
        # Lines of the one before must not be taken for this one's.
        self._lines = queue.SimpleQueue()
        assert self._program.process.stdout is not None
        self._program.in_background(self._program.process.stdout, partial(_read, self._program, self._lines))
        hello = self._exchange({"hello": PROTOCOL})
        kinds = hello.get("kinds")
        if hello.get("hello") != PROTOCOL or not isinstance(kinds, list):
            raise self._fault(f"the program's greeting is not of protocol {PROTOCOL}: {str(hello)[:300]}")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in KINDS:
                raise self._fault(f"the program's greeting names the kind {kind!r:.80}; {nearest(kind, KINDS)}")
        self._kinds = frozenset(kinds)

    def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._program is not None
        # A thread: a program that reads nothing would keep a large case from being written, for ever.
        line = json.dumps(message).encode() + b"\n"
        assert self._program.process.stdin is not None
        self._program.in_background(self._program.process.stdin, partial(_write, self._program, self._lines, line))
        try:
            answered = self._lines.get(timeout=ANSWER_TIMEOUT)
        except queue.Empty:
            raise self._fault(f"the program gives no answer within {ANSWER_TIMEOUT:g} s") from None
        if not answered:
            raise self._fault("the program ended, or closed its input")
        try:
            answer = json.loads(answered)
        except ValueError as error:
            raise self._fault(f"the program wrote a line that is no JSON: {answered[:200]!r}") from error
        if not isinstance(answer, dict):
            raise self._fault(f"the program wrote a line that is no object: {answered[:200]!r}")
        return answer

    def _fault(self, what: str) -> ProgramError:
        """End the program, so that the next case meets a new one; the error to raise, with its last words."""
        assert self._program is not None
        words = self._program.last_words()
        self._end(grace=0)
        self._faults.append(what)
        return ProgramError(f"{what}: {words}" if words else what)

    def _end(self, grace: float) -> None:
        if self._program is not None:
            self._program.close(grace=grace)
            self._program = None


def _read(program: Program, lines: queue.SimpleQueue[bytes]) -> None:
    """Pass the program's lines on; an empty one stands for their end."""
    assert program.process.stdout is not None
    try:
        for line in program.process.stdout:
            lines.put(line)
    except (OSError, ValueError):  # closed under us
        pass
    lines.put(b"")


def _write(program: Program, lines: queue.SimpleQueue[bytes], message: bytes) -> None:
    """Send one line. It has ended, or reads no more: which of the two sides notices first is chance."""
    assert program.process.stdin is not None
    try:
        program.process.stdin.write(message)
        program.process.stdin.flush()
    except (OSError, ValueError):
        lines.put(b"")
