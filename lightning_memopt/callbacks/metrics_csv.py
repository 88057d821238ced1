"""The metrics that Lightning's CSV logger writes: kept over a resume, and drawn at the end."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

Row = dict[str, Any]


class KeepMetrics(pl.Callback):
    """Keeps one ``metrics.csv`` over a resume.

    The CSV logger starts an empty file with every run. This callback puts the rows so far into each
    checkpoint and writes them back when training resumes from it, so the file always tells the whole story of
    the weights. Lightning logs a batch after its last hook, so a checkpoint saved in that hook
    (``every_n_train_steps``) lacks the row of its own batch.
    """

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the rows so far under ``metrics_rows``."""
        logger = csv_logger(trainer)
        if logger is not None and trainer.is_global_zero:
            checkpoint["metrics_rows"] = read_rows(logger)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the checkpoint's rows before those of this run."""
        logger = csv_logger(trainer)
        if trainer.state.fn == TrainerFn.FITTING and logger is not None and trainer.is_global_zero:
            logger.experiment.metrics[:0] = checkpoint.get("metrics_rows", [])
            logger.save()


class LossPlot(pl.Callback):
    """Draws ``loss.png`` from the CSV logger's metrics when training ends; needs matplotlib (extra ``plot``).

    Args:
        metrics: Which metrics to draw over the step.
        filename: Name of the picture, in the logger's folder.
    """

    def __init__(self, metrics: tuple[str, ...] = ("train_loss", "val_loss"), filename: str = "loss.png") -> None:
        self.metrics = tuple(metrics)
        self.filename = filename
        self._warned = False

    @rank_zero_only
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the picture, or say once why not."""
        logger = csv_logger(trainer)
        if logger is None:
            self._warn("LossPlot draws what a CSVLogger wrote, and this run has none.")
            return
        rows = read_rows(logger)
        curves = {name: curve(rows, name) for name in self.metrics}
        curves = {name: points for name, points in curves.items() if points}
        if not curves:
            self._warn(f"LossPlot: none of {', '.join(self.metrics)} was logged, so there is nothing to draw.")
            return
        try:
            from matplotlib.figure import Figure
        except ImportError:
            self._warn("LossPlot needs matplotlib: pip install 'lightning-memopt[plot]'.")
            return
        # Figure without pyplot: no display is needed and no global state is left behind.
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 30 else None, markersize=3)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(Path(logger.log_dir) / self.filename, dpi=150)

    def _warn(self, message: str) -> None:
        if not self._warned:
            rank_zero_warn(message)
            self._warned = True


def csv_logger(trainer: pl.Trainer) -> CSVLogger | None:
    """The trainer's first CSV logger."""
    return next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)


def read_rows(logger: CSVLogger) -> list[Row]:
    """All rows logged so far, numbers as numbers, empty cells left out."""
    logger.save()
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [
            {key: int(float(cell)) if key in ("step", "epoch") else float(cell) for key, cell in row.items() if cell}
            for row in csv.DictReader(file)
        ]


def curve(rows: list[Row], name: str) -> list[tuple[int, float]]:
    """Pairs of step and value of one metric, in the order logged."""
    return [(row["step"], row[name]) for row in rows if name in row]
