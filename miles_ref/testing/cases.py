"""Loading cases: the closed format of cases.md and docs/corpus.md.

The form of a case stands in the corpus' schema.json; what no schema can say is checked here and in
`miles_ref.testing.steps`. All of it before anything runs. A handed vector may lack `why`, `tags`, `config` and
`version`; the corpus requires them (`golden_case` of the schema). What may be spelled in several ways is brought to one
(`miles_ref.testing.normalize`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_ref.errors import CaseError
from miles_ref.testing.corpus import is_case_file, root_of
from miles_ref.testing.normalize import CONFIG_DEFAULT_TRIM, normalized, trim_fault, version_of
from miles_ref.testing.schema import first_fault
from miles_ref.testing.steps import step_fault

MOST_FAULTS = 20
"""Faults that one message shows; a mistake in a generator repeats itself in each case."""

VERSIONED = ("assemble", "encode", "decode", "http")
"""Kinds that a version matters to."""

CONFIG_DEFAULTS: Mapping[str, Any] = {
    "tokenizer": "bytes",
    "family": "default",
    "max_trim_tokens": CONFIG_DEFAULT_TRIM,
    "num_layers": 0,
    "moe_router_topk": 0,
    "speculative": False,
    "debug_messages": False,
    "additional_r3": False,
    "routed_experts": False,
    "indexer_topk": False,
    "strict_append_only": False,
    "allowed_append_roles": None,
    "matcher": "strict",
    "picker": None,
    "merger": None,
    "max_nodes": 1024,
    "flags": [],
}
"""Keys of a case's config and their defaults (cases.md); None: the family's own, or the version's own plugin.

`flags`, for http, are further flags of session-http.md, for settings that have no key.
"""


@dataclass(frozen=True)
class Case:
    """One case. `config` holds all keys, defaults filled in; a `version` that it lacks is that of `version_of`."""

    id: str
    kind: str
    input: Mapping[str, Any]
    expect: Mapping[str, Any]
    version: str = "v1"
    why: str = ""
    tags: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=lambda: dict(CONFIG_DEFAULTS))
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The case as it was loaded and normalized, with the keys that are for people and for the corpus' own checks."""


def load_cases(paths: Iterable[str | Path]) -> list[Case]:
    """The cases of files; a folder stands for every .json and .json.gz file below it, in a fixed order.

    Raises CaseError for what is missing, no JSON, not of the format, or an id that is there twice: a line a fault, of
    all files, so that they can be mended at once; of each case its first.
    """
    cases, unreadable, unsound = _loaded(paths)
    _raise([*unreadable, *unsound])
    return cases


def load_sound_cases(paths: Iterable[str | Path]) -> tuple[list[Case], list[str]]:
    """As `load_cases`, but a case that is not of the format does not stop the others: they, and a line for each fault.

    Raises CaseError for a file that is missing or no JSON, and where no case is sound.
    """
    cases, unreadable, unsound = _loaded(paths)
    _raise(unreadable if cases else [*unreadable, *unsound])
    return cases, unsound


def _loaded(paths: Iterable[str | Path]) -> tuple[list[Case], list[str], list[str]]:
    """The sound cases, and what is wrong with files and with cases."""
    cases: list[Case] = []
    where: dict[str, Path] = {}
    unreadable: list[str] = []
    unsound: list[str] = []
    for file in _files(paths, unreadable):
        try:
            sound, faults = _parsed(file)
        except CaseError as error:
            unreadable.append(str(error))
            continue
        unsound += faults
        for case in sound:
            if case.id in where:
                unsound.append(f"{file}: the id {case.id!r} is used twice, first in {where[case.id]}")
            where.setdefault(case.id, file)
            cases.append(case)
    return cases, unreadable, unsound


def parse_file(file: Path) -> list[Case]:
    """The cases of one file: one case or a list of cases. Raises CaseError, as `load_cases`."""
    cases, faults = _parsed(file)
    _raise(faults)
    return cases


def _parsed(file: Path) -> tuple[list[Case], list[str]]:
    """The sound cases of a file, and what is wrong with the others. Raises CaseError for a file that is none."""
    cases, faults = [], []
    for raw in read_file(file):
        try:
            cases.append(parse_case(raw, f"{file}: "))
        except CaseError as error:
            faults.append(str(error))
    return cases, faults


def _raise(faults: Sequence[str]) -> None:
    if faults:
        more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
        raise CaseError("\n".join([*faults[:MOST_FAULTS], *more]))


def read_file(file: Path) -> list[Any]:
    """What stands in a file where cases do, unchecked; at least one. Raises CaseError.

    A key that stands twice in one object is refused: JSON readers differ in which of the two they take.
    """
    try:
        raw = file.read_bytes()
        text = gzip.decompress(raw) if file.suffix == ".gz" else raw
        content = json.loads(text, object_pairs_hook=_object)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise CaseError(f"{file}: cannot be read as cases: {error}") from error
    if content == []:
        raise CaseError(f"{file}: holds no case, only an empty list")
    return content if isinstance(content, list) else [content]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise ValueError(f"the key {twice!r} stands twice in one object, beside {', '.join(sorted(made))}"[:300])
    return made


def parse_case(raw: Any, where: str = "") -> Case:
    """Check the form of one case. Raises CaseError naming the case and the key."""
    if not isinstance(raw, dict):
        raise CaseError(f"{where}a case is an object, not {raw!r:.80}")
    if not isinstance(raw.get("id"), str):
        raise CaseError(f"{where}a case has no id: {raw!r:.80}")
    where = f"{where}{raw['id']}: "
    version, why = version_of(raw)
    raw = {**raw, "version": version}
    try:
        fault = first_fault(raw, "case") or step_fault(raw) or forest_fault(raw) or trim_fault(raw)
    except RecursionError:
        fault = "what a step expects is nested too deeply to be read"
    if fault is not None:
        taken = f" (version is absent; the case was taken for {version}, {why})" if why is not None else ""
        raise CaseError(f"{where}{fault}{taken if raw.get('kind') in VERSIONED else ''}")
    raw = normalized(raw)
    return Case(
        id=raw["id"],
        kind=raw["kind"],
        input=raw["input"],
        expect=raw.get("expect", {}),
        version=raw["version"],
        why=raw.get("why", ""),
        tags=tuple(raw.get("tags", ())),
        config={**CONFIG_DEFAULTS, **raw["config"]},
        raw=raw,
    )


def _files(paths: Iterable[str | Path], faults: list[str]) -> Iterable[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*.json*") if _holds_cases(file))
        elif path.is_file():
            yield path
        else:
            faults.append(f"{path}: no such file or folder")


def _holds_cases(file: Path) -> bool:
    """Whether a file of a folder is meant: of a corpus, not its schema and the like."""
    if not file.name.endswith((".json", ".json.gz")) or not file.is_file():
        return False
    return root_of(file.resolve().parent) is None or is_case_file(file.resolve())


def forest_fault(raw: Mapping[str, Any]) -> str | None:
    """A node whose parent is not committed before it."""
    for index, node in enumerate(raw["input"].get("nodes", ()) if raw["kind"] == "assemble" else ()):
        if node["parent"] is not None and node["parent"] >= index:
            return f"input.nodes[{index}].parent is {node['parent']}, not null or the index of an earlier node"
    return None
