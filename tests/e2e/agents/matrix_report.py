"""`python -m tests.e2e.agents.matrix_report`: run the abort matrix and write a JSON report of its cells.

Exit status 0 only if every cell that can occur was run and showed what the life cycle tables say, and every other cell
says why it cannot occur.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.agents.matrix import Cell, cells, expected
from tests.e2e.agents.matrix_run import complaints, run_cell, workers


def main() -> None:
    """Run all cells in a few processes, and put their lines together."""
    flags = argparse.ArgumentParser(prog="python -m tests.e2e.agents.matrix_report", description=__doc__)
    flags.add_argument("--out", type=Path, default=Path("abort-matrix.json"))
    flags.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    flags.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    options = flags.parse_args()
    possible = [cell for cell in cells() if cell.impossible() is None]
    if options.shard is not None:
        asyncio.run(_run_shard(possible[options.shard :: options.processes]))
        return
    rows = _run_shards(options.processes)
    report = _report(rows)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['run']} cells run, {report['impossible']} cannot occur, {len(report['failed'])} failed, "
          f"{len(report['absent'])} absent: {options.out}")  # fmt: skip
    sys.exit(0 if not report["failed"] and not report["absent"] else 1)


def _run_shards(processes: int) -> dict[str, dict[str, Any]]:
    """Cells of one process run one after the other: an abort of every scope takes all calls of its process."""
    command = [sys.executable, "-m", "tests.e2e.agents.matrix_report", "--processes", str(processes), "--shard"]
    shards = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(processes)]
    rows: dict[str, dict[str, Any]] = {}
    for shard in shards:
        output, _ = shard.communicate()
        for line in output.splitlines():
            row = json.loads(line)
            rows[row["cell"]] = row
    return rows


async def _run_shard(mine: list[Cell]) -> None:
    async with workers() as shared:
        for cell in mine:
            wanted = expected(cell)
            try:
                async with asyncio.timeout(120):
                    result = await run_cell(cell, shared)
            except Exception as exc:
                row: dict[str, Any] = {"cell": cell.id, "wrong": [f"the cell did not end: {exc!r}"]}
            else:
                row = {"cell": cell.id, **result.as_dict(), "wrong": complaints(cell, wanted, result)}
            print(json.dumps(row), flush=True)


def _report(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    everything: list[dict[str, Any]] = []
    absent = []
    for cell in cells():
        reason = cell.impossible()
        if reason is not None:
            everything.append({"cell": cell.id, "cannot_occur": reason})
        elif cell.id in rows:
            everything.append(rows[cell.id])
        else:
            absent.append(cell.id)
    failed = [row["cell"] for row in everything if row.get("wrong")]
    impossible = sum("cannot_occur" in row for row in everything)
    return {
        "run": len(everything) - impossible,
        "impossible": impossible,
        "failed": failed,
        "absent": absent,
        "cells": everything,
    }


if __name__ == "__main__":
    main()
