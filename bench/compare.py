"""`python -m bench.compare BASE.json NEW.json [--threshold 1.25]`: exit 1 when the headline has become worse.

What is compared is the ratio between the two ways, each measured in one run on one session: a slower machine changes
both. The ratio of a run is the geometric mean over the sizes that both files have, so one noisy size decides nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from bench.report import MEASURES, Series, headline


def advantage(series: Series, sizes: list[int]) -> float:
    """How many times less the server's way takes, geometric mean over `sizes`."""
    logs = [math.log(series["quadratic"][t] / max(series["server"][t], 1e-9)) for t in sizes]
    return math.exp(sum(logs) / len(logs))


def comparable(series: Series) -> set[int]:
    """Sizes that were measured both ways."""
    return set(series["quadratic"]) & set(series["server"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=1.25, help="how many times smaller the advantage may get")
    args = parser.parse_args()
    base, new = (headline(json.loads(path.read_text())) for path in (args.base, args.new))
    worse = compared = 0
    for shape in base:
        for measure in ("wire_bytes", "wall_s", "driver_cpu_s"):
            sizes = sorted(comparable(base[shape][measure]) & comparable(new[shape][measure]))
            if not sizes:
                continue
            compared += 1
            before, now = advantage(base[shape][measure], sizes), advantage(new[shape][measure], sizes)
            fell = before / now
            worse += fell > args.threshold
            verdict = "WORSE" if fell > args.threshold else "ok"
            print(f"{shape:8} {MEASURES[measure][0]:20} advantage {before:9.1f}x -> {now:9.1f}x  {verdict}")
    if not compared:
        sys.exit("the two files have no headline size in common: nothing was compared")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
