"""A run of the corpus against a target: smoke cases first, then the others, to verdicts and a report."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from miles_ref.errors import CaseError, MilesRefError, UsageError
from miles_ref.testing.cases import Case
from miles_ref.testing.programs import ProgramError
from miles_ref.testing.servers import config_key
from miles_ref.testing.targets import Target, lacking
from miles_ref.testing.verdict import Outcome, Verdict

SMOKE = "smoke"
"""Tag of the cases that come first: when one fails, harness and target are miswired, and nothing else is judged."""


def select(cases: Iterable[Case], patterns: Sequence[str] = (), tags: Sequence[str] = ()) -> list[Case]:
    """The cases whose id matches one of the globs and that have one of the tags; empty means all.

    Raises CaseError for a glob or a tag that matches nothing.
    """
    cases = list(cases)
    known = {tag for case in cases for tag in case.tags}
    for tag in tags:
        if tag not in known:
            raise CaseError(f"no case has the tag {tag!r}; tags are {', '.join(sorted(known)) or 'not used'}")
    for pattern in patterns:
        if not any(fnmatchcase(case.id, pattern) for case in cases):
            raise CaseError(f"{pattern!r} matches no case; ids look like {cases[0].id if cases else 'v1/fold/...'}")
    return [
        case
        for case in cases
        if (not patterns or any(fnmatchcase(case.id, pattern) for pattern in patterns))
        and (not tags or set(tags) & set(case.tags))
    ]


def check_provides(cases: Iterable[Case], provides: Sequence[str], option: str = "--provides") -> None:
    """Refuse a capability that none of the cases requires: a name that is misspelt would be skipped for. UsageError."""
    required = {name for case in cases for name in case.raw.get("requires", ())}
    for name in provides:
        if name not in required:
            raise UsageError(
                f"{option} {name!r}: no chosen case requires it; they require {', '.join(sorted(required)) or 'none'}"
            )


def judge(case: Case, target: Target) -> Verdict:
    """Run one case. Whatever an implementation does, there is a verdict; KeyboardInterrupt alone passes."""
    started = time.perf_counter()
    details: tuple[str, ...]
    try:
        missing = lacking(case, target)
        reason = f"requires {', '.join(missing)}, which the target does not provide" if missing else None
        reason = reason or target.refusal(case)
        if reason is not None:
            outcome, details = Outcome.SKIPPED, (reason,)
        else:
            differences = target.run(case)
            outcome, details = (Outcome.FAILED if differences else Outcome.PASSED), tuple(differences)
    except (ProgramError, CaseError) as error:
        outcome, details = Outcome.ERROR, (str(error),)
    except MilesRefError as error:
        outcome, details = Outcome.FAILED, (f"{type(error).__name__}: {error}",)
    except Exception as error:
        outcome, details = Outcome.ERROR, (f"{type(error).__name__}: {error}",)
    return Verdict(
        case_id=case.id,
        outcome=outcome,
        kind=case.kind,
        why=case.why,
        spec=str(case.raw.get("spec", "")),
        details=details,
        seconds=time.perf_counter() - started,
        smoke=SMOKE in case.tags,
    )


def run_all(cases: Sequence[Case], target: Target) -> Iterator[Verdict]:
    """The verdicts, smoke cases first. After a bad smoke case nothing else is judged."""
    for case in cases:
        if SMOKE in case.tags:
            verdict = judge(case, target)
            yield verdict
            if verdict.bad:
                return
    # Cases that one server can serve come together, so that none is started twice.
    rest = [case for case in cases if SMOKE not in case.tags]
    for case in sorted(rest, key=lambda case: config_key(case.version, case.config) if case.kind == "http" else ""):
        yield judge(case, target)
