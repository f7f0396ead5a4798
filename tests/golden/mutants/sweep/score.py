"""The result of a sweep: one record a mutant, the scores, and both forms in which they are saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 1
KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"


@dataclass(frozen=True)
class Result:
    """What became of one mutant. `stage` and `by` say what killed it; `why` explains a survivor that is equivalent."""

    file: str
    line: int
    operator: str
    text: str
    becomes: str
    diff: str
    outcome: str
    stage: str = ""
    by: str = ""
    detail: str = ""
    seconds: float = 0.0
    why: str | None = None

    @property
    def room(self) -> str:
        return self.file.split("/")[1]


@dataclass(frozen=True)
class Score:
    """Counts of some mutants. A time-out counts as killed; a mutant that was not run is in none of them."""

    run: int = 0
    killed: int = 0
    timed_out: int = 0
    survived: int = 0
    explained: int = 0
    """Those of the survivors that are explained."""

    @property
    def raw(self) -> float | None:
        """Killed of all that ran, in percent; None when none ran."""
        return _percent(self.killed + self.timed_out, self.run)

    @property
    def without_explained(self) -> float | None:
        """Killed of all that ran and are not explained, in percent."""
        return _percent(self.killed + self.timed_out, self.run - self.explained)


def _percent(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 2) if whole else None


def score(results: Iterable[Result]) -> Score:
    """The score of some mutants. Raises ValueError for an outcome that is none."""
    results = list(results)
    counts = Counter(result.outcome for result in results)
    if unknown := counts.keys() - {KILLED, TIMED_OUT, SURVIVED}:
        raise ValueError(f"no outcome of a mutant: {', '.join(sorted(unknown))}")
    explained = sum(result.outcome == SURVIVED and result.why is not None for result in results)
    return Score(len(results), counts[KILLED], counts[TIMED_OUT], counts[SURVIVED], explained)


@dataclass(frozen=True)
class Sweep:
    """A whole run. One with `stale` or `wrong` entries of survivors.toml does not count."""

    seed: int
    asked: int
    """Mutants of the sample; those that ran are fewer where the time ended first."""
    population: int
    left_out: Mapping[str, int]
    discarded: int
    """Mutants that were drawn, and do not compile or are the same program."""
    seconds: float
    versions: Mapping[str, Any]
    control: Mapping[str, Mapping[str, float]]
    """Seconds of each stage on the package as it is, by room."""
    results: Sequence[Result]
    stale: Sequence[str] = field(default_factory=tuple)
    """Entries that fit no mutant any more."""
    wrong: Sequence[str] = field(default_factory=tuple)
    """Explained mutants that were killed."""

    def by_room(self) -> dict[str, Score]:
        """The score of each room that has one, then of all."""
        rooms = list(dict.fromkeys(result.room for result in self.results))
        scores = {room: score(one for one in self.results if one.room == room) for room in sorted(rooms)}
        return {**scores, "total": score(self.results)}

    def to_json(self) -> dict[str, Any]:
        """The whole run, a record a mutant."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "sample": {"asked": self.asked, "run": len(self.results), "discarded": self.discarded},
            "population": {"mutants": self.population, "left_out": dict(self.left_out)},
            "seconds": round(self.seconds, 1),
            "versions": dict(self.versions),
            "control": {room: dict(stages) for room, stages in self.control.items()},
            "score": {
                room: {**asdict(one), "raw": one.raw, "without_explained": one.without_explained}
                for room, one in self.by_room().items()
            },
            "killed_by": dict(Counter(result.stage for result in self.results if result.outcome != SURVIVED)),
            "explanations": {"stale": list(self.stale), "wrong": list(self.wrong)},
            "mutants": [asdict(result) for result in self.results],
        }

    def to_markdown(self) -> str:
        """The scores, what killed, and every survivor with its difference."""
        commit = self.versions.get("commit") or "no commit"
        lines = [
            "# Mutation sweep",
            "",
            f"Seed {self.seed}, {commit}. {len(self.results)} of the {self.asked} mutants of the sample ran, in"
            f" {self.seconds / 60:.1f} minutes; the rooms have {self.population} in all.",
            "",
            "| room | run | killed | timed out | survived | explained | score | without the explained |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for room, one in self.by_room().items():
            lines.append(
                f"| {room} | {one.run} | {one.killed} | {one.timed_out} | {one.survived} | {one.explained}"
                f" | {_shown(one.raw)} | {_shown(one.without_explained)} |"
            )
        by = Counter(result.stage for result in self.results if result.outcome == KILLED)
        mean = sum(result.seconds for result in self.results) / max(1, len(self.results))
        lines += [
            "",
            f"A mutant took {mean:.1f} s of a worker. Killed by: "
            + (", ".join(f"{stage} {n}" for stage, n in by.most_common()) or "nothing")
            + ".",
        ]
        for title, entries in (
            ("Entries of survivors.toml that fit no mutant any more", self.stale),
            ("Entries of survivors.toml whose mutant was killed", self.wrong),
        ):
            lines += ["", f"## {title}", "", *(f"- {entry}" for entry in entries)] if entries else []
        survivors = [result for result in self.results if result.outcome == SURVIVED]
        lines += self._listed("Survivors", [one for one in survivors if one.why is None])
        lines += self._listed("Timed out", [one for one in self.results if one.outcome == TIMED_OUT])
        lines += self._listed("Explained survivors", [one for one in survivors if one.why is not None])
        return "\n".join(lines) + "\n"

    @staticmethod
    def _listed(title: str, results: Sequence[Result]) -> list[str]:
        lines = ["", f"## {title}: {len(results)}"]
        for one in sorted(results, key=lambda result: (result.file, result.line, result.operator)):
            said = [one.why] if one.why else [one.detail] if one.outcome == TIMED_OUT else []
            diff = one.diff.split("\n", 2)[2]
            lines += ["", f"{one.file}:{one.line} {one.operator}", *said, "", "```diff", diff, "```"]
        return lines


def _shown(percent: float | None) -> str:
    return "—" if percent is None else f"{percent:.1f} %"
