"""The form of POST /calls (agents.md, Worker, "Precedence at submit"): 403 before 400."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from miles_ref.agents.core import CALL_ID, Answer, Submission, error
from miles_ref.agents.functions import FUNCTION

GUARDED_VARIABLES = ("LD_*", "PYTHON*", "PATH")
"""With --allow-function a call may not set these: each could run another function than the allowed one."""


class RefusedSubmit(Exception):
    """The body cannot be taken; `answer` is 403 or 400."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body["error"])
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Order:
    """A body of good form: what the book-keeping needs, and what only the child gets."""

    submission: Submission
    kwargs: Mapping[str, Any]
    env: Mapping[str, str]


def parse_submission(body: bytes, allow_functions: tuple[str, ...] = ()) -> Order:
    """Read the body of a submit; linear in its bytes. Raises RefusedSubmit. No patterns allow every function."""
    fields, duplicates = _load(body)
    if allow_functions:
        _check_allowed(fields, allow_functions)
    if duplicates:
        _refuse(f"the key {duplicates[0]!r} stands twice in one object")
    call_id = _field(fields, "call_id", str)
    if CALL_ID.fullmatch(call_id) is None:
        _refuse("call_id must match [A-Za-z0-9_-]{1,128}")
    fn = _field(fields, "fn", str)
    if FUNCTION.fullmatch(fn) is None:
        _refuse("fn must be 'module:qualname'")
    kwargs = _field(fields, "kwargs", dict)
    env = _field(fields, "env", dict, required=False) or {}
    for name, value in env.items():
        _check_variable(name, value)
    scope = _field(fields, "scope", str, required=False)
    if scope == "":
        _refuse("scope must not be an empty string; null is no scope")
    boot_id = _field(fields, "boot_id", str, required=False)
    try:
        digest = content_digest(fn, kwargs, env, scope)
    except RecursionError:
        _refuse("kwargs: nested too deeply to be compared")
    return Order(Submission(call_id, fn, scope, digest, boot_id), kwargs, env)


def content_digest(fn: str, kwargs: Mapping[str, Any], env: Mapping[str, str], scope: str | None) -> bytes:
    """Hash of a call's canonical JSON: the same content gives the same bytes. Raises RecursionError."""
    content = {"fn": fn, "kwargs": kwargs, "env": env, "scope": scope}
    # Integers are left to the reader: prompts are millions of them.
    canonical = json.loads(json.dumps(content), parse_float=_canonical_float)
    return hashlib.sha256(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode()).digest()


def _canonical_float(text: str) -> float | int:
    """The number, however it is spelled: 1, 1.0 and 1e0 are one (RFC 8785, 3.2.2.3), and 0 and -0.0.

    A whole number becomes an integer, and exactly: integers that no double equals must not meet their neighbours.
    """
    number = float(text)
    return int(number) if number.is_integer() else number


def function_allowed(fn: str, patterns: Iterable[str]) -> bool:
    """Whether a call may run `fn` under --allow-function PATTERN... (shell patterns; case counts)."""
    return any(fnmatchcase(fn, pattern) for pattern in patterns)


def _load(body: bytes) -> tuple[dict[str, Any], list[str]]:
    duplicates: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            duplicates.extend(key for key, count in Counter(key for key, _ in items).items() if count > 1)
        return result

    try:
        fields = json.loads(body.decode("utf-8"), object_pairs_hook=pairs, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        _refuse(f"the body is not JSON: {exc}" if not isinstance(exc, UnicodeError) else "the body is not UTF-8")
    if not isinstance(fields, dict):
        _refuse("the body must be a JSON object")
    return fields, duplicates


def _check_allowed(fields: dict[str, Any], patterns: tuple[str, ...]) -> None:
    fn = fields.get("fn")
    if isinstance(fn, str) and not function_allowed(fn, patterns):
        raise RefusedSubmit(error(403, "function", f"this worker does not run {fn!r} (--allow-function)"))
    env = fields.get("env")
    if isinstance(env, dict):
        for name in env:
            if any(fnmatchcase(name, guarded) for guarded in GUARDED_VARIABLES):
                raise RefusedSubmit(
                    error(403, "variable", f"env must not set {name!r} where --allow-function is given")
                )


def _check_variable(name: str, value: Any) -> None:
    if not isinstance(value, str):
        _refuse(f"the value of the variable {name!r} must be a string")
    if not name or "=" in name or "\0" in name or "\0" in value:
        _refuse(f"{name!r} is no name of a variable, or its value holds a NUL")
    try:
        os.fsencode(name + value)
    except UnicodeError:
        _refuse(f"the variable {name!r} holds characters that no environment can hold")


def _field(fields: dict[str, Any], name: str, kind: type, *, required: bool = True) -> Any:
    """The value of a member, which is of `kind`; None where one that is not required is absent or null."""
    value = fields.get(name)
    if value is None:
        if required:
            _refuse(f"{name} is missing")
        return None
    if not isinstance(value, kind):
        _refuse(f"{name} must be {'a string' if kind is str else 'an object'}, not {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse(message: str) -> NoReturn:
    raise RefusedSubmit(error(400, "form", message))
