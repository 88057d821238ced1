"""Puts the recorded measurements into README.md and docs/results.md: ``make readme``.

Everything between the markers in README.md, all of docs/results.md and the plots beside it come from the CSV files in
benchmarks/results. A file that is not there leaves its section out.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from lightning_memopt.bench import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: `make readme` writes this -->", "<!-- end of measured -->"
# In the README: this model, and this layer. Everything else is in docs/results.md.
MODEL, LAYER = "llama3_8b", "14336x4096"
STEPS = (
    fill(
        "Whole training steps through Lightning's `Trainer`, each method in a process of its own; random weights and "
        "tokens. A step's time is the median, peak memory what torch allocated; *of torch's* is the time as a part of "
        "torch's fused AdamW at the same number of tokens.",
        120,
    )
    + "\n"
)
KERNELS = (
    fill(
        "One layer's weight gradient and optimizer step, in ms: the matmul alone; its limit, the larger of the matmul "
        "and the memory traffic; torch's matmul and fused optimizer; the matmul and our kernel; our one fused kernel.",
        120,
    )
    + "\n"
)


def measured(root: Path = ROOT) -> str:
    """The README's section; empty without a recorded run of its model and without one of the kernels."""
    parts = []
    steps = root / "benchmarks" / "results" / f"bench_{MODEL}.csv"
    if steps.is_file():
        rows = report.read(steps)
        parts += [STEPS, report.table(rows), report.caption(rows)]
        picture = f"docs/bench_{MODEL}_memory.png"
        parts.append(f"![Peak memory by method]({picture})\n")
    kernels = root / "benchmarks" / "results" / "kernels_h200.csv"
    if kernels.is_file():
        about, rows = read_kernels(kernels)
        parts += [KERNELS, kernel_table([row for row in rows if row["layer"] == LAYER]), losses(rows), about]
    if not parts:
        return ""
    more = "All models and layers: [`docs/results.md`](docs/results.md).\n"
    return "\n## Measured\n\n" + "\n".join([*parts, more]) + "\n"


def results(root: Path = ROOT) -> str:
    """The page with every recorded table; empty without any."""
    parts = []
    for path in sorted((root / "benchmarks" / "results").glob("bench_*.csv")):
        rows = report.read(path)
        name = path.stem.removeprefix("bench_")
        pictures = [f"![]({path.stem}_{kind}.png)" for kind in ("memory", "time_over_tokens", "memory_over_tokens")]
        parts += [f"## {name}\n", report.table(rows), report.caption(rows), "\n".join(pictures) + "\n"]
    kernels = root / "benchmarks" / "results" / "kernels_h200.csv"
    if kernels.is_file():
        about, rows = read_kernels(kernels)
        parts += ["## Kernels\n", KERNELS, kernel_table(rows), losses(rows), about]
    if not parts:
        return ""
    return "\n".join(
        ["# Recorded measurements\n", "Written by `make readme` from `benchmarks/results/`.\n", STEPS, *parts]
    )


def read_kernels(path: Path) -> tuple[str, list[report.Cells]]:
    """The comment line that says where and how, and the rows."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(file)
    comments = [line.lstrip("# ").strip() for line in lines if line.startswith("#")]
    return " ".join(comments) + "\n", list(csv.DictReader(line for line in lines if not line.startswith("#")))


def kernel_table(rows: list[report.Cells]) -> str:
    """All rows, with the ratios that matter."""
    columns = ["layer", "tokens", "rule", "matmul", "limit", "torch", "flat", "fused", "fused/limit", "torch/fused"]
    columns.append("flat/fused")
    lines = ["| " + " | ".join(columns) + " |", "| --- | ---: | --- |" + " ---: |" * (len(columns) - 3)]
    lines += ["| " + " | ".join(_cell(column, row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(column: str, text: str) -> str:
    if column in ("layer", "tokens", "rule"):
        return text
    return (f"{float(text):.2f}" if "/" in column else f"{float(text):.3f}") if text else "-"


def losses(rows: list[report.Cells]) -> str:
    """In how many cases the fused kernel is not the fastest."""
    slower = [row for row in rows if float(row["flat/fused"]) < 1]
    text = f"In {len(slower)} of {len(rows)} cases two kernels are faster than the fused one"
    cases = [f"{row['layer']} at {row['tokens']} tokens with {row['rule']}" for row in slower]
    return fill(text + (f": {'; '.join(cases)}" if cases else "") + ".", 120) + "\n"


def inserted(readme: str, section: str) -> str:
    """The README with the section between its markers."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"README.md has no markers {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n{section}{END}{after}"


def draw(root: Path = ROOT) -> Iterator[Path]:
    """Write the plots of every recorded run beside the page."""
    for path in sorted((root / "benchmarks" / "results").glob("bench_*.csv")):
        yield from report.plots(report.read(path), root / "docs", prefix=f"{path.stem}_")


def main(root: Path = ROOT) -> None:
    """Write everything."""
    readme = root / "README.md"
    readme.write_text(inserted(readme.read_text(encoding="utf-8"), measured(root)), encoding="utf-8")
    page = results(root)
    if page:
        (root / "docs" / "results.md").write_text(page, encoding="utf-8")
    written = [path.name for path in draw(root)]
    print(f"README.md{', docs/results.md' if page else ''}{''.join(f', {name}' for name in written)}", file=sys.stderr)


if __name__ == "__main__":
    main()
