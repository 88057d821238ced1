"""What the kernels remember of a parameter from step to step, so that a step like the last need not be decided again.

Which kernel takes an update, in which configuration, and most of a launch's arguments follow from where weight and
state lie in memory and what they are. `facts` gathers these; while they stay as they were, `Memory.recall` finds the
launch that an equal gradient took before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning_memopt.kernels.update import Update

# A launch on other operands; False, with nothing done, if these need the ordinary way.
Repeat = Callable[..., bool]
# Kinds of gradients that are remembered: token counts, mostly.
CAPACITY = 64


@dataclass(slots=True, eq=False)
class Memory:
    """The launches of one parameter's updates."""

    _facts: tuple[Any, ...] = ()
    _held: tuple[Any, ...] = ()
    _state: int = 0
    _launches: dict[Hashable, Repeat] = field(default_factory=dict)

    def recall(self, update: Update, key: Hashable) -> Repeat | None:
        """The launch kept under `key`, if nothing that it depends on has changed since; else all are forgotten."""
        self.look(update)
        return self.get(key)

    def look(self, update: Update) -> bool:
        """Forget all launches if anything that they depend on has changed; returns whether there are any."""
        if not update.standing or update.compared != self._state:
            known, held = facts(update)
            if known != self._facts:
                self._facts, self._held = known, held
                self._launches.clear()
                self._state += 1
            update.compared = self._state
        return bool(self._launches)

    def get(self, key: Hashable) -> Repeat | None:
        """The launch kept under `key` for the update that was last looked at."""
        return self._launches.get(key)

    def keep(self, key: Hashable, launch: Repeat) -> None:
        """Remember a launch of the update that was last looked at."""
        if len(self._launches) >= CAPACITY:
            self._launches.clear()
        self._launches[key] = launch


def facts(update: Update) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """All that decides how an update is launched, besides its gradient; and objects that must outlive their ids."""
    weight, counts, held = update.weight, update.rule.counts, []
    known = [
        update.storage,
        update.tile,
        update.rounding,
        update.offset,
        update.active is None,
        update.scalars.get("l2") == 0.0,
        weight.data_ptr(),
        weight.shape,
        weight.stride(),
        weight.dtype,
    ]
    active = update.active
    mask = () if active is None else (active.bits, active.index, active.cohort)
    for tensor in (update.row, update.row_key, update.nonfinite, *mask):
        known.append(None if tensor is None else tensor.data_ptr())
    for key, value in update.state.items():
        # What a sparse weight counts reaches its kernels by the table of ages.
        if key in counts or not isinstance(value, Tensor):
            continue
        if value.is_cuda:
            known += (key, value.data_ptr(), value.shape, value.stride(), value.dtype)
        else:  # its value counts
            known += (key, id(value))
            held.append(value)
    return tuple(known), tuple(held)


def factors_key(dy: Tensor, x: Tensor, kernel: str) -> Hashable:
    """What the launch depends on of the factors of a gradient, besides what it looks at itself."""
    return kernel, x.shape[0], dy.dtype, x.dtype


def gradient_key(grad: Tensor, kernel: str) -> Hashable:
    """What the launch depends on of a stored gradient; Triton compiles another kernel for aligned ones."""
    return kernel, grad.dtype, grad.is_contiguous(), grad.data_ptr() % 16 == 0
