"""`miles-ref case propose`: expectations from the independent oracle, never from this package.

The oracle is a second implementation, written from the contract alone; it stands in the corpus (tests/golden/oracle).
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_ref.errors import CaseError
from miles_ref.testing.cases import parse_case, read_file
from miles_ref.testing.check import judge
from miles_ref.testing.compare import expectation_difference
from miles_ref.testing.corpus import corpus_root
from miles_ref.testing.targets import DATA_KINDS, ReferenceTarget, laws_of

WIDTH = 118
CHANGES = "changes.md"
"""Where the corpus keeps the reasons of expectations that were changed."""

Oracle = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Proposal:
    """What the oracle says of one case. `before` is the expectation that it has, `ours` how this package differs."""

    case_id: str
    before: Mapping[str, Any] | None
    after: dict[str, Any]
    ours: str | None

    def difference(self) -> str:
        """The change as a unified diff of JSON."""
        old = [] if not self.before else dump(self.before).splitlines()
        lines = difflib.unified_diff(old, dump(self.after).splitlines(), "as it stands", "by the oracle", lineterm="")
        return "\n".join(lines)


def load_oracle() -> Oracle:
    """`run_case` of the corpus' oracle. Raises CaseError where there is none."""
    folder = corpus_root() / "oracle"
    name = "miles_ref_oracle"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not folder.is_dir():
        raise CaseError(f"{folder}: the corpus has no oracle here")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    oracle: Oracle = module.run_case
    return oracle


def propose(file: Path, oracle: Oracle) -> list[Proposal]:
    """The cases of a file whose expectation is missing, or is not the oracle's. Raises CaseError."""
    proposals = []
    for raw in read(file):
        if raw.get("kind") not in DATA_KINDS:
            raise CaseError(
                f"{raw.get('id')}: the oracle does not play kind {raw.get('kind')!r}; reason it out by hand"
            )
        before = raw.get("expect") or None
        try:
            after = oracle(json.loads(json.dumps(raw)))
        except Exception as error:  # the oracle trusts the form of its input, and a case may be malformed
            raise CaseError(f"{raw.get('id')}: the oracle cannot run it: {error!r}") from error
        case = parse_case({**raw, "expect": after})
        if laws_of(parse_case({**raw, "expect": before or after})) is not None:
            continue
        if before is not None and _agree(before, after):
            continue
        verdict = judge(case, ReferenceTarget())
        proposals.append(Proposal(case.id, before, after, verdict.details[0] if verdict.bad else None))
    return proposals


def _agree(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    observed = {**after, "message": "; ".join(after["mentions"])} if "error" in after else after
    return expectation_difference(before, observed) is None


def accept(file: Path, proposals: list[Proposal], reason: str, root: Path | None = None) -> None:
    """Write the proposals into the file, and the reason into the corpus' list of changes."""
    by_id = {one.case_id: one for one in proposals}
    cases = read(file)
    for case in cases:
        if case["id"] in by_id:
            case["expect"] = by_id[case["id"]].after
    file.write_text(dump(cases) + "\n", encoding="utf-8")
    with ((root or corpus_root()) / CHANGES).open("a", encoding="utf-8") as changes:
        changes.writelines(f"- {one.case_id}: {reason}\n" for one in proposals)


def read(file: Path) -> list[dict[str, Any]]:
    """The cases of a file as they stand, `expect` absent where it is still to be filled. Raises CaseError."""
    if file.suffix == ".gz":
        raise CaseError(f"{file}: is packed; unpack it, so that its expectations can be written")
    cases: list[dict[str, Any]] = read_file(file)
    seen: set[str] = set()
    for index, case in enumerate(cases):
        if not isinstance(case, dict) or not isinstance(case.get("id"), str):
            raise CaseError(f"{file}: entry {index} is no case with an id: {case!r:.80}")
        if case["id"] in seen:
            raise CaseError(f"{file}: the id {case['id']!r} is used twice")
        seen.add(case["id"])
    return cases


def dump(value: Any, indent: int = 0) -> str:
    """JSON as the corpus writes it: a value that fits stays on one line, so that cases can be read."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(line) + indent <= WIDTH:
        return line
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        return line
    pad, end = " " * (indent + 1), " " * indent
    if isinstance(value, dict):
        members = ",\n".join(f"{pad}{json.dumps(key)}: {dump(item, indent + 1)}" for key, item in value.items())
        return f"{{\n{members}\n{end}}}"
    items = ",\n".join(pad + dump(item, indent + 1) for item in value)
    return f"[\n{items}\n{end}]"
