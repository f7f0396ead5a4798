"""Workers: each has a copy of the repository and a fork server in it; the working tree is never written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock
from typing import Any

from .mutations import ROOMS

COPIED = ("miles_ref", "tests", "conftest.py", "pyproject.toml")
SERVER = Path("tests/golden/mutants/sweep/forkserver.py")
UNIT = {room: (room,) for room in ROOMS} | {"trajectory": ("trajectory", "server")}
"""The folders of tests/unit that judge each room."""

STAGES = ("start", "import", "data cases", "unit tests", "http cases")
FIRST_LIMIT = 300.0
"""Seconds for a stage while it is not known how long it takes."""


@dataclass(frozen=True)
class Job:
    """What a fork server judges; without a file, the package as it is."""

    file: str | None
    source: str | None
    unit: list[str]
    limits: Mapping[str, float]


def unit_tests(root: Path, room: str, file: str | None = None) -> list[str]:
    """The unit tests of a room; first those named after the file, then those that name its module."""
    module = "" if file is None else Path(file).stem

    def distance(path: Path) -> tuple[bool, bool, str]:
        named = f"miles_ref.{room}.{module} " in path.read_text(encoding="utf-8")
        return path.stem != f"test_{module}", not named, str(path)

    folders = [root / "tests" / "unit" / folder for folder in UNIT[room]]
    found = sorted((path for folder in folders for path in folder.rglob("test_*.py")), key=distance)
    return [path.relative_to(root).as_posix() for path in found]


class WorkerError(Exception):
    """A fork server that does not start, or that ended."""


class Worker:
    """A fork server, and what speaks to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._log = root / "tmp" / "forkserver.log"
        self._log.parent.mkdir()
        # Blas threads would take the cores of the other workers; the hash seed decides the order of sets.
        fixed = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(root / SERVER), str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            text=True,
            cwd=root,
            env={**os.environ, **fixed, "PYTHONPATH": str(root), "TMPDIR": str(root / "tmp")},
        )

    def start(self) -> Mapping[str, Any]:
        """Wait until it takes jobs; how many cases it has. Raises WorkerError."""
        return self._ask({"unit": sorted({path for room in ROOMS for path in unit_tests(self.root, room)})})

    def judge(self, job: Job) -> dict[str, Any]:
        """The answer to one job. Raises WorkerError."""
        return self._ask(asdict(job))

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError) as error:
            raise WorkerError(f"the fork server in {self.root} is gone: {error}") from error
        if not line:
            log = self._log.read_text(encoding="utf-8", errors="replace")
            raise WorkerError(f"the fork server in {self.root} ended with {self._process.wait()}: {log[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it: it ends its own child when its input does."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                stream.close()
        self._process.wait()


@contextmanager
def workers(repository: Path, count: int) -> Iterator[list[Worker]]:
    """Workers that are ready, in copies that are removed at the end."""
    with TemporaryDirectory(prefix="mutation-sweep-") as folder:
        started: list[Worker] = []
        try:
            for number in range(count):
                # All are copies of the first: the working tree may be edited meanwhile.
                copy = Path(folder).resolve() / f"worker-{number}"
                copy_repository(started[0].root if started else repository, copy)
                started.append(Worker(copy))
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(Worker.start, started))
            yield started
        finally:
            for worker in started:
                worker.close()


def copy_repository(source: Path, target: Path) -> None:
    """Copy what the tests of the rooms need, without compiled files: a mutant of the same size in the same second would
    be taken for what was compiled before it."""
    target.mkdir()
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source / name, target / name)
    # Modules compiled by a hash of their source, which is looked at whenever one is imported.
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", str(target / "miles_ref")],
        check=True,
    )


def run_jobs(pool: list[Worker], jobs: Iterable[tuple[Any, Job]], done: Callable[[Any, dict[str, Any]], None]) -> None:
    """Give each worker the next job, until there is none; `done` gets the job's tag and the answer, one at a time."""
    lock = Lock()
    stop = Event()
    queue = iter(jobs)

    def work(worker: Worker) -> None:
        while True:
            with lock:
                tag, job = (None, None) if stop.is_set() else next(queue, (None, None))
            if job is None:
                return
            answer = worker.judge(job)
            with lock:
                done(tag, answer)

    with ThreadPoolExecutor(len(pool)) as threads:
        try:
            for future in as_completed([threads.submit(work, worker) for worker in pool]):
                future.result()
        finally:
            stop.set()
