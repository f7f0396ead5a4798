"""Mutants: wrong implementations, each the oracle with one rule broken, to prove that the golden cases can fail.

``<stage>.toml`` holds them as patches of the oracle's source. A mutant is loaded in memory under a package name of
its own; nothing is written. A patch whose ``old`` text is no longer there is an error, so none goes stale unseen.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

GOLDEN = Path(__file__).parent.parent
ORACLE = GOLDEN / "oracle"
KINDS = ("assemble", "encode", "decode", "match")
BYTES = "bytes"


@dataclass(frozen=True)
class Patch:
    """One replacement in one file of the oracle."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation, in a sentence and as patches."""

    name: str
    stage: str
    description: str
    patches: tuple[Patch, ...]


def mutants(folder: Path = Path(__file__).parent) -> list[Mutant]:
    """All mutants of a folder, by the stage (or room) that its files are named after."""
    found = []
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]:
            patches = tuple(Patch(**patch) for patch in entry["patch"])
            found.append(Mutant(entry["name"], file.stem, entry["description"], patches))
    return found


def hand_cases() -> list[dict[str, Any]]:
    """The hand-made cases that the oracle can judge: exact expectations, of kinds and a tokenizer it knows."""
    cases: list[dict[str, Any]] = []
    for folder in ("v1", "v2", "wire", "tokens"):
        for file in sorted((GOLDEN / folder).rglob("*.json")):
            loaded = json.loads(file.read_text(encoding="utf-8"))
            cases += loaded if isinstance(loaded, list) else [loaded]
    known = [case for case in cases if case["kind"] in KINDS and case["config"].get("tokenizer", BYTES) == BYTES]
    exact = [case for case in known if "laws" not in case["expect"]]
    return [case for case in exact if case["provenance"] == "hand"]


@contextmanager
def loaded(mutant: Mutant) -> Iterator[ModuleType]:
    """The mutated oracle as a module, with ``run_case`` and ``verdict``."""
    package = "mutant_" + mutant.name.replace("-", "_")
    finder = _Finder(package, _sources(mutant))
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(package)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name == package or name.startswith(package + ".")]:
            del sys.modules[name]


def fails(module: ModuleType, case: dict[str, Any]) -> bool:
    """Whether a mutated oracle gets ``case`` wrong; an exception of any kind is wrong, too."""
    try:
        return module.verdict(json.loads(json.dumps(case))) is not None
    except Exception:
        return True


def _sources(mutant: Mutant) -> dict[str, str]:
    sources = dict(_oracle_sources())
    for patch in mutant.patches:
        if patch.old not in sources[patch.file]:
            raise LookupError(f"mutant {mutant.name}: {patch.file} no longer holds {patch.old!r}; write the patch anew")
        sources[patch.file] = sources[patch.file].replace(patch.old, patch.new)
    return sources


@cache
def _compiled(source: str, file: str) -> CodeType:
    return compile(source, f"<mutant {file}>", "exec")


@cache
def _oracle_sources() -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in ORACLE.glob("*.py")}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one package from sources in memory."""

    def __init__(self, package: str, sources: dict[str, str]) -> None:
        self.package = package
        self.sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._file(fullname) not in self.sources:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == self.package)

    def exec_module(self, module: ModuleType) -> None:
        file = self._file(module.__name__)
        exec(_compiled(self.sources[file], file), module.__dict__)

    def _file(self, fullname: str) -> str:
        if fullname == self.package:
            return "__init__.py"
        head, _, tail = fullname.partition(".")
        return f"{tail}.py" if head == self.package else ""
