"""Talk with an implementation in any language: a case a line in, an observation a line out (docs/adapter-protocol.md).

-> {"hello": 1}
<- {"hello": 1, "name": "...", "kinds": ["assemble/v1", "decode"]}
-> {"case": {...}}                        the case without its expect
<- {"id": "...", "observed": {...}}       in the form of expect; a refusal is {"error": ..., "message": text}
<- {"id": "...", "skip": "reason"}        where the program does not do this one
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from miles_ref.testing.programs import Program, ProgramError

ANSWER_TIMEOUT = 60.0
PROTOCOL = 1


class JsonLinesProgram:
    """A running program of the protocol, started at the first use. Raises ProgramError for anything off it."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._program: Program | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._kinds: frozenset[str] = frozenset()
        self._answers: dict[str, dict[str, Any]] = {}

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
        self._start()
        answer = self._answers.pop(case["id"], None) or self._ask(case)
        observed: Any = answer.get("observed")
        if not isinstance(observed, dict) or ("error" in observed and not isinstance(observed.get("message"), str)):
            raise ProgramError(f"{case['id']}: the answer holds no observation: {str(answer)[:300]}")
        return observed

    def _ask(self, case: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._exchange({"case": {key: value for key, value in case.items() if key != "expect"}})
        if answer.get("id") != case["id"]:
            raise ProgramError(f"asked {case['id']!r}, the program answered {answer.get('id')!r}")
        self._answers[case["id"]] = answer
        return answer

    def _start(self) -> None:
        if self._program is not None:
            return
        self._program = Program(self._argv, stdin=True)
        threading.Thread(target=self._read, args=(self._program,), daemon=True).start()
        hello = self._exchange({"hello": PROTOCOL})
        kinds = hello.get("kinds")
        if hello.get("hello") != PROTOCOL or not isinstance(kinds, list):
            raise ProgramError(f"the program's greeting is not of protocol {PROTOCOL}: {str(hello)[:300]}")
        self._kinds = frozenset(kinds)

    def _read(self, program: Program) -> None:
        assert program.process.stdout is not None
        for line in program.process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._program is not None
        stdin = self._program.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
            line = self._lines.get(timeout=ANSWER_TIMEOUT)
        except queue.Empty as error:
            raise ProgramError(
                f"the program gives no answer within {ANSWER_TIMEOUT:g} s: {self._program.last_words()}"
            ) from error
        except OSError:
            line = b""  # It has ended, or reads no more: which of the two sides notices first is chance.
        if not line:
            raise ProgramError(f"the program ended, or closed its input: {self._program.last_words()}")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise ProgramError(f"the program wrote a line that is no JSON: {line[:200]!r}") from error
        if not isinstance(answer, dict):
            raise ProgramError(f"the program wrote a line that is no object: {line[:200]!r}")
        return answer

    def close(self) -> None:
        """End the program."""
        if self._program is not None:
            self._program.close(grace=5)
            self._program = None
