"""The ages of a step for every sparse weight: computed once on the host, copied once to where kernels read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_memopt.kernels.active import Ages
from lightning_memopt.kernels.sparse import has_triton

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot


class StepAges:
    """Ramps and bias corrections of one step, by the age of weights.

    On a GPU every sparse weight has a table (`kernels.sparse_arguments.ages_table`) at a place of its own, which stays
    for as long as there are as many of them. Weights that are alike have equal tables, but need not remain alike. So
    kernels, and CUDA graphs of them, read whatever the current step put there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = torch.empty(0, device=device)

    def fill(self, slots: Sequence[Slot]) -> None:
        """Compute `Slot.ages` of the sparse ones among `slots` for the update about to be taken; start their copy.

        Args:
            slots: Of one optimizer, whose `Slot.scalars` are those of the step already.
        """
        sparse = [slot for slot in slots if slot.sparse is not None]
        if not sparse:
            return
        numbers: dict[tuple[Any, ...], int] = {}
        distinct: list[tuple[Ages, str, Mapping[str, float]]] = []
        which: list[int] = []
        for slot in sparse:
            assert slot.sparse is not None
            number = numbers.setdefault(slot.sparse.ages_key(), len(distinct))
            if number == len(distinct):
                distinct.append((slot.sparse.ages_of_step(), slot.tile, slot.scalars))
            slot.ages = replace(distinct[number][0])
            which.append(number)
        if self._read_by_kernels():
            from lightning_memopt.kernels.sparse_arguments import ages_table

            tables = torch.stack([ages_table(*one) for one in distinct])
            self._upload(sparse, tables, torch.tensor(which, device="cpu"))

    def _read_by_kernels(self) -> bool:
        """Whether there are kernels on this device; plain torch reads the host's float64 values."""
        return self.device.type == "cuda" and has_triton()

    def _upload(self, slots: Sequence[Slot], tables: Tensor, which: Tensor) -> None:
        """Copy each slot's table to the device, in one transfer: of the host's `tables` the one that `which` says."""
        count, width = len(slots), tables.shape[1]
        if self._memory.numel() < count * width:
            self._memory = torch.zeros(count * width, device=self.device)
        places = self._memory[: count * width].view(count, width)
        for slot, place in zip(slots, places.unbind(), strict=True):
            assert slot.ages is not None
            slot.ages.table = place
        # Pinned memory comes from torch's caching allocator, which waits for the copy before it is used again.
        host = torch.empty(count, width, device="cpu", pin_memory=places.is_cuda)
        torch.index_select(tables, 0, which, out=host)
        places.copy_(host, non_blocking=True)
