"""How well sparse training learns: dense, static, dynamic without warm-up, SMET, and the loss around its updates.

``python -m benchmarks.smet_learning`` trains a small byte-level Llama on the standard library's sources, once for each
method, density and seed, on the same batches, and writes

    benchmarks/results/smet_learning.csv   final validation loss and loss jump, by method and density
    benchmarks/results/smet_learning.md    the same as a table
    benchmarks/results/smet_updates.csv    loss around topology updates
    docs/smet.png                          both as a plot

Runs that ``--cache`` holds are not repeated, so the script may be stopped and started again; ``--report-only`` writes
table and plot from what is there. The loss around updates is compared with that of the static run on the same batches:

    excess(k) = mean over updates u and seeds of d(u + k) - mean of d(u - 9 .. u),   d(t) = loss(t) - static loss(t)

which removes the noise of the batches and the trend of training. The table gives its mean over the 30 steps after an
update, and the standard deviation of that over seeds. (A cold start is not over in one step: under a constant gradient,
Adam's step without bias correction grows to 6.6 learning rates at the twelfth.) A spike is a mean beyond twice its
standard error.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

import lightning_memopt as memopt
from lightning_memopt.data import TextDataModule
from lightning_memopt.models import LlamaModule

ROOT = Path(__file__).resolve().parent.parent
METHODS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "static": {"prune_fraction": 0.0},
    "no warm-up": {"bias_correction": "step", "warmup_steps": 0},
    "SMET": {},
    "SMET gradient": {"growth": "gradient"},
}
LABELS = {"no warm-up": "no warm-up, no ages", "SMET": "SMET", "SMET gradient": "SMET, growth by gradient"}
BEFORE, AFTER = 20, 40  # steps around an update
SPAN = 30  # steps after it that the table gives the mean of


class Losses(pl.Callback):
    """The training loss of every step."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(outputs["loss"].detach().float())


def train(method: str, density: float, seed: int, gpu: int, options: argparse.Namespace) -> dict[str, Any]:
    pl.seed_everything(seed, verbose=False)
    module = LlamaModule(
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        num_heads=options.hidden_size // 32,
        max_seq_len=options.seq_len,
        optimizer=partial(torch.optim.AdamW, lr=options.lr, betas=(0.9, 0.999), weight_decay=0.1),
        warmup_steps=options.steps // 20,
    )
    data = TextDataModule(seq_len=options.seq_len, batch_size=options.batch_size, seed=seed)
    losses = Losses()
    callbacks: list[pl.Callback] = [losses]
    if (settings := METHODS[method]) is not None:
        settings = {"update_every": options.update_every, "warmup_steps": options.warmup_steps, "seed": seed} | settings
        callbacks.append(memopt.SMET(density, **settings))
    trainer = pl.Trainer(
        strategy="forge",
        accelerator=options.accelerator,
        devices=1 if options.accelerator == "cpu" else [gpu],
        precision=options.precision,
        max_steps=options.steps,
        limit_val_batches=options.val_batches,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, data)
    return {
        "method": method,
        "density": density,
        "seed": seed,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "losses": torch.stack(losses.values).tolist(),
    }


def runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every run, from the cache where it is there."""
    # Seed by seed, so that a run that is stopped early still compares all methods.
    cells = {
        (method, density, seed): options.cache / f"{method.replace(' ', '_')}-{density:g}-{seed}.json"
        for seed in range(options.seeds)
        for method in METHODS
        for density in ((1.0,) if method == "dense" else options.densities)
    }
    if not options.report_only:
        options.cache.mkdir(parents=True, exist_ok=True)
        # Each job has a process of its own: a small model leaves most of a GPU, and of a many-core CPU, to others.
        if options.accelerator == "auto":
            options.accelerator = "gpu" if torch.cuda.is_available() else "cpu"
        gpus = itertools.cycle(range(torch.cuda.device_count() or 1))
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=1) as pool:
            waiting = {
                pool.submit(train, *cell, next(gpus), options): (cell, path)
                for cell, path in cells.items()
                if not path.exists()
            }
            for future in as_completed(waiting):
                cell, path = waiting[future]
                path.write_text(json.dumps(future.result()))
                print("{:>10} density {:g} seed {}: {val_loss:.4f}".format(*cell, **future.result()), flush=True)
    return [json.loads(path.read_text()) for path in cells.values() if path.exists()]


def excess(found: Sequence[dict[str, Any]], method: str, density: float, every: int) -> list[list[float]]:
    """Excess loss at steps -BEFORE .. AFTER around updates, one list per seed."""
    by_key = {(run["method"], run["density"], run["seed"]): run["losses"] for run in found}
    result = []
    for seed in sorted({run["seed"] for run in found}):
        mine, static = by_key.get((method, density, seed)), by_key.get(("static", density, seed))
        if mine is None or static is None:
            continue
        d = [a - b for a, b in zip(mine, static, strict=True)]
        last = 0.75 * len(d)  # SMET's default `stop_at`
        updates = [u for u in range(every, len(d), every) if u < last and BEFORE <= u <= len(d) - AFTER]
        if not updates:
            continue
        # Losses are numbered from 0: step u, after which the update comes, is d[u - 1].
        curves = [
            [d[u - 1 + k] - statistics.fmean(d[u - 10 : u]) for k in range(1 - BEFORE, AFTER + 1)] for u in updates
        ]
        result.append([statistics.fmean(column) for column in zip(*curves, strict=True)])
    return result


def report(found: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Tables and plot."""
    results = options.results
    results.mkdir(parents=True, exist_ok=True)
    cells = dict.fromkeys((run["method"], run["density"]) for run in found)
    rows, curves = [], {}
    for method, density in sorted(cells, key=lambda cell: (-cell[1], list(METHODS).index(cell[0]))):
        values = [run["val_loss"] for run in found if (run["method"], run["density"]) == (method, density)]
        around = excess(found, method, density, options.update_every) if method in LABELS else []
        means = [statistics.fmean(curve[BEFORE : BEFORE + SPAN]) for curve in around]
        if around:
            curves[method, density] = [statistics.fmean(column) for column in zip(*around, strict=True)]
        rows.append(
            {
                "method": method,
                "density": density,
                "seeds": len(values),
                "val_loss": round(statistics.fmean(values), 4),
                "val_loss_sd": round(statistics.stdev(values), 4) if len(values) > 1 else "",
                "excess": round(statistics.fmean(means), 5) if means else "",
                "excess_sd": round(statistics.stdev(means), 5) if len(means) > 1 else "",
            }
        )
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items() if value != ""))
    write(results / "smet_learning.csv", rows)
    (results / "smet_learning.md").write_text(table(rows))
    points = [
        {"method": m, "density": d, "step": k, "excess": round(v, 5)}
        for (m, d), curve in curves.items()
        for k, v in zip(range(1 - BEFORE, AFTER + 1), curve, strict=True)
    ]
    write(results / "smet_updates.csv", points)
    plot(curves, rows, options.plot)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `report` in Markdown."""
    lines = [f"| density | method | final validation loss | mean excess over {SPAN} steps after updates | seeds |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in rows:
        loss, jump = (
            f"{float(row[key]):.4f}" + (f" ± {float(row[f'{key}_sd']):.4f}" if row[f"{key}_sd"] != "" else "")
            if row[key] != ""
            else ""
            for key in ("val_loss", "excess")
        )
        lines.append(f"| {float(row['density']):g} | {row['method']} | {loss} | {jump} | {row['seeds']} |")
    return "\n".join(lines) + "\n"


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def plot(curves: dict[tuple[str, float], list[float]], rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    densities = sorted({density for _, density in curves}, reverse=True)
    figure, panels = plt.subplots(
        1, len(densities) + 1, figsize=(4 * (len(densities) + 1), 3.6), layout="constrained", squeeze=False
    )
    for axes, density in zip(panels[0], densities, strict=False):
        for method in LABELS:
            if (method, density) in curves:
                axes.plot(range(1 - BEFORE, AFTER + 1), curves[method, density], label=LABELS[method])
        axes.axvline(0.5, color="grey", linewidth=0.8, linestyle=":")
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set(title=f"density {density:g}", xlabel="steps after a topology update", ylabel="excess loss (nats)")
        axes.legend(frameon=False, fontsize=8)
    axes = panels[0][-1]
    names = [row["method"] + ("" if row["density"] == 1 else f" {row['density']:g}") for row in rows]
    spread = [row["val_loss_sd"] or 0.0 for row in rows]
    axes.errorbar([row["val_loss"] for row in rows], range(len(rows)), xerr=spread, fmt="o", capsize=3)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set(title="final validation loss", xlabel="nats per byte")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--update-every", type=int, default=100)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--val-batches", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "smet_learning")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "smet.png")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args(arguments)
    report(runs(options), options)


if __name__ == "__main__":
    main()
