"""Watch what memory is taken up by, and warn before it runs out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_memopt.backward.windows import held
from lightning_memopt.callbacks.throughput import GIB, peak_memory
from lightning_memopt.strategies.mixin import ForgeMixin

REMEDIES = {
    "weights": "train in precision='bf16-true', or shard them with strategy='forge_fsdp'",
    "optimizer_state": "use lightning_memopt.Gefen or AdamW8bit, or shard it with strategy='forge_fsdp'",
    "gradients": "use strategy='forge', accumulate fewer micro-batches, or leave out norm clipping",
    "activations": "use a smaller batch, or ForgeStrategy(checkpoint=[...])",
}


class Device(NamedTuple):
    """Bytes on a GPU.

    Attributes:
        allocated: Held by torch's tensors now.
        peak: The most that was since training began.
        available: What torch's tensors may grow to: all memory but what others hold.
    """

    allocated: int
    peak: int
    available: int


class MemoryMonitor(pl.Callback):
    """Logs the bytes by kind after each training batch, in GiB, and the peak in the progress bar.

    ``memory/weights``, ``memory/optimizer_state`` and ``memory/gradients`` (stored ones, and factors that wait for a
    step) are counted; each storage once. ``memory/activations`` is what is left of the peak: activations, logits and
    scratch. ``memory/peak`` is the most so far, ``memory/current`` what is held now; on a CPU the peak is that of the
    whole process, and what is held is the sum of the three.

    Warns once when less than `least_free` of a GPU was free at the peak, and names the largest kind and a remedy.

    Args:
        every_n_steps: Batches between two looks.
        least_free: Part of the GPU's memory below which to warn.
    """

    def __init__(self, every_n_steps: int = 1, least_free: float = 0.05) -> None:
        self.every_n_steps = every_n_steps
        self.least_free = least_free
        self._warned = False
        self._held = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start torch's peak anew."""
        self._warned = False
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gradients and factors are most now."""
        if trainer.global_step % self.every_n_steps == 0:
            self._held = size(_gradients(trainer, pl_module))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, and warn if it is time."""
        if batch_idx % self.every_n_steps:
            return
        kinds = {
            "weights": size([*pl_module.parameters(), *pl_module.buffers()]),
            "optimizer_state": size(_state(trainer)),
            "gradients": self._held,
        }
        device = on_device(pl_module.device)
        if device is not None:
            kinds["activations"] = max(0, device.peak - sum(kinds.values()))
        current = device.allocated if device is not None else sum(kinds.values())
        peak = device.peak if device is not None else peak_memory(pl_module.device)
        pl_module.log_dict({f"memory/{kind}": value / GIB for kind, value in kinds.items()})
        pl_module.log("memory/current", current / GIB)
        if peak is not None:
            pl_module.log("memory/peak", peak / GIB, prog_bar=True)
        if device is not None and device.peak > (1 - self.least_free) * device.available and not self._warned:
            self._warned = True
            largest = max(kinds, key=lambda kind: kinds[kind])
            free = max(0, device.available - device.peak)
            rank_zero_warn(
                f"Only {free / GIB:.2f} of {device.available / GIB:.1f} GiB were free at the peak. Most is "
                f"{largest} ({kinds[largest] / GIB:.1f} GiB): {REMEDIES[largest]}."
            )


def on_device(device: torch.device) -> Device | None:
    """What a GPU holds; None for other devices."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    windows = held(device)
    others = total - free - torch.cuda.memory_reserved(device) - windows
    allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return Device(allocated + windows, peak + windows, total - others)


def size(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors among the values on this device, each storage once; of sharded ones, this device's part."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            local = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _state(trainer: pl.Trainer) -> list[Any]:
    return [value for opt in trainer.optimizers for state in opt.state.values() for value in state.values()]


def _gradients(trainer: pl.Trainer, module: pl.LightningModule) -> list[Any]:
    held: list[Any] = [param.grad for param in module.parameters()]
    if isinstance(trainer.strategy, ForgeMixin):
        for slot in trainer.strategy.updater.slots.values():
            held += [slot.buffer, slot.grad, *(part for pair in slot.factors for part in pair)]
    return held
