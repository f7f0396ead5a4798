"""Loading cases: the closed format of cases.md and design.md, Corpus.

A handed vector may lack `why`, `tags`, `config` and `version`; in the corpus they are required, as its schema checks.
An unknown key is an error in both.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_ref.errors import CaseError
from miles_ref.testing.corpus import is_case_file, root_of

KINDS = ("assemble", "encode", "decode", "match", "http", "worker")

CONFIG_DEFAULTS: Mapping[str, Any] = {
    "tokenizer": "bytes",
    "family": "default",
    "max_trim_tokens": 0,
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

_INPUTS: Mapping[str, frozenset[str]] = {
    "assemble/v1": frozenset({"records", "accumulated_token_ids", "max_seq_len"}),
    "assemble/v2": frozenset({"nodes", "max_seq_len", "agent"}),
    "encode": frozenset({"samples", "session_metadata", "empty_reason"}),
    "decode": frozenset({"payload", "input_sample"}),
    "match": frozenset({"stored", "replayed", "matcher"}),
}
_MAY_BE_ABSENT = frozenset({"accumulated_token_ids", "max_seq_len", "agent", "input_sample", "empty_reason"})
_EXPECTS: Mapping[str, frozenset[str]] = {
    "assemble": frozenset({"samples", "empty_reason"}),
    "encode": frozenset({"payload"}),
    "decode": frozenset({"samples", "session_metadata", "empty_reason"}),
    "match": frozenset({"match"}),
}
_ERROR = frozenset({"error", "mentions"})
_LAWS = frozenset({"laws"})
_TEXTS = ("id", "why", "kind", "version", "spec", "provenance", "twin")
_LISTS = ("tags", "requires", "kills")
_KEYS = frozenset({*_TEXTS, *_LISTS, "config", "input", "expect"})


@dataclass(frozen=True)
class Case:
    """One case. `config` holds all keys, defaults filled in; `version` is "v1" where the case does not say."""

    id: str
    kind: str
    input: Mapping[str, Any]
    expect: Mapping[str, Any]
    version: str = "v1"
    why: str = ""
    tags: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=lambda: dict(CONFIG_DEFAULTS))
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The case as it was loaded, with the keys that are for people and for the corpus' own checks."""


def load_cases(paths: Iterable[str | Path]) -> list[Case]:
    """The cases of files; a folder stands for every .json and .json.gz file below it, in a fixed order.

    Raises CaseError for what is missing, no JSON, not of the format, or an id that is there twice.
    """
    cases: list[Case] = []
    where: dict[str, Path] = {}
    for file in _files(paths):
        for case in parse_file(file):
            if case.id in where:
                raise CaseError(f"{file}: the id {case.id!r} is used twice, first in {where[case.id]}")
            where[case.id] = file
            cases.append(case)
    return cases


def parse_file(file: Path) -> list[Case]:
    """The cases of one file: one case or a list of cases. Raises CaseError."""
    try:
        raw = file.read_bytes()
        content = json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise CaseError(f"{file}: cannot be read as cases: {error}") from error
    return [parse_case(case, f"{file}: ") for case in (content if isinstance(content, list) else [content])]


def parse_case(raw: Any, where: str = "") -> Case:
    """Check the form of one case. Raises CaseError naming the case and the key."""
    if not isinstance(raw, dict):
        raise CaseError(f"{where}a case is an object, not {raw!r:.80}")
    if not isinstance(raw.get("id"), str):
        raise CaseError(f"{where}a case has no id: {raw!r:.80}")
    where = f"{where}{raw['id']}: "
    _no_unknown(raw, _KEYS, where)
    for key in _TEXTS:
        if not isinstance(raw.get(key, ""), str):
            raise CaseError(f"{where}{key} is {raw[key]!r:.80}, not a text")
    for key in _LISTS:
        value = raw.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CaseError(f"{where}{key} is {value!r:.80}, not a list of texts")
    if raw.get("kind") not in KINDS:
        raise CaseError(f"{where}kind is {raw.get('kind')!r}, known are {', '.join(KINDS)}")
    if raw.get("version", "v1") not in ("v1", "v2"):
        raise CaseError(f"{where}version is {raw['version']!r}, known are v1 and v2")
    for key in ("config", "input", "expect"):
        if not isinstance(raw.get(key, {} if key == "config" else None), dict):
            raise CaseError(f"{where}{key} is {raw.get(key)!r:.80}, not an object")
    config = raw.get("config", {})
    _no_unknown(config, CONFIG_DEFAULTS, f"{where}config: ")
    _check_input(raw, where)
    _check_expect(raw, where)
    return Case(
        id=raw["id"],
        kind=raw["kind"],
        input=raw["input"],
        expect=raw["expect"],
        version=raw.get("version", "v1"),
        why=raw.get("why", ""),
        tags=tuple(raw.get("tags", ())),
        config={**CONFIG_DEFAULTS, **config},
        raw=raw,
    )


def _check_input(raw: Mapping[str, Any], where: str) -> None:
    keys = _INPUTS.get(raw["kind"], _INPUTS.get(f"{raw['kind']}/{raw.get('version', 'v1')}"))
    if keys is None:
        return  # http and worker check their steps as they run them
    _no_unknown(raw["input"], keys, f"{where}input: ")
    missing = sorted(keys - raw["input"].keys() - _MAY_BE_ABSENT)
    if missing:
        raise CaseError(f"{where}input has no {', '.join(missing)}")


def _check_expect(raw: Mapping[str, Any], where: str) -> None:
    allowed = _EXPECTS.get(raw["kind"])
    expect = raw["expect"]
    if allowed is None:
        return
    if "laws" in expect:
        allowed = _LAWS
    elif "error" in expect:
        allowed = _ERROR
    _no_unknown(expect, allowed, f"{where}expect: ")
    missing = sorted(allowed - expect.keys())
    if missing:
        raise CaseError(f"{where}expect has no {', '.join(missing)}")


def _no_unknown(holder: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    unknown = sorted(holder.keys() - set(known))
    if unknown:
        raise CaseError(f"{where}unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")


def _files(paths: Iterable[str | Path]) -> Iterable[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*.json*") if _holds_cases(file))
        elif path.is_file():
            yield path
        else:
            raise CaseError(f"{path}: no such file or folder")


def _holds_cases(file: Path) -> bool:
    """Whether a file of a folder is meant: of a corpus, not its schema and the like."""
    if not file.name.endswith((".json", ".json.gz")) or not file.is_file():
        return False
    return root_of(file.resolve().parent) is None or is_case_file(file.resolve())
