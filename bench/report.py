"""`python -m bench.report RESULTS.json [--out out/bench]`: one HTML page and PNG plots from a pytest-benchmark file.

`--figures FILE.md` writes the tables as Markdown as well.

Shows the headline (bytes and seconds over turns on log axes, both ways, fitted slopes and the crossover), a table with
relative columns, the other benches, and how and where it was measured.
"""

from __future__ import annotations

import argparse
import html
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.episode import exponent

WAYS = {"quadratic": "records to the driver", "server": "assembled on the server"}
COLORS = {"quadratic": "#c2410c", "server": "#0f766e"}
MEASURES = {
    "wire_bytes": ("Bytes on the wire", "MB", 1e6),
    "wall_s": ("Wall clock", "ms", 1e-3),
    "driver_cpu_s": ("Driver CPU", "ms", 1e-3),
    "server_cpu_s": ("Server CPU", "ms", 1e-3),
    "driver_peak_bytes": ("Driver peak memory", "MB", 1e6),
}

Series = dict[str, dict[int, float]]
"""way -> turns -> value."""


def headline(results: dict[str, Any]) -> dict[str, dict[str, Series]]:
    """shape -> measure -> way -> turns -> value in SI units."""
    table: dict[str, dict[str, Series]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for bench in results["benchmarks"]:
        info = bench["extra_info"]
        if info.get("bench") != "headline":
            continue
        for measure in MEASURES:
            table[info["shape"]][measure][info["way"]][info["turns"]] = info[measure]
    return table


def slope(points: dict[int, float]) -> float | None:
    """The growth exponent over the upper half of the sizes, where constants no longer hide it."""
    sizes = sorted(points)[len(points) // 2 - 1 :] if len(points) > 3 else sorted(points)
    return exponent(sizes, [points[size] for size in sizes]) if len(sizes) > 1 else None


def crossover(series: Series) -> str:
    """The smallest measured size from which on the server's way is the cheaper one."""
    quadratic, server = series.get("quadratic", {}), series.get("server", {})
    shared = sorted(quadratic.keys() & server.keys())
    losing = [size for size in shared if server[size] >= quadratic[size]]
    if not shared:
        return "not measured"
    if not losing:
        return f"below {shared[0]} turns"
    later = [size for size in shared if size > losing[-1]]
    return f"between {losing[-1]} and {later[0]} turns" if later else f"not up to {shared[-1]} turns"


def plot(shape: str, measure: str, series: Series, out: Path) -> str:
    """Write one PNG on log axes; its file name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    title, unit, scale = MEASURES[measure]
    figure, axes = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    for way, points in series.items():
        turns = sorted(points)
        fitted = slope(points)
        label = WAYS[way] + ("" if fitted is None else f" (slope {fitted:.2f})")
        axes.loglog(turns, [points[t] / scale for t in turns], "o-", color=COLORS[way], label=label)
    axes.set_xlabel("turns")
    axes.set_ylabel(unit)
    axes.set_title(f"{title}, {shape}")
    axes.set_xticks(turns, [str(t) for t in turns])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    name = f"{shape}-{measure}.png"
    figure.savefig(out / name, dpi=130)
    plt.close(figure)
    return name


Table = list[list[str]]
"""Rows of cells, the head first."""


def headline_table(measures: dict[str, Series]) -> Table:
    """One row a size: each measure of both ways, and how many times less the server's way takes."""
    turns = sorted({t for series in measures.values() for points in series.values() for t in points})
    head = ["turns"]
    for title, unit, _ in (MEASURES[m] for m in measures):
        head += [f"{title}: records, {unit}", f"server, {unit}", "ratio"]
    rows = [head]
    for t in turns:
        row = [str(t)]
        for measure, series in measures.items():
            scale = MEASURES[measure][2]
            before, now = series["quadratic"].get(t), series["server"].get(t)
            row += ["" if before is None else f"{before / scale:,.2f}", "" if now is None else f"{now / scale:,.2f}"]
            row.append(f"{before / now:,.1f}x" if before and now else "")
        rows.append(row)
    return rows


def other_table(results: dict[str, Any]) -> Table:
    """Every other bench by group: median, relative to the fastest of its group, and what it noted."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for bench in results["benchmarks"]:
        if bench["extra_info"].get("bench") != "headline":
            groups[bench["group"] or bench["name"]].append(bench)
    rows = [["group", "bench", "median ms", "relative", "notes"]]
    for group, benches in groups.items():
        best = min(bench["stats"]["median"] for bench in benches)
        for bench in benches:
            median = bench["stats"]["median"]
            notes = ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in bench["extra_info"].items()
                if key != "bench"
            )
            name = bench["name"].removeprefix("test_")
            rows.append([group, name, f"{median * 1e3:.3f}", f"{median / best:.2f}x", notes])
    return rows


def html_table(table: Table) -> str:
    """The table in HTML."""
    rows = [(("th" if at == 0 else "td"), row) for at, row in enumerate(table)]
    body = "".join(
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>" for tag, row in rows
    )
    return f"<table>{body}</table>"


def markdown_table(table: Table) -> str:
    """The table in Markdown."""
    head, *rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    return "\n".join([head, "|" + "---|" * len(table[0]), *rows])


def machine_of(results: dict[str, Any]) -> str:
    """When and where the results were measured."""
    machine = results["machine_info"]
    cpu = machine["cpu"]
    return (
        f"{results['datetime'][:19]} on {cpu.get('brand_raw', machine['processor'])}, {cpu.get('count')} cores, "
        f"{machine['system']} {machine['release']}, Python {machine['python_version']}"
    )


HOW = """Each size is checked for equal samples before it is timed, and both ways run on the same session in the same
run: compare ratios, not seconds. Slopes are fitted over the upper half of the sizes."""


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #1c1917; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.2rem; font-size: 1.2rem; }
table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .55rem; text-align: right; border-bottom: 1px solid #e7e5e4; } th { color: #57534e; }
.plots { display: flex; flex-wrap: wrap; gap: .5rem; } .plots img { width: 530px; max-width: 100%; }
.lead { font-size: 1.1rem; } .scroll { overflow-x: auto; } code { background: #f5f5f4; padding: 0 .25rem; }
"""


def lead_sentence(shape: str, measures: dict[str, Series]) -> str:
    """What the largest size says, in one sentence."""
    wire, wall = measures["wire_bytes"], measures["wall_s"]
    top = max(wire["quadratic"].keys() & wire["server"].keys())
    fewer, faster = wire["quadratic"][top] / wire["server"][top], wall["quadratic"][top] / wall["server"][top]
    slopes = [slope(wire[way]) or 0.0 for way in ("quadratic", "server")]
    return (
        f"At {top} turns ({shape}) assembly on the server sends {fewer:,.0f} times fewer bytes and takes {faster:,.0f} "
        f"times less time; bytes grow with turns to the power {slopes[1]:.2f} instead of {slopes[0]:.2f}. "
        f"Crossover in time: {crossover(wall)}."
    )


def render(results: dict[str, Any], out: Path) -> Path:
    """Write index.html and the plots into `out`; the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for shape, measures in headline(results).items():
        images = "".join(f'<img src="{plot(shape, m, series, out)}" alt="{m}">' for m, series in measures.items())
        lead = html.escape(lead_sentence(shape, measures))
        parts.append(f"<h2>Collecting an episode: {shape}</h2><p class=lead>{lead}</p>")
        parts.append(f"<div class=plots>{images}</div><div class=scroll>{html_table(headline_table(measures))}</div>")
    page = f"""<!doctype html><meta charset="utf-8"><title>miles_ref benches</title><style>{STYLE}</style>
<h1>miles_ref: what a collected episode costs</h1>
<p>{html.escape(machine_of(results))}. {HOW}</p>
{"".join(parts)}
<h2>Turns, stages, sessions, calls</h2><div class=scroll>{html_table(other_table(results))}</div>
<h2>Repeat it</h2><p><code>make bench</code>, then <code>make bench-report</code>; two runs are compared with
<code>make bench-compare BASE=a.json NEW=b.json</code>.</p>"""
    path = out / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def markdown(results: dict[str, Any]) -> str:
    """The same figures as a page of docs/, without the plots."""
    parts = ["# Figures", f"{machine_of(results)}. {HOW}"]
    for shape, measures in headline(results).items():
        parts += [f"## Collecting an episode: {shape}", lead_sentence(shape, measures)]
        parts.append(markdown_table(headline_table(measures)))
    parts += ["## Turns, stages, sessions, calls", markdown_table(other_table(results)), "## Repeat it"]
    parts.append(
        "`make bench`, then `make bench-report` for a page with plots; `make bench-report "
        'ARGS="--figures docs/figures.md"` writes this one. Two runs are compared with '
        "`make bench-compare BASE=a.json NEW=b.json`."
    )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--figures", type=Path, help="also write the tables to this Markdown file")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    print(render(results, args.out))
    if args.figures:
        args.figures.write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()
