"""Mutants of the package itself, for what the oracle cannot play: http, worker, the laws, and reports of a tokenizer.

`<room>.toml` holds them as patches of miles_ref's source. Each is a patched copy of the package in a folder of its own,
put before the real one on the path of fresh interpreters, so that servers, workers and their children are mutated too.
A patch whose `old` text is no longer there is an error, so none goes stale unseen.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from miles_ref.testing.corpus import HEADINGS, SCHEMA
from tests.golden.mutants import GOLDEN, Mutant
from tests.golden.mutants import mutants as read_mutants

PACKAGE = GOLDEN.parent.parent / "miles_ref"
ROOMS = {"server": ("v1/http", "v2/http", "v2/mismatch"), "worker": ("worker",), "laws": ("v2/laws",)}
"""The folders of the cases that judge each room's mutants."""

# Short timeouts: a mutant that hangs fails all the same.
_RUN = """
import json, sys
from miles_ref.testing.cases import load_cases
from miles_ref.testing.check import judge
from miles_ref.testing.kinds import http, worker
from miles_ref.testing.targets import ReferenceTarget
http.TIMEOUT, http.UNTIL_TIMEOUT = 4.0, 3.0
worker.UNTIL_TIMEOUT, worker.REPLY_TIMEOUT, worker.GONE_TIMEOUT = 6.0, 30.0, 4.0
wanted = set(json.load(sys.stdin))
target = ReferenceTarget()
failed = [case.id for case in load_cases(sys.argv[1:]) if case.id in wanted and judge(case, target).bad]
print("failed:" + json.dumps(failed), flush=True)
try:
    target.close()
finally:
    import os
    os._exit(0)
"""


def mutants() -> list[Mutant]:
    """All mutants, by room."""
    return read_mutants(Path(__file__).parent)


def hand_cases(room: str | None = None) -> list[dict[str, Any]]:
    """The hand-made cases that judge a room's mutants, or those of all rooms."""
    cases: list[dict[str, Any]] = []
    for folder in _folders() if room is None else ROOMS[room]:
        for file in sorted((GOLDEN / folder).rglob("*.json")):
            cases += json.loads(file.read_text(encoding="utf-8"))
    return cases


def _folders() -> list[str]:
    return [folder for folders in ROOMS.values() for folder in folders]


@contextmanager
def patched(mutant: Mutant) -> Iterator[Path]:
    """A folder with the mutated package in it. Raises LookupError for a patch that no longer fits."""
    with TemporaryDirectory(prefix=f"mutant-{mutant.name}-") as folder:
        copy = Path(folder) / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "golden"))
        # Cases are read by the corpus' schema, which stands in the package where there is no repository around it.
        corpus = copy / "testing" / "golden"
        corpus.mkdir()
        for name in (SCHEMA, HEADINGS):
            shutil.copy(GOLDEN / name, corpus)
        for patch in mutant.patches:
            file = copy / patch.file
            source = file.read_text(encoding="utf-8")
            if patch.old not in source:
                raise LookupError(f"mutant {mutant.name}: {patch.file} no longer holds {patch.old!r}; write it anew")
            file.write_text(source.replace(patch.old, patch.new), encoding="utf-8")
        yield Path(folder)


def killers(mutant: Mutant, cases: Sequence[dict[str, Any]], timeout: float = 900.0) -> list[str]:
    """The ids of the cases that fail on the mutant. Raises RuntimeError for one that cannot even be imported."""
    ids = [case["id"] for case in cases]
    with patched(mutant) as folder:
        paths = [str(GOLDEN / folder) for folder in _folders()]
        done = subprocess.run(
            [sys.executable, "-c", _RUN, *paths],
            input=json.dumps(ids),
            env={**os.environ, "PYTHONPATH": str(folder)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        _end_what_is_left(folder)
    lines = [line for line in done.stdout.splitlines() if line.startswith("failed:")]
    if not lines:
        raise RuntimeError(f"mutant {mutant.name} could not be judged: {done.stderr[-2000:]}")
    failed: list[str] = json.loads(lines[-1].removeprefix("failed:"))
    return failed


def _end_what_is_left(folder: Path) -> None:
    """Kill the processes of a mutant that ends less than it should: some sleep for an hour."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join([*process.cmdline(), process.environ().get("PYTHONPATH", "")]):
                process.kill()
