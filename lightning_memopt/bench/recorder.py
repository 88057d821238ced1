"""The callback that measures a training run phase by phase."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_memopt.bench.job import GIB, Phase, Row
from lightning_memopt.callbacks.throughput import peak_memory


class Recorder(pl.Callback):
    """Sends a row after each phase. Times are from the end of one step to the end of the next, on the device's clock.

    Args:
        phases: What the steps are, see `lightning_memopt.bench.job.phases`.
        send: Called with a row of numbers for each measured phase, and for each profiled one with the two numbers that
            complete it.
        leave: Called when training ends, normally or not; with the exception and the tokens at which it came, if any.
        replays: Steps may replay a CUDA graph, which allocates at its capture only, so that the capture counts for the
            peak.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        send: Callable[[Row], None],
        leave: Callable[[BaseException | None, int | None], None],
        replays: bool = False,
    ) -> None:
        self.phases = list(phases)
        self.send, self.leave, self.replays = send, leave, replays
        self._at = 0
        self._marks: list[Any] = []
        self._first_peak: float | None = None
        self._profiler: Any = None
        self._cuda = False

    @property
    def phase(self) -> Phase:
        """The phase of the batch now running."""
        return self.phases[min(self._at, len(self.phases) - 1)]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start a phase with an empty cache, so that a peak owes nothing to the phase before."""
        self._cuda = pl_module.device.type == "cuda"
        if batch_idx == self.phase.start * trainer.accumulate_grad_batches and self._cuda and batch_idx:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of a step take the time, and at that of a phase everything else."""
        steps, micro_batches_left = divmod(batch_idx + 1, trainer.accumulate_grad_batches)
        if micro_batches_left:
            return
        phase = self.phase
        self._marks.append(self._mark())
        if steps == phase.measured_from:
            self._first_peak = self._peak(pl_module)
            if self._cuda and not self.replays:
                torch.cuda.reset_peak_memory_stats()
            self._marks = self._marks[-1:]
            if phase.profile:
                self._start_profiler()
        if steps == phase.last + 1:
            self.send(self._profiled(phase) if phase.profile else self._measured(phase, pl_module, outputs, steps))
            self._at += 1

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave before Lightning copies the whole model to the host."""
        self.leave(None, None)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave with what went wrong, and at how many tokens."""
        self.leave(exception, self.phase.tokens)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _durations(self) -> list[float]:
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return sorted(1e3 * (end - start) for start, end in pairs)
        torch.cuda.synchronize()
        return sorted(start.elapsed_time(end) for start, end in pairs)

    def _peak(self, module: pl.LightningModule) -> float | None:
        peak = peak_memory(module.device)
        return peak / GIB if peak is not None else None

    def _measured(self, phase: Phase, module: pl.LightningModule, outputs: Any, steps: int) -> Row:
        durations = self._durations()
        median = statistics.median(durations)
        row = Row(
            tokens=phase.tokens,
            step_ms=median,
            step_ms_low=durations[0],
            step_ms_high=durations[-1],
            steps=phase.steps,
            tokens_per_s=1e3 * phase.tokens / median,
            peak_gib=self._peak(module),
            first_peak_gib=self._first_peak,
            loss=float(outputs["loss"]) * module.trainer.accumulate_grad_batches,  # Lightning divides by it
            loss_step=steps,
            parameters=sum(p.numel() for p in module.parameters()),
        )
        if self._cuda:
            free, total = torch.cuda.mem_get_info()
            row.reserved_gib = torch.cuda.max_memory_reserved() / GIB
            row.device_gib = (total - free) / GIB
        return row

    def _start_profiler(self) -> None:
        torch.cuda.synchronize()
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()

    def _profiled(self, phase: Phase) -> Row:
        torch.cuda.synchronize()
        self._profiler.stop()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in self._profiler.events()
            # Annotations are spans of the host's code, drawn on the device's line.
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        )
        busy_us = covered(spans)
        return Row(tokens=phase.tokens, gpu_busy_ms=busy_us / 1e3 / phase.steps, kernels=len(spans) / phase.steps)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals, which come ordered by their start: streams may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
