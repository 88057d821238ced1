"""The scalars of a step for every parameter: computed once on the host, copied once to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_memopt.kernels.rounding import parameter_key, step_key

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot

# Floats in a parameter's row: the common scalars and the longest rule's, with room to spare. A multiple of 16 bytes.
ROW = 16


class StepScalars:
    """Learning rates, bias corrections, clip values and rounding keys of one step.

    Rows lie in one float32 table [parameters, ROW] at a fixed address, keys in an int32 vector and non-finite flags in
    another, so that kernels (and CUDA graphs of them) read whatever the current step put there. On the CPU there are no
    tables: the reference reads the host's float64 values.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.table: Tensor | None = None
        self.keys: Tensor | None = None
        self.nonfinite: Tensor | None = None
        self._places: list[tuple[Tensor, Tensor, Tensor]] = []  # one of each for every parameter

    def fill(self, slots: Sequence[Slot], seed: int, step: int, clip: float | None) -> None:
        """Compute every slot's scalars for the update about to be taken and start their copy to the device.

        Parameters of one group with equal step counts share their scalars, so the arithmetic is done a few times only.
        """
        cache: dict[tuple[object, ...], Mapping[str, float]] = {}
        shared = step_key(seed, step)
        for slot in slots:
            sparse, state = getattr(slot, "sparse", None), slot.state
            group = slot.group if sparse is None else sparse.scaled(slot.group)
            key = (id(slot.group), group["lr"], slot.mean, *slot.rule.cache_key(state))
            scalars = cache.get(key)
            if scalars is None:
                scale = -slot.mean if slot.group.get("maximize") else slot.mean
                common = {"scale": scale, "clip": float("inf") if clip is None else clip}
                common |= slot.rule.common_scalars(group)
                scalars = cache[key] = common | slot.rule.scalars(group, state)
            slot.scalars = scalars
            slot.key = parameter_key(shared, slot.name)
        if self.device.type == "cuda" and slots:
            self._upload(slots)

    def _upload(self, slots: Sequence[Slot]) -> None:
        if self.table is None or len(self.table) < len(slots):
            self.table = torch.zeros(len(slots), ROW, dtype=torch.float32, device=self.device)
            self.keys = torch.zeros(len(slots), dtype=torch.int32, device=self.device)
            self.nonfinite = torch.zeros(len(slots), dtype=torch.int32, device=self.device)
            self._places = list(zip(self.table.unbind(), self.keys.unbind(), self.nonfinite.unbind(), strict=True))
        assert self.keys is not None and self.nonfinite is not None
        # Few parameters have scalars of their own.
        numbers: dict[int, int] = {}
        distinct: list[list[float]] = []
        which, keys = [], []
        for slot, (row, row_key, nonfinite) in zip(slots, self._places, strict=False):
            slot.row, slot.row_key, slot.nonfinite = row, row_key, nonfinite
            number = numbers.setdefault(id(slot.scalars), len(distinct))
            if number == len(distinct):
                values = list(slot.scalars.values())
                distinct.append(values + [0.0] * (ROW - len(values)))
            which.append(number)
            keys.append(slot.key - (1 << 32) if slot.key >> 31 else slot.key)  # the same 32 bits as a signed number
        # Pinned memory comes from torch's caching allocator, which waits for the copy before it is used again.
        rows = torch.tensor(distinct, dtype=torch.float32)[torch.tensor(which)]
        self.table[: len(rows)].copy_(rows.pin_memory(), non_blocking=True)
        self.keys[: len(keys)].copy_(torch.tensor(keys, dtype=torch.int32).pin_memory(), non_blocking=True)
        self.nonfinite.zero_()

    def scale(self, coefficient: Tensor) -> None:
        """Multiply every gradient of the step by a 0-dimensional tensor on the device (the clip coefficient)."""
        if self.table is not None:
            self.table[:, 0] *= coefficient
