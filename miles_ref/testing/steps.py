"""What is wrong with the steps of an http or worker case that no schema can say, found before one runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_ref.testing.schema import nearest
from miles_ref.testing.subset import MARKERS, marker

_RESOLVED = ("$ref", "$ids")
_JUDGING = ("gone", "exited")
"""Worker steps that judge without an `expect`."""


def step_fault(raw: Mapping[str, Any]) -> str | None:
    """The first fault of a case that is of the schema's form: jobs, markers, nothing expected; None for other kinds."""
    if raw["kind"] not in ("http", "worker"):
        return None
    steps: Sequence[Mapping[str, Any]] = raw["input"]["steps"]
    fault = next(_faults(steps), None)
    # A worker case judges also that all children are gone at the end.
    if fault is None and raw["kind"] == "http" and not _judges(steps):
        fault = "input.steps: no step expects anything, so the case judges nothing"
    return fault


def _faults(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    jobs: set[str] = set()
    hung_up: set[str] = set()
    for index, step in enumerate(steps):
        do = step["do"]
        at = f"input.steps[{index}] ({do})"
        if do == "until" and not _expects(step):
            yield f"{at} expects nothing, so it would not wait"
        if "job" in step and step["job"] not in jobs:
            yield f"{at}.job is {step['job']!r}, which no step before it started; {nearest(step['job'], jobs)}"
        if do == "start" and step["as"] in jobs:
            yield f"{at}.as is {step['as']!r}, a job that is not joined yet"
        if do == "start":
            jobs.add(step["as"])
            hung_up.discard(step["as"])
        if do == "hang_up":
            hung_up.add(step["job"])
        if do == "join":
            jobs.discard(step["job"])
        yield from _marker_faults(step.get("expect"), f"{at}.expect")
        inner = step.get("step", {})
        yield from _marker_faults(inner.get("expect"), f"{at}.step ({inner.get('do')}).expect")
    for name in sorted(jobs - hung_up):
        yield f"input.steps: the job {name!r} is never joined, so what it expects is not judged"


def _judges(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether anything is expected of a step that gets a reply: a job's is looked at when it is joined."""
    started: dict[str, bool] = {}
    for step in steps:
        if step["do"] == "start":
            started[step["as"]] = _expects(step)
        elif _expects(step) or (step["do"] == "join" and started[step["job"]]):
            return True
    return False


def _expects(step: Mapping[str, Any]) -> bool:
    return bool(step["do"] in _JUDGING or step.get("expect") or ("step" in step and _expects(step["step"])))


def _marker_faults(value: Any, at: str) -> Iterator[str]:
    mark = marker(value)
    if mark is not None:
        name, argument = mark
        if name not in (*MARKERS, *_RESOLVED):
            yield f"{at}: unknown marker {name!r}; {nearest(name, (*MARKERS, *_RESOLVED))}"
        elif name == "$ref" and not isinstance(argument, str):
            yield f"{at}: $ref takes a text, name.path, not {argument!r:.80}"
        elif name == "$unordered" and not isinstance(argument, list):
            yield f"{at}: $unordered takes a list, not {argument!r:.80}"
        elif name == "$ids" and not isinstance(argument, str | list):
            yield f"{at}: $ids takes a text or a list, not {argument!r:.80}"
        elif name in ("$any", "$absent") and argument is not True:
            yield f"{at}: {name} takes true, not {argument!r:.80}"
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _marker_faults(item, f"{at}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _marker_faults(item, f"{at}[{index}]")
