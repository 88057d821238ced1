"""The scalars of a step for every parameter: computed once on the host, copied once to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_memopt.kernels.rounding import name_hashes, parameter_keys, step_key

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot

# Floats in a parameter's row: the common scalars and the longest rule's, with room to spare. A multiple of 16 bytes.
ROW = 16


class StepScalars:
    """Learning rates, bias corrections, clip values and rounding keys of one step.

    Rows lie in one float32 table [parameters, ROW] at a fixed address, followed by int32 vectors of keys and of
    non-finite flags, so that kernels (and CUDA graphs of them) read whatever the current step put there. On the CPU
    there are no tables: the reference reads the host's float64 values.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.table: Tensor | None = None
        self.keys: Tensor | None = None
        self.nonfinite: Tensor | None = None
        self._places: list[tuple[Tensor, Tensor, Tensor]] = []  # one of each for every parameter
        self._all = torch.empty(0, dtype=torch.int32, device="cpu")
        self._names: list[str] = []
        self._hashes = name_hashes([])

    def fill(self, slots: Sequence[Slot], seed: int, step: int, clip: float | None) -> None:
        """Compute every slot's scalars for the update about to be taken and start their copy to the device.

        Parameters of one group with equal step counts share their scalars, so the arithmetic is done a few times only.
        """
        names = [slot.name for slot in slots]
        if names != self._names:
            self._names, self._hashes = names, name_hashes(names)
        keys = parameter_keys(step_key(seed, step), self._hashes)
        states = [slot.state for slot in slots]
        groups = [slot.group if slot.sparse is None else slot.sparse.scaled(slot.group) for slot in slots]
        counted = slots[0].rule.cache_keys(states) if slots else []
        # Few parameters have scalars of their own: those from whose group, factor and counts no other's follow.
        numbers: dict[tuple[object, ...], int] = {}
        distinct: list[dict[str, float]] = []
        which: list[int] = []
        for slot, group, counts, key in zip(slots, groups, counted, keys.tolist(), strict=True):
            number = numbers.setdefault((id(slot.group), group["lr"], slot.mean, counts), len(distinct))
            if number == len(distinct):
                scale = -slot.mean if group.get("maximize") else slot.mean
                common = {"scale": scale, "clip": float("inf") if clip is None else clip}
                own = slot.rule.scalars(group, states[len(which)])
                distinct.append(common | slot.rule.common_scalars(group) | own)
            slot.scalars, slot.key = distinct[number], key
            which.append(number)
        if self.device.type == "cuda" and slots:
            rows = [[*scalars.values(), *[0.0] * (ROW - len(scalars))] for scalars in distinct]
            table = torch.tensor(rows, dtype=torch.float32, device="cpu")
            self._upload(slots, table[torch.tensor(which, device="cpu")], keys)

    def _upload(self, slots: Sequence[Slot], rows: Tensor, keys: Tensor) -> None:
        """Copy float32 rows and int64 keys to the device, in one transfer; flags of non-finite gradients begin at 0."""
        count, room = len(slots), 0 if self.table is None else len(self.table)
        if self.table is None or room < count:
            room = count
            self._all = torch.zeros(room * (ROW + 2), dtype=torch.int32, device=self.device)
            self.table, self.keys, self.nonfinite = _parts(self._all, room)
            self._places = list(zip(self.table.unbind(), self.keys.unbind(), self.nonfinite.unbind(), strict=True))
        for slot, (row, row_key, nonfinite) in zip(slots, self._places, strict=False):
            slot.row, slot.row_key, slot.nonfinite = row, row_key, nonfinite
        # Pinned memory comes from torch's caching allocator, which waits for the copy before it is used again.
        host = torch.zeros(self._all.shape, dtype=torch.int32, device="cpu", pin_memory=self._all.is_cuda)
        table, row_keys, _ = _parts(host, room)
        table[:count] = rows
        row_keys[:count] = keys  # the same 32 bits as a signed number
        self._all.copy_(host, non_blocking=True)

    def scale(self, coefficient: Tensor) -> None:
        """Multiply every gradient of the step by a 0-dimensional tensor on the device (the clip coefficient)."""
        if self.table is not None:
            self.table[:, 0] *= coefficient


def _parts(memory: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows, keys and flags of `count` parameters in int32 `memory`."""
    rows, keys, flags = memory.split([count * ROW, count, count])
    return rows.view(torch.float32).view(count, ROW), keys, flags
