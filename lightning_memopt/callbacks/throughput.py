"""Log how fast training goes and how much memory it takes."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_memopt.backward.windows import held

GIB = 2**30


class Throughput(pl.Callback):
    """Logs ``tokens_per_second`` (all devices) and ``memory_gib`` with every training batch.

    Speed is the mean over the last ``window`` batches, from the end of one batch to the end of the next,
    validation left out. Memory is the peak so far: allocated by torch on a GPU, resident in the process on a
    CPU (not logged on Windows, where the standard library cannot tell).

    Args:
        window: Batches to average over.
        batch_key: Which entry of the batch holds one element per token.
    """

    def __init__(self, window: int = 20, batch_key: str = "input_ids") -> None:
        self.window = window
        self.batch_key = batch_key
        self._batches: deque[tuple[float, int]] = deque(maxlen=window)
        self._mark = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, and torch's peak on a GPU."""
        self._batches.clear()
        self._mark = time.perf_counter()
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the validation run out of the next batch's time."""
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log both numbers; Lightning writes them out every ``log_every_n_steps``."""
        now = time.perf_counter()
        self._batches.append((now - self._mark, batch[self.batch_key].numel() * trainer.world_size))
        self._mark = now
        seconds = sum(duration for duration, _ in self._batches)
        tokens = sum(count for _, count in self._batches)
        pl_module.log("tokens_per_second", tokens / seconds, prog_bar=True)
        peak = peak_memory(pl_module.device)
        if peak is not None:
            pl_module.log("memory_gib", peak / GIB)


def peak_memory(device: torch.device) -> int | None:
    """Bytes at the peak: allocated on a GPU, resident in this process otherwise; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + held(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
