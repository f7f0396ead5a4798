"""`python -m tests.golden.oracle.compare`: the oracle and the package on seeded random cases that nobody thought of.

For every kind and version that `generate` knows the same number of cases is made; the oracle says what to expect, and
the package is judged by it, as by any case. Where both refuse they agree: a random case may have several faults, and
which of them comes first is not pinned; how often another one is named is counted apart. Disagreements are written as
case files, which `miles-ref check FILE` runs.
This module alone of the oracle's folder imports the package.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_ref.testing.cases import parse_case
from miles_ref.testing.check import judge
from miles_ref.testing.propose import dump
from miles_ref.testing.targets import ReferenceTarget

from . import run_case
from .generate import generate

STAGES = [(version, kind) for version in ("v1", "v2") for kind in ("assemble", "encode", "decode", "match")]
SEEDS_APART = 10_000_000
"""The case numbers of one seed begin so far behind those of the one before."""
CHUNK = 250
"""Cases that a process takes at a time."""
MOST_FILES = 20
SHOWN = 30
"""Characters of a long value that a message shows at least."""


@dataclass(frozen=True)
class Chunk:
    """Some cases of one stage, by their numbers."""

    version: str
    kind: str
    numbers: range

    @property
    def stage(self) -> str:
        return f"{self.version}/{self.kind}"


@dataclass(frozen=True)
class Compared:
    """What a chunk gave: the cases that disagree, and the number of refusals that name another fault."""

    disagreeing: list[dict[str, Any]]
    named_otherwise: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the counts in one line; 1 when there is a disagreement."""
    options = parser().parse_args(arguments)
    counts: Counter[str] = Counter()
    disagreeing: list[dict[str, Any]] = []
    named_otherwise = 0
    work = list(chunks(options.seed, options.count))
    for chunk, result in zip(work, results(work, options.processes), strict=True):
        counts[chunk.stage] += len(chunk.numbers)
        disagreeing += result.disagreeing
        named_otherwise += result.named_otherwise
    shown = disagreeing[:MOST_FILES]
    for path, case in zip(write(shown, options.out), shown, strict=True):
        print(f"{case['id']}: {case['why']}\n  {path}")
    print(summary(counts, disagreeing, named_otherwise))
    return 1 if disagreeing else 0


def results(work: Sequence[Chunk], processes: int) -> Iterator[Compared]:
    """What each chunk gives, in order; with one process, in this one."""
    if processes == 1:
        yield from map(compare, work)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(compare, work)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m tests.golden.oracle.compare", description=__doc__)
    made.add_argument("--seed", type=int, default=0, help="another seed gives other cases")
    made.add_argument("--count", type=int, default=100_000, help="cases, over all stages")
    made.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one a core")
    made.add_argument("--out", type=Path, default=Path("out/oracle-compare"), help="folder of the disagreements")
    return made


def chunks(seed: int, count: int) -> Iterator[Chunk]:
    """`count` cases, as evenly over the stages as it goes, in pieces of one stage."""
    first = seed * SEEDS_APART
    for at, (version, kind) in enumerate(STAGES):
        numbers = range(first, first + count // len(STAGES) + (at < count % len(STAGES)))
        for start in range(0, len(numbers), CHUNK):
            yield Chunk(version, kind, numbers[start : start + CHUNK])


def compare(chunk: Chunk) -> Compared:
    """Judge the package by the oracle on each case of a chunk."""
    target = ReferenceTarget()
    disagreeing = []
    named_otherwise = 0
    for number in chunk.numbers:
        case = expected_case(chunk.kind, chunk.version, number)
        verdict = judge(parse_case(case), target)
        if verdict.bad and case["expect"].get("mentions"):
            mentions, case["expect"]["mentions"] = case["expect"]["mentions"], []
            verdict = judge(parse_case(case), target)
            named_otherwise += not verdict.bad
            case["expect"]["mentions"] = mentions
        if verdict.bad:
            why = f"The package differs from the oracle: {'; '.join(verdict.details)[:300]}"
            disagreeing.append({**case, "why": why})
    return Compared(disagreeing, named_otherwise)


def expected_case(kind: str, version: str, number: int) -> dict[str, Any]:
    """A random case with what the oracle expects, as it reads back from its file."""
    case = generate(kind, version, number)
    try:
        case["expect"] = run_case(case)
    except Exception as error:
        raise RuntimeError(
            f"the oracle itself fails on generate({kind!r}, {version!r}, {number}): {error!r}"
        ) from error
    if "mentions" in case["expect"]:
        # What a message says of null is "null" or "None", and of a long value its beginning.
        mentions = [mention[:SHOWN] for mention in case["expect"]["mentions"] if mention not in ("None", "null")]
        case["expect"]["mentions"] = mentions
    read: dict[str, Any] = json.loads(json.dumps(case))
    return read


def write(cases: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write each case to a file of its own, named after its id; those of an earlier run, and no others, are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("v[12]-*-random-*.json"):
        old.unlink()
    paths = []
    for case in cases:
        paths.append(folder / f"{case['id'].replace('/', '-')}.json")
        paths[-1].write_text(dump(case) + "\n", encoding="utf-8")
    return paths


def summary(counts: Counter[str], disagreeing: Sequence[dict[str, Any]], named_otherwise: int) -> str:
    """One line: cases compared in all and by stage, how many disagree, how many refusals name another fault."""
    bad = Counter(f"{case['version']}/{case['kind']}" for case in disagreeing)
    stages = ", ".join(
        f"{stage} {count}" + (f" ({bad[stage]} disagree)" if bad[stage] else "") for stage, count in counts.items()
    )
    verdict = f"{len(disagreeing) or 'none'} disagree, {named_otherwise or 'no'} refusals name another fault"
    return f"{counts.total()} cases compared ({stages}): {verdict}"


if __name__ == "__main__":
    sys.exit(main())
