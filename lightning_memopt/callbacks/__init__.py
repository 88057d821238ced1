"""Callbacks for monitoring a run."""

from lightning_memopt.callbacks.grad_norm import GradNorm
from lightning_memopt.callbacks.memory_monitor import MemoryMonitor
from lightning_memopt.callbacks.metrics_csv import KeepMetrics, LossPlot
from lightning_memopt.callbacks.smet import SMET
from lightning_memopt.callbacks.throughput import Throughput

__all__ = ["SMET", "GradNorm", "KeepMetrics", "LossPlot", "MemoryMonitor", "Throughput"]
