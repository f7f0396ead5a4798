"""The corpus as a whole: where it is, which files hold its cases, and the checks that keep it sound.

In the repository it is tests/golden, in an installed wheel miles_ref/testing/golden (docs/corpus.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_ref.errors import CaseError

SCHEMA = "schema.json"
HEADINGS = "contract-headings.json"
NOT_CASES = frozenset({"mutants", "oracle"})
"""Folders of the corpus that hold no cases."""


def corpus_root() -> Path:
    """The corpus that belongs to this package. Raises CaseError when it is not there."""
    package = Path(__file__).resolve().parent
    for root in (package / "golden", package.parent.parent / "tests" / "golden"):
        if is_corpus(root):
            return root
    raise CaseError(f"no corpus beside {package}: neither golden/ in the package nor tests/golden in a repository")


def is_corpus(folder: Path) -> bool:
    """Whether the folder is the root of a corpus."""
    return (folder / SCHEMA).is_file() and (folder / HEADINGS).is_file()


def root_of(path: Path) -> Path | None:
    """The corpus that a file or folder belongs to."""
    return next((folder for folder in (path, *path.parents) if is_corpus(folder)), None)


def is_case_file(path: Path) -> bool:
    """Whether a file of a corpus holds cases, by its place alone."""
    root = root_of(path.parent)
    if root is None or path.suffix != ".json" or path.parent == root:
        return False
    return path.relative_to(root).parts[0] not in NOT_CASES


def case_folders(root: Path) -> list[Path]:
    """The folders of a corpus that hold cases, not what proves it."""
    return sorted(folder for folder in root.iterdir() if folder.is_dir() and any(map(is_case_file, folder.rglob("*"))))


def case_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The case files at or below the paths, in a fixed order. A file that is named is taken wherever it is."""
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*.json") if is_case_file(file.resolve()))
        elif path.is_file():
            yield path
        else:
            raise CaseError(f"{path}: no such file or folder")


def raw_cases(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Every case of a corpus with its file, unchecked."""
    found = []
    for file in case_files([root]):
        content = json.loads(file.read_text(encoding="utf-8"))
        found += [(file, case) for case in (content if isinstance(content, list) else [content])]
    return found


def check_corpus(root: Path, mutants: Iterable[str] | None = None) -> list[str]:
    """What is unsound in the corpus beyond the schema: ids, folders, specs, twins, kills. [] when all is well.

    `mutants` are the names that `kills` may use; None: not checked (an installed wheel holds no mutants).
    """
    cases = raw_cases(root)
    headings = json.loads((root / HEADINGS).read_text(encoding="utf-8"))
    known = {case["id"]: case for _, case in cases}
    names = None if mutants is None else set(mutants)
    problems = _repeated_ids(cases)
    for file, case in cases:
        problems += [
            f"{file.relative_to(root)}: {case['id']}: {fault}" for fault in _faults(case, known, headings, names)
        ]
    return problems


def _repeated_ids(cases: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[str]:
    first: dict[str, Path] = {}
    problems = []
    for file, case in cases:
        if case["id"] in first:
            problems.append(f"{case['id']}: the id is used twice, in {first[case['id']].name} and {file.name}")
        first.setdefault(case["id"], file)
    return problems


def _faults(
    case: Mapping[str, Any],
    known: Mapping[str, Mapping[str, Any]],
    headings: Mapping[str, list[str]],
    mutants: set[str] | None,
) -> Iterator[str]:
    document, _, heading = case["spec"].partition("#")
    if not any(known_heading.startswith(heading.replace("`", "")) for known_heading in headings.get(document, [])):
        yield f"spec {case['spec']!r} is no heading of the contract"
    twin = case.get("twin")
    if twin is not None and twin not in known:
        yield f"its twin {twin!r} does not exist"
    elif twin is not None and is_bad_case(known[twin]) and is_bad_case(case):
        yield f"its twin {twin!r} is a bad case too; a twin is the nearest good neighbour"
    if mutants is not None:
        yield from (f"kills {name!r}, which is no mutant" for name in case.get("kills", ()) if name not in mutants)


def is_bad_case(case: Mapping[str, Any]) -> bool:
    """Whether the case expects a refusal."""
    return "error" in case.get("expect", {})
