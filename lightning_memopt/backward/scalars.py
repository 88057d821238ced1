"""The scalars of a step for every parameter: computed once on the host, copied once to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        # Few parameters have scalars of their own: their number in `distinct`, by what they follow from.
        numbers: dict[tuple[object, ...], int] = {}
        distinct: list[Mapping[str, float]] = []
        which = []
        states = [slot.state for slot in slots]
        follow = slots[0].rule.cache_keys(states) if slots else []
        for slot, state, rule_key, rounding_key in zip(slots, states, follow, keys.tolist(), strict=True):
            slot.key = rounding_key
            sparse = getattr(slot, "sparse", None)
            group = slot.group if sparse is None else sparse.scaled(slot.group)
            key = (id(slot.group), group["lr"], slot.mean, rule_key)
            number = numbers.setdefault(key, len(distinct))
            if number == len(distinct):
                scale = -slot.mean if slot.group.get("maximize") else slot.mean
                common = {"scale": scale, "clip": float("inf") if clip is None else clip}
                distinct.append(common | slot.rule.common_scalars(group) | slot.rule.scalars(group, state))
            slot.scalars = distinct[number]
            which.append(number)
        if self.device.type == "cuda" and slots:
            self._upload(slots, distinct, which, keys)

    def _upload(
        self, slots: Sequence[Slot], distinct: Sequence[Mapping[str, float]], which: Sequence[int], keys: Tensor
    ) -> None:
        if self.table is None or len(self.table) < len(slots):
            self.table = torch.zeros(len(slots), ROW, dtype=torch.float32, device=self.device)
            self.keys = torch.zeros(len(slots), dtype=torch.int32, device=self.device)
            self.nonfinite = torch.zeros(len(slots), dtype=torch.int32, device=self.device)
            self._places = list(zip(self.table.unbind(), self.keys.unbind(), self.nonfinite.unbind(), strict=True))
        assert self.keys is not None and self.nonfinite is not None
        for slot, (row, row_key, nonfinite) in zip(slots, self._places, strict=False):
            slot.row, slot.row_key, slot.nonfinite = row, row_key, nonfinite
        rows = torch.tensor([[*scalars.values(), *[0.0] * (ROW - len(scalars))] for scalars in distinct])
        # Pinned memory comes from torch's caching allocator, which waits for the copy before it is used again.
        self.table[: len(slots)].copy_(rows[torch.tensor(which)].pin_memory(), non_blocking=True)
        # The same 32 bits as a signed number.
        self.keys[: len(slots)].copy_(keys.to(torch.int32).pin_memory(), non_blocking=True)
        self.nonfinite.zero_()

    def scale(self, coefficient: Tensor) -> None:
        """Multiply every gradient of the step by a 0-dimensional tensor on the device (the clip coefficient)."""
        if self.table is not None:
            self.table[:, 0] *= coefficient
