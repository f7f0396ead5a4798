"""``python -m tests.golden.oracle FILE...``: runs cases, prints failures and one line of totals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from . import verdict


def main(paths: list[str]) -> int:
    """Runs every file (a folder stands for the JSON files in it); 0 when all cases hold."""
    passed = failed = 0
    for name in paths:
        path = Path(name)
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            loaded = json.loads(file.read_text(encoding="utf-8"))
            for case in loaded if isinstance(loaded, list) else [loaded]:
                problem = verdict(case)
                passed += problem is None
                failed += problem is not None
                if problem is not None:
                    print(f"FAIL {case['id']}: {problem[:600]}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
