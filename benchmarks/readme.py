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
BRIEF = "<!-- in brief: `make readme` writes this -->", "<!-- end of in brief -->"
MEASURED = "<!-- measured: `make readme` writes this -->", "<!-- end of measured -->"
OPTIMIZERS = {
    "adamw": "AdamW",
    "adamw_fused": "torch AdamW, fused",
    "bnb_adamw8bit": "bitsandbytes AdamW8bit",
    "adamw8bit": "AdamW8bit",
    "gefen": "Gefen",
}
# In the README: this model, and this layer. Everything else is in docs/results.md.
MODEL, LAYER = "llama3_8b", "14336x4096"
# At the top of the README, at the smallest number of tokens; then the largest model that any method trained.
FIRST = ("adamw", "bnb_adamw8bit", "forge_adamw_graph", "forge_gefen_graph")
STEPS = (
    fill(
        "Whole training steps through Lightning's `Trainer`, each method in a process of its own; random weights and "
        "tokens. A step's time is the median, peak memory what torch allocated; *of torch's* is the time as a part of "
        "torch's fused AdamW at the same number of tokens, with ≈ where that was measured in another run, on a host "
        "that may be quicker or slower. Where Gefen's slowest step takes a second, it learns in it, as it does after "
        "1, 4, 8, 16, ... steps.",
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
SHARDED = (
    fill(
        "An 8B-shaped Llama in bf16, sharded over the GPUs of one host: `forge_fsdp` and Lightning's FSDP2 strategy "
        "with torch's fused AdamW. Tokens are per rank and step; a step's time is the median over ranks, of methods "
        "that ran in turn, a few steps each in the same processes.",
        120,
    )
    + "\n"
)
SHARDED_ROWS = (
    fill(
        "By themselves, one after the other, methods differ by as much as hosts do; these rows are of before the last "
        "changes in docs/sharding.md. `forge_fsdp` gathers weights and exchanges factors by copies between devices. "
        "*Received* is what a rank receives of gradients in a step, counted, and in brackets as planned; *hidden* is "
        "the part of the time in NCCL's kernels and such copies during which others ran as well.",
        120,
    )
    + "\n"
)


def brief(root: Path = ROOT) -> str:
    """The few numbers at the top of the README; empty without a recorded run of its model."""
    path = root / "benchmarks" / "results" / f"bench_{MODEL}.csv"
    if not path.is_file():
        return ""
    rows = report.read(path)
    fewest = min(int(row["tokens"]) for row in rows if row["tokens"])
    order = {method: place for place, method in enumerate(FIRST)}
    first = [row for row in rows if row["method"] in order and row["tokens"] in (str(fewest), "")]
    first.sort(key=lambda row: order[row["method"]])
    text = f"A Llama of {int(rows[0]['parameters']) / 1e9:.1f} B parameters in bf16 on one {rows[0]['device']}:"
    parts = [text + "\n", report.summary(first)]
    if "≈" in parts[1]:
        parts.append("≈: measured in another run than torch's, on another host.\n")
    largest = root / "benchmarks" / "results" / "bench_largest.csv"
    if largest.is_file() and (good := [row for row in report.read(largest) if row["status"] == "ok"]):
        most = max(good, key=lambda row: int(row["parameters"]))
        size = f"{int(most['parameters']) / 1e9:.1f} B parameters"
        parts.append(
            f"The largest model trained there: {size}, with {most['label']}, {report.number(most['peak_gib'])} GiB. "
            "[All measurements](#measured).\n"
        )
    return "\n".join(parts)


def measured(root: Path = ROOT) -> str:
    """The README's section; empty without a recorded run of its model and without one of the kernels."""
    parts = []
    steps = root / "benchmarks" / "results" / f"bench_{MODEL}.csv"
    if steps.is_file():
        rows = report.read(steps)
        parts += [STEPS, report.summary(rows), report.caption(rows)]
        picture = f"docs/bench_{MODEL}_memory.png"
        parts.append(f"![Peak memory by method]({picture})\n")
    kernels = root / "benchmarks" / "results" / "kernels_h200.csv"
    if kernels.is_file():
        about, rows = read_kernels(kernels)
        parts += [KERNELS, kernel_table([row for row in rows if row["layer"] == LAYER]), losses(rows), about]
    sharded = root / "benchmarks" / "results" / "multigpu.csv"
    if sharded.is_file():
        parts += [SHARDED, sharded_summary(report.read(sharded))]
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
        pictures = [f"![]({path.stem}_{picture})" for picture in report.pictures(rows)]
        parts += [f"## {name}\n", report.table(rows), report.caption(rows), "\n".join(pictures) + "\n"]
    kernels = root / "benchmarks" / "results" / "kernels_h200.csv"
    if kernels.is_file():
        about, rows = read_kernels(kernels)
        parts += ["## Kernels\n", KERNELS, kernel_table(rows), losses(rows), about]
    sharded = root / "benchmarks" / "results" / "multigpu.csv"
    if sharded.is_file():
        rows = report.read(sharded)
        parts += ["## Sharded\n", SHARDED, sharded_summary(rows), SHARDED_ROWS, sharded_table(rows)]
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


def sharded_summary(rows: list[report.Cells]) -> str:
    """Of each method that ran in turn times, in brackets as parts of FSDP2's, and peaks; then what was checked."""
    turns = [row for row in rows if row["part"] == "turns" and row["result"] == "ran"]
    cells = {(*_of(row), row["tokens"], row["clip"]): f"{time} ({ratio})" for row, time, ratio in _times(turns)}
    peaks = {(*_of(row), row["tokens"]): row["peak_gib"] for row in rows if row["part"] == "speed" and not row["clip"]}
    cases = sorted({(int(row["tokens"]), row["clip"]) for row in turns}, key=lambda case: (case[1], case[0]))
    sizes = sorted({tokens for tokens, _ in cases})
    heads = [f"{tokens} tokens{', clipped' if clip else ''}: ms" for tokens, clip in cases]
    heads += [f"{tokens}: peak GiB per rank" for tokens in sizes]
    lines = ["| GPUs | method | " + " | ".join(heads) + " |", "| ---: | --- |" + " ---: |" * len(heads)]
    for ranks, name in dict.fromkeys(map(_of, turns)):
        line = [cells.get((ranks, name, str(tokens), clip), "-") for tokens, clip in cases]
        line += [peaks.get((ranks, name, str(tokens)), "-") for tokens in sizes]
        lines.append(f"| {ranks} | {name} | " + " | ".join(line) + " |")
    return "\n".join([*lines, "", *checks([row for row in rows if row["part"] not in ("speed", "turns")])]) + "\n"


def _of(row: report.Cells) -> tuple[str, str]:
    return row["ranks"], _name({**row, "clip": "", "by": ""})


def sharded_table(rows: list[report.Cells]) -> str:
    """Time, memory and traffic of methods by themselves."""
    lines = [
        "| GPUs | method, by itself | tokens | step ms | of FSDP2's | peak GiB/rank | received MB | hidden | loss |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row, time, ratio in _times([row for row in rows if row["part"] == "speed"]):
        if row["result"] != "ran":
            why = row["result"].removeprefix("failed: ")
            lines.append(f"| {row['ranks']} | {_name(row)} | | {why} | | | | | |")
            continue
        hidden = f"{float(row['hidden']):.0%}" if row["hidden"] else ""
        moved = f"{float(row['received_mb']):.0f} ({float(row['predicted_mb']):.0f})"
        cells = (row["ranks"], _name(row), row["tokens"], time, ratio, row["peak_gib"])
        lines.append("| " + " | ".join((*cells, moved, hidden, row["loss"])) + " |")
    return "\n".join(lines) + "\n"


def _times(rows: list[report.Cells]) -> Iterator[tuple[report.Cells, str, str]]:
    """Each row with its time, and that as a part of FSDP2's."""
    plain = {
        (row["ranks"], row["tokens"], row["clip"]): float(row["step_ms"])
        for row in rows
        if row["optimizer"] == "adamw_fused" and row["result"] == "ran"
    }
    for row in rows:
        if row["result"] != "ran":
            yield row, "", ""
            continue
        base = plain.get((row["ranks"], row["tokens"], row["clip"])) or plain.get((row["ranks"], row["tokens"], ""))
        time = float(row["step_ms"])
        yield row, f"{time:.0f}", f"{time / base:.2f}" if base else ""


def _name(row: report.Cells) -> str:
    ours = row["method"] != "fsdp2"
    words = [row["method"] if ours else "FSDP2", OPTIMIZERS[row["optimizer"]]]
    words += [row["route"]] if row["route"] != "auto" else []
    words += [f"by {row['by']}"] if ours and row["by"] else []
    return ", ".join(words + (["clipped"] if row["clip"] else []))


def checks(rows: list[report.Cells]) -> Iterator[str]:
    """One line for each check that went with the benchmark."""
    for row in rows:
        where = f"{row['ranks']} GPUs"
        if row["part"] == "equal":
            what = f"{row['route']}{', clipped' if row['clip'] else ''}: weights after 20 steps in float32"
            far = f", at most {float(row['difference']):.1e} apart" if row["difference"] else ""
            yield f"- {where} against one, {what}: {row['result']}{far}."
        elif row["part"] == "resume":
            yield f"- Saved on {where}, loaded on one, {OPTIMIZERS[row['optimizer']]}: {row['result']}."
        else:
            yield f"- One of {where} killed in a backward pass: {row['result']}, after {row['seconds']} s."
    for place in sorted({f"{row['device']}, torch {row['torch']}" for row in rows}):
        yield f"\n{place}; `python -m benchmarks.multigpu`"


def losses(rows: list[report.Cells]) -> str:
    """In how many cases the fused kernel is not the fastest."""
    slower = [row for row in rows if float(row["flat/fused"]) < 1]
    text = f"In {len(slower)} of {len(rows)} cases two kernels are faster than the fused one"
    cases = [f"{row['layer']} at {row['tokens']} tokens with {row['rule']}" for row in slower]
    return fill(text + (f": {'; '.join(cases)}" if cases else "") + ".", 120) + "\n"


def inserted(readme: str, section: str, markers: tuple[str, str] = MEASURED) -> str:
    """The README with the section between its markers."""
    begin, end = markers
    before, _, rest = readme.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"README.md has no markers {begin} and {end}.")
    return f"{before}{begin}\n{section}{end}{after}"


def draw(root: Path = ROOT) -> Iterator[Path]:
    """Write the plots of every recorded run beside the page."""
    for path in sorted((root / "benchmarks" / "results").glob("bench_*.csv")):
        yield from report.plots(report.read(path), root / "docs", prefix=f"{path.stem}_")


def main(root: Path = ROOT) -> None:
    """Write everything."""
    readme = root / "README.md"
    text = inserted(readme.read_text(encoding="utf-8"), measured(root))
    readme.write_text(inserted(text, brief(root), BRIEF), encoding="utf-8")
    page = results(root)
    if page:
        (root / "docs" / "results.md").write_text(page, encoding="utf-8")
    written = [path.name for path in draw(root)]
    print(f"README.md{', docs/results.md' if page else ''}{''.join(f', {name}' for name in written)}", file=sys.stderr)


if __name__ == "__main__":
    main()
