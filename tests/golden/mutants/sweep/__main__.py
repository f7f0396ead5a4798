"""`python -m tests.golden.mutants.sweep`: judge a seeded sample of mutants, save and print the score.

The exit status is 0 when the run counts: the package as it is passed every stage before and after, and survivors.toml
fits. Survivors do not change it: they are what the run is for.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.golden.mutants import GOLDEN

from . import survivors
from .mutations import ROOMS, Made, Mutation, drawn, make, population
from .score import SURVIVED, Result, Sweep
from .workers import FIRST_LIMIT, STAGES, Job, Worker, WorkerError, run_jobs, unit_tests, workers

REPOSITORY = GOLDEN.parent.parent
VERSIONS = ("miles-ref", "cosmic-ray", "parso", "pytest", "hypothesis", "numpy")
Judged = tuple[Mutation, Made]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sweep; 0 when it counts. Raises WorkerError for one that does not."""
    options = parser().parse_args(arguments)
    rooms: list[str] = options.room or list(ROOMS)
    started = time.monotonic()
    explained = [entry for entry in survivors.read() if entry.room in rooms]
    versions = versions_now()
    with workers(REPOSITORY, options.workers) as pool:
        root = pool[0].root  # what is mutated is what was copied
        found = population(root, rooms)
        order = drawn(found.mutations, options.seed)
        say(f"{len(order)} mutants, {found.left_out.total()} left out; first the package as it is")
        seconds = control(pool, rooms)
        sample = Sample(root, order, explained, seconds, options.timeout, size=options.sample)
        if options.minutes is not None:
            # What the last mutants and the control at the end need is kept free.
            longest = max(sum(stages.values()) for stages in seconds.values())
            sample.end = started + 60 * options.minutes - longest * (1 + -(-len(rooms) // options.workers))
        run_jobs(pool, sample.jobs(), sample.done)
        control(pool, rooms)
        stale = survivors.stale(explained, order, sample.becomes)
    sweep = Sweep(
        seed=options.seed,
        asked=sample.size,
        population=len(order),
        left_out=dict(found.left_out),
        discarded=sample.discarded,
        seconds=time.monotonic() - started,
        versions=versions,
        control=seconds,
        results=sample.results,
        stale=[str(entry) for entry in stale],
        wrong=sample.wrong,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(sweep.to_json(), indent=1) + "\n", encoding="utf-8")
    summary = sweep.to_markdown()
    options.out.with_suffix(".md").write_text(summary, encoding="utf-8")
    print(summary)
    return 1 if sweep.stale or sweep.wrong else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m tests.golden.mutants.sweep", description=__doc__)
    made.add_argument("--seed", type=int, default=1, help="decides which mutants are drawn, and in which order")
    made.add_argument("--sample", type=_count, help="judge this many mutants (default: as many as there is time for)")
    made.add_argument("--minutes", type=float, help="stop in this time, with what has run until then")
    made.add_argument("--workers", type=_count, default=2, help="mutants judged at a time, each in a copy of its own")
    made.add_argument("--timeout", type=float, default=10.0, help="seconds a stage may take beyond 4 times its usual")
    made.add_argument("--room", action="append", choices=ROOMS, help="this room only; may be given again")
    made.add_argument("--out", type=Path, default=Path("out/mutation-sweep.json"), help="a .md goes beside it")
    return made


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return number


def say(line: str) -> None:
    """Progress, apart from the result."""
    print(line, file=sys.stderr, flush=True)


def control(pool: list[Worker], rooms: Sequence[str]) -> dict[str, dict[str, float]]:
    """Seconds of each stage on the package as it is, by room. Raises WorkerError where it does not pass them all."""
    seconds: dict[str, dict[str, float]] = {}

    def done(room: str, answer: dict[str, Any]) -> None:
        if answer["outcome"] != SURVIVED:
            said = f"{answer['outcome']} in stage {answer['stage']} by {answer['by']}: {answer['detail']}"
            raise WorkerError(f"{room} is not mutated, and is {said}; mend that first, or no kill would count")
        seconds[room] = answer["stages"]

    limits = dict.fromkeys(STAGES, FIRST_LIMIT)
    run_jobs(pool, [(room, Job(None, None, unit_tests(pool[0].root, room), limits)) for room in rooms], done)
    return seconds


class Sample:
    """The jobs of a sample in their order, while there is time, and what became of them.

    `seconds` are those of the control: they say how long is too long. `end` is a time of the monotonic clock, after
    which no mutant begins.
    """

    def __init__(
        self,
        root: Path,
        order: Sequence[Mutation],
        explained: Sequence[survivors.Explained],
        seconds: Mapping[str, Mapping[str, float]],
        timeout: float,
        *,
        size: int | None = None,
    ) -> None:
        self.size = min(size or len(order), len(order))
        self.end: float | None = None
        self.results: list[Result] = []
        self.wrong: list[str] = []
        self.discarded = 0
        self._root = root
        self._order = order
        self._explained = explained
        self._sources = {file: (root / file).read_text(encoding="utf-8") for file in {one.file for one in order}}
        self._limits = {
            room: {stage: timeout + 4 * stages.get(stage, 0.0) for stage in STAGES} for room, stages in seconds.items()
        }

    def jobs(self) -> Iterator[tuple[Judged, Job]]:
        """One job a mutant that compiles."""
        begun = 0
        for mutation in self._order:
            if begun == self.size or (self.end is not None and time.monotonic() > self.end):
                return
            made = self._made(mutation)
            if made is None:
                self.discarded += 1
                continue
            begun += 1
            job = Job(
                mutation.file,
                made.source,
                unit_tests(self._root, mutation.room, mutation.file),
                self._limits[mutation.room],
            )
            yield (mutation, made), job

    def done(self, judged: Judged, answer: dict[str, Any]) -> None:
        """Keep what became of a mutant. Raises WorkerError for what is not its doing."""
        mutation, made = judged
        if answer["outcome"] == "error":
            raise WorkerError(f"{mutation.file}: {answer['detail']}")
        survived = answer["outcome"] == SURVIVED
        entry = survivors.explanation(self._explained, mutation, made.becomes)
        if entry is not None and not survived:
            self.wrong.append(f"{entry}: {answer['outcome']} {answer['by']}".rstrip())
        result = Result(
            file=mutation.file,
            line=mutation.start[0],
            operator=mutation.operator,
            text=mutation.text,
            becomes=made.becomes,
            diff=made.diff,
            outcome=answer["outcome"],
            stage="" if survived else answer["stage"],
            by=answer["by"],
            detail=answer["detail"],
            seconds=round(sum(answer["stages"].values()), 3),
            why=entry.why if entry is not None and survived else None,
        )
        self.results.append(result)
        where = f"{result.file}:{result.line} {result.operator}"
        say(f"{len(self.results):5} {result.seconds:6.1f} s  {result.outcome:9}  {where}  {result.by}")

    def becomes(self, mutation: Mutation) -> str | None:
        """The mutant's line, as survivors.toml has it; None where it does not compile."""
        made = self._made(mutation)
        return None if made is None else made.becomes

    def _made(self, mutation: Mutation) -> Made | None:
        return make(mutation, self._sources[mutation.file])


def versions_now() -> dict[str, Any]:
    """What a score depends on, besides the seed."""
    return {
        "commit": _git("describe", "--always", "--abbrev=12", "--dirty"),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in VERSIONS},
    }


def _git(*arguments: str) -> str | None:
    """What git says of the repository; None where there is none."""
    try:
        done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    # An end that removes the copies.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except WorkerError as error:
        sys.exit(f"mutation sweep: {error}")
