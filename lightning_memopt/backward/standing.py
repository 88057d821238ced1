"""Updates that are handed to the kernels step after step, for as long as they would be built the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot
    from lightning_memopt.kernels import Update


class Standing:
    """The updates of an optimizer's parameters, and what they were built from.

    Between steps schedules switch moments on, checkpoints replace state entries, and weights move (``param.data = …``).
    So all that an update is built from is compared at the start of every backward pass, for all parameters in one go:
    between two of the engine's nodes, what the host looks at first has to come from memory, and takes several times as
    long. An update becomes its slot's `Slot.update`.

    Args:
        slots: The parameters, none of them sparse.
        build: Makes an update of one.
    """

    def __init__(self, slots: Sequence[Slot], build: Callable[[Slot], Update]) -> None:
        self.slots, self._build = list(slots), build
        self._known: list[Any] | None = None
        self._held: list[Any] = []
        self._tensors: list[Tensor] = []

    def check(self) -> None:
        """See to it that every slot has an update that is right but for the scalars of the step."""
        if self._known is None or self._facts() != self._known:
            self._renew()

    def _renew(self) -> None:
        for slot in self.slots:
            slot.update = self._build(slot)
            slot.update.standing = True
            slot.placed = _mine(slot.param).data_ptr()
        entries = [(slot, *item) for slot in self.slots for item in slot.state.items()]
        self._held = [value for *_, value in entries]  # so that an id stays one object's
        kept = [value for slot, key, value in entries if key not in slot.rule.counts]
        self._tensors = [_mine(value) for value in kept if isinstance(value, Tensor)]
        self._known = self._facts()

    def _facts(self) -> list[Any]:
        slots, state_of = self.slots, self.slots[0].optimizer.state if self.slots else {}
        params = [_mine(slot.param) for slot in slots]
        states = [state_of[slot.param] for slot in slots]
        return [
            [(param.data_ptr(), param.dtype, param.shape, param.stride()) for param in params],
            [id(state) for state in states],
            [id(value) for state in states for value in state.values()],
            [tensor.data_ptr() for tensor in self._tensors],
            [id(slot.row) for slot in slots],  # with it go key and flag
            [slot.tile for slot in slots],
            [slot.storage for slot in slots],
            [slot.scalars["l2"] != 0.0 for slot in slots],
        ]


def _mine(tensor: Tensor) -> Tensor:
    """What a DTensor holds on this rank, or the tensor itself, in the least time."""
    rows: Tensor = getattr(tensor, "_local_tensor", tensor)
    return rows
