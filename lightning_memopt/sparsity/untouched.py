"""That nobody else overwrites masks and ages of sparse weights, as code does that zeroes optimizer states.

Which weights are active is known nowhere else, so what was overwritten cannot be brought back. torch counts the writes
into every tensor on the host: comparing these counts asks no device. Writes through ``tensor.data`` it does not count,
and a tensor may be replaced: of these a mask tells by how many weights it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_memopt.errors import UpdateError
from lightning_memopt.sparsity.bits import MASK, count
from lightning_memopt.sparsity.state import COHORT, INDEX

if TYPE_CHECKING:
    from lightning_memopt.sparsity.layer import SparseLayer


class Untouched:
    """Masks and ages as they were when last noted."""

    def __init__(self) -> None:
        self._owners: list[tuple[str, str]] = []  # entry and parameter; a message is made of them only if it is raised
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []

    def note(self, layers: Iterable[SparseLayer]) -> None:
        """Take what there is now for right."""
        self.forget()
        for layer in layers:
            # Not `Slot.state`, which makes one for a parameter that was taken out of the optimizer.
            state = layer.slot.optimizer.state.get(layer.slot.param, {})
            for entry in (MASK, INDEX, COHORT):
                if entry in state and not state[entry].is_inference():  # whose writes are not counted
                    self._owners.append((entry, layer.slot.name))
                    self._tensors.append(state[entry])
        self._versions = _versions(self._tensors)

    def check(self) -> None:
        """Compare.

        Raises:
            UpdateError: Something was written to since.
        """
        versions = _versions(self._tensors)
        if versions != self._versions:
            known = zip(self._owners, versions, self._versions, strict=True)
            raise _lost(*next(owner for owner, now, then in known if now != then))

    def forget(self) -> None:
        """Let go of the tensors."""
        self._owners, self._tensors, self._versions = [], [], []


def check_count(layer: SparseLayer) -> None:
    """See to it that a mask has as many active weights as its state is of; waits for the device.

    Raises:
        UpdateError: It has not.
    """
    if count(layer.bits, layer.shard.count) != layer.own:
        raise _lost(MASK, layer.slot.name)


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _lost(entry: str, name: str) -> UpdateError:
    return UpdateError(
        f"SMET: {entry} of {name} was written to in the optimizer's state, so which weights are active, or how old "
        "they are, is lost. To begin moments anew do not zero all of a state; optimizer.state.clear() keeps the masks."
    )
