"""Updates that are handed to the kernels step after step, for as long as they would be built the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot
    from lightning_memopt.kernels import Update


class Standing:
    """The last updates of some parameters, and what they were built from.

    Between steps schedules switch moments on, checkpoints replace state entries, and weights move (``param.data = …``).
    Comparing takes a fraction of the time of building updates and of what kernels look up by them.

    Args:
        slots: Parameters that are `entire`.
        updates: As built from these.
    """

    def __init__(self, slots: Sequence[Slot], updates: Sequence[Update]) -> None:
        self.slots, self._updates = list(slots), updates
        entries = [item for update in updates for item in update.state.items()]
        self._held = [value for _, value in entries]  # so that an id stays one object's
        counts = slots[0].rule.counts
        self._tensors = [value for key, value in entries if isinstance(value, Tensor) and key not in counts]
        self._known = self._facts()

    def _facts(self) -> list[Any]:
        """Lists, each over all slots: the host looks at a hundred small parameters in one go."""
        slots = self.slots
        params = [slot.param for slot in slots]
        states = [slot.optimizer.state[slot.param] for slot in slots]
        return [
            [(param.data_ptr(), param.dtype, param.shape, param.stride()) for param in params],
            [id(value) for state in states for value in state.values()],
            [tensor.data_ptr() for tensor in self._tensors],
            [(id(slot.row), id(slot.row_key), id(slot.nonfinite)) for slot in slots],
            [(slot.tile, slot.storage, slot.scalars["l2"] != 0.0) for slot in slots],
        ]

    def updates(self, coefficient: Tensor | None) -> Sequence[Update] | None:
        """The updates with the scalars of this step; None if others must be built."""
        if self._facts() != self._known:
            return None
        for slot, update in zip(self.slots, self._updates, strict=True):
            update.scalars, update.key, update.coefficient, update.standing = slot.scalars, slot.key, coefficient, True
        return self._updates
