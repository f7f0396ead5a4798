"""survivors.toml: survivors that are equivalent, each with a sentence why.

An entry names its mutant by file, operator and the text of the source line, not by a line number; `becomes`, the line
that the mutant has instead, is for lines that an operator changes in several ways.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .mutations import Mutation

FILE = Path(__file__).with_name("survivors.toml")
KEYS = frozenset({"file", "operator", "line", "becomes", "why"})


@dataclass(frozen=True)
class Explained:
    """One entry."""

    file: str
    operator: str
    line: str
    why: str
    becomes: str | None = None

    @property
    def room(self) -> str:
        return self.file.split("/")[1]

    def names(self, mutation: Mutation) -> bool:
        """Whether it may be about a mutation; `becomes` decides between those of one line."""
        return (self.file, self.operator, self.line) == (mutation.file, mutation.operator, mutation.text)

    def explains(self, mutation: Mutation, becomes: str) -> bool:
        """Whether it is about a mutation that was carried out."""
        return self.names(mutation) and self.becomes in (None, becomes)

    def __str__(self) -> str:
        return f"{self.file}: {self.operator} on {self.line!r}" + (f" to {self.becomes!r}" if self.becomes else "")


def read(file: Path = FILE) -> list[Explained]:
    """All entries. Raises ValueError for one that lacks a key, has another, or gives no reason."""
    found = []
    for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("survivor", []):
        unknown, missing = entry.keys() - KEYS, KEYS - {"becomes"} - entry.keys()
        if unknown or missing:
            raise ValueError(f"{file.name}: {entry}: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}")
        if not entry["why"].strip():
            raise ValueError(f"{file.name}: {entry}: why is empty; say in a sentence why nothing can tell it apart")
        found.append(Explained(**entry))
    return found


def explanation(entries: Iterable[Explained], mutation: Mutation, becomes: str) -> Explained | None:
    """The entry about a mutation, if there is one."""
    return next((entry for entry in entries if entry.explains(mutation, becomes)), None)


def stale(
    entries: Iterable[Explained], mutations: Sequence[Mutation], becomes: Callable[[Mutation], str | None]
) -> list[Explained]:
    """The entries that no mutation fits any more. `becomes` carries a mutation out; None where it does not compile."""
    return [
        entry
        for entry in entries
        if not any(
            entry.explains(one, text) for one in mutations if entry.names(one) and (text := becomes(one)) is not None
        )
    ]
