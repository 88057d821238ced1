"""A run's table in Markdown and its plots, made from the CSV alone."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

Cells = dict[str, str]


def read(path: Path) -> list[Cells]:
    """The lines of a results file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(rows: Sequence[Cells], baseline: str = "adamw") -> str:
    """One Markdown table; times also as a part of the baseline's at the same number of tokens.

    Lines without numbers say why.
    """
    parts = _parts(rows, baseline)
    lines = [
        "| method | tokens | step ms (fastest to slowest) | of torch's | GPU busy ms | kernels | tokens/s "
        "| peak GiB | reserved GiB | loss at step |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row["status"] != "ok":
            lines.append(f"| {row['label']} | {row['tokens'] or '-'} | {row['status']} | | | | | | | |")
            continue
        time = f"{number(row['step_ms'])} ({number(row['step_ms_low'])} to {number(row['step_ms_high'])})"
        cells = [
            row["label"],
            row["tokens"],
            time,
            parts.get((row["method"], row["tokens"]), "-"),
            number(row["gpu_busy_ms"]),
            number(row["kernels"]),
            number(row["tokens_per_s"]),
            number(row["peak_gib"]),
            number(row["reserved_gib"]),
            f"{float(row['loss']):.3f} at {row['loss_step']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Cells], baseline: str = "adamw") -> str:
    """One line per method: time, as a part of the baseline's in brackets, and peak memory at each number of tokens."""
    counts = sorted({row["tokens"] for row in rows if row["tokens"]}, key=int)
    cells, parts = {(row["method"], row["tokens"]): row for row in rows}, _parts(rows, baseline)
    heads = [head for count in counts for head in (f"{count} tokens: ms (of torch's)", "peak GiB")]
    lines = [f"| method | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for method, label in dict.fromkeys((row["method"], row["label"]) for row in rows):
        line = [label]
        for count in counts:
            row = cells.get((method, count))
            if row is None or row["status"] != "ok":
                failed = cells.get((method, "")) if row is None else row
                line += [failed["status"] if failed else "-", "-"]
                continue
            part = parts.get((method, count))
            line += [number(row["step_ms"]) + (f" ({part})" if part else ""), number(row["peak_gib"])]
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines) + "\n"


def _parts(rows: Sequence[Cells], baseline: str) -> dict[tuple[str, str], str]:
    """Of each method and number of tokens its time as a part of the baseline's; "≈" where that is of another run."""
    base = {row["tokens"]: row for row in rows if row["method"] == baseline and row["step_ms"]}
    parts = {}
    for row in rows:
        if row["step_ms"] and row["tokens"] in base:
            other = base[row["tokens"]]
            part = f"{float(row['step_ms']) / float(other['step_ms']):.2f}"
            parts[row["method"], row["tokens"]] = part if row["command"] == other["command"] else f"≈ {part}"
    return parts


def number(text: str) -> str:
    """Three significant digits, without an exponent; a dash for what was not measured."""
    if not text:
        return "-"
    value = float(text)
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def caption(rows: Sequence[Cells]) -> str:
    """Model, device, versions and command of the rows, in Markdown."""
    row = next((row for row in rows if row["status"] == "ok"), rows[0])
    versions = [f"{name} {row[name]}" for name in ("torch", "triton", "lightning", "transformers") if row[name]]
    packages = sorted({r["package"] for r in rows if r["package"]} - {f"torch {row['torch']}"})
    others = [package for package in packages if not package.startswith("torch ")]
    size = f"{int(row['parameters']) / 1e9:.2f} B parameters, " if row["parameters"] else ""
    driver = f", driver {row['driver']}" if row["driver"] else ""
    micro = row.get("accumulate_grad_batches", "1")  # files of before this was a column have one
    micro = f"{micro} micro-batches a step, " if micro != "1" else ""
    commands = "; ".join(f"`{command}`" for command in dict.fromkeys(row["command"] for row in rows))
    return (
        f"{row['model']}: {size}{micro}{row['precision']}; {row['device']}{driver}; {', '.join([*versions, *others])}; "
        f"{row['date'].split(' ')[0]}; {commands}\n"
    )


def pictures(rows: Sequence[Cells]) -> list[str]:
    """Names of the plots that `plots` makes: over tokens only where there is more than one number of them."""
    good = [row for row in rows if row["status"] == "ok"]
    memory = ["memory.png"] if any(row["peak_gib"] for row in good) else []
    several = len({row["tokens"] for row in good}) > 1
    return memory + (["time_over_tokens.png", "memory_over_tokens.png"] if several else [])


def plots(rows: Sequence[Cells], folder: Path, prefix: str = "") -> list[Path]:
    """Memory over methods, and time and memory over tokens, as PNG; names begin with `prefix`."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = pictures(rows)
    if not names:
        return []
    good = [row for row in rows if row["status"] == "ok"]
    tokens = sorted({int(row["tokens"]) for row in good})
    made = []
    colors = colormaps["tab20"].colors  # type: ignore[attr-defined]
    if "memory.png" in names:
        fewest = min(int(row["tokens"]) for row in good if row["peak_gib"])
        first = [row for row in good if int(row["tokens"]) == fewest and row["peak_gib"]]
        first.sort(key=lambda row: float(row["peak_gib"]))
        figure = Figure(figsize=(7, 0.32 * len(first) + 1.2), layout="constrained")
        axes = figure.add_subplot(xlabel=f"peak GiB at {fewest} tokens per step")
        bars = axes.barh(
            [row["label"] for row in first],
            [float(row["peak_gib"]) for row in first],
            color=["C0" if row["method"].startswith("forge") else "0.6" for row in first],
        )
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        made.append(folder / f"{prefix}memory.png")
        figure.savefig(made[-1], dpi=130)
    for name, column, words in (
        ("time_over_tokens.png", "step_ms", "step ms"),
        ("memory_over_tokens.png", "peak_gib", "peak GiB"),
    ):
        if name not in names:
            continue
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="tokens per step", ylabel=words)
        for index, method in enumerate(dict.fromkeys(row["method"] for row in good)):
            points = [(int(r["tokens"]), float(r[column])) for r in good if r["method"] == method and r[column]]
            label = next(row["label"] for row in good if row["method"] == method)
            style = "-o" if method.startswith("forge") else "--s"
            if points:
                axes.plot(
                    *zip(*sorted(points), strict=True), style, label=label, markersize=4, color=colors[index % 20]
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(count) for count in tokens])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        made.append(folder / f"{prefix}{name}")
        figure.savefig(made[-1], dpi=130)
    return made


def write(results: Path) -> None:
    """Write ``table.md`` and, with matplotlib (extra ``plot``), the plots beside a results file."""
    rows = read(results)
    (results.parent / "table.md").write_text(caption(rows) + "\n" + table(rows), encoding="utf-8")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("No plots: they need matplotlib (pip install 'lightning-memopt[plot]').")
        return
    plots(rows, results.parent)
