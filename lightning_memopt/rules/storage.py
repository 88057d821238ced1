"""How a moment is stored between steps: a name in the optimizer's state and a codec.

A rule computes on dense float tensors; a storage turns what the state holds into such a tensor and back. Only the
plain-torch reference decodes whole tensors; the kernels decode a tile at a time by the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.optim.shards import local, placed_as

# Rounds a float32 tensor to bf16 stochastically; None to round to nearest.
Rounder = Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Storage:
    """Base: a moment named `name` in the state, torch's own key for it.

    Attributes:
        dithered: Steps round it stochastically also where they round weights to nearest.
    """

    name: str
    dithered: ClassVar[bool] = False

    def entries(self) -> tuple[str, ...]:
        """Names of this moment's entries in the state."""
        return (self.name,)

    def create(self, param: Tensor) -> dict[str, Tensor]:
        """State entries for a parameter that has taken no step."""
        raise NotImplementedError

    def load(self, state: MutableMapping[str, Any], dtype: torch.dtype) -> Tensor:
        """The moment in compute precision, shaped like the weight; a fresh tensor or the stored one itself."""
        raise NotImplementedError

    def save(self, state: MutableMapping[str, Any], moment: Tensor, rounder: Rounder) -> None:
        """Write the updated moment back; nothing to do where `load` returned the stored tensor."""
        raise NotImplementedError

    def rows(self, state: MutableMapping[str, Any], start: int, stop: int) -> dict[str, Tensor]:
        """Views of the entries for rows [start, stop) of the weight."""
        return {self.name: state[self.name][start:stop]}

    def per_block(self) -> dict[str, int]:
        """Entries with an element for each block of weights, and how many weights are in a block."""
        return {}

    def compact(self, state: Mapping[str, Any], entries: slice, rows: slice) -> dict[str, Any]:
        """Of a sparse weight's state, views of the entries of some active weights, those of the rows `rows`.

        What is one element per active weight lies in [1, active]; what is per block, in a row for each row.
        """
        names = self.per_block()
        return {k: state[k][rows] if k in names else state[k][:, entries] for k in self.entries()}

    def shapes(self, param: Tensor) -> dict[str, Sequence[int]]:
        """Of the entries that have one by the parameter's; the first is that of a moment that is kept whole."""
        return {self.name: param.shape}

    def check(self, param: Tensor, saved: Mapping[str, Any]) -> None:
        """See to it that `restore` can take a saved state.

        Raises:
            UnsupportedError: It is of another shape.
        """
        for key, shape in self.shapes(param).items():
            if key in saved and tuple(saved[key].shape) != tuple(shape):
                raise UnsupportedError(
                    f"the saved '{key}' has shape {tuple(saved[key].shape)}, which is not that of a weight of shape "
                    f"{tuple(param.shape)}."
                )

    def restore(self, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """State entries from a saved state, of this storage or of one that keeps the moment whole.

        Raises:
            UnsupportedError: As `check`.
        """
        self.check(param, saved)
        state = self.create(param)
        if all(key in saved for key in self.entries()):
            for key in self.entries():
                state[key].copy_(saved[key])
        else:
            own = {key: local(value) for key, value in state.items()}
            whole = local(placed_as(param, saved[self.name])).to(param.device, torch.float32)
            self.take(own, whole.view_as(own[self.name]))  # a flat shard's state is one row
        return state

    def take(self, state: MutableMapping[str, Any], moment: Tensor) -> None:
        """Fill fresh entries with a moment that was kept whole, float32."""
        self.save(state, moment, None)

    def convert(self, state: Mapping[str, Any], g: Tensor) -> Tensor:
        """The gradient in the units in which the rule's moments are kept."""
        return g

    def share(self, state: Mapping[str, Any], g2: Tensor) -> Tensor:
        """What a second moment of this storage accumulates, given the squared gradient."""
        return g2


@dataclass(frozen=True)
class Dense(Storage):
    """One value per weight in float32, float64 or bf16, as ``torch.optim`` keeps it.

    Attributes:
        dtype: Stored precision.
        slow: The moment moves by less than bf16 resolves in a step (v at beta2 = 0.999 changes by 0.1 %, bf16 steps are
            0.4 to 0.8 %), so to nearest it would stall; where weights are rounded stochastically, so is it.
        init: Value before the first step.
    """

    dtype: torch.dtype
    slow: bool = False
    init: float = 0.0

    def create(self, param: Tensor) -> dict[str, Tensor]:
        """A tensor of the weight's shape, filled with `init`."""
        return {self.name: torch.full_like(param, self.init, dtype=self.dtype, memory_format=torch.preserve_format)}

    def load(self, state: MutableMapping[str, Any], dtype: torch.dtype) -> Tensor:
        """The stored tensor itself where precisions agree."""
        return state[self.name].to(dtype)

    def save(self, state: MutableMapping[str, Any], moment: Tensor, rounder: Rounder) -> None:
        """Round to the stored dtype."""
        stored = state[self.name]
        if stored is moment:
            return
        if self.slow and rounder is not None and stored.dtype == torch.bfloat16:
            moment = rounder(moment)
        stored.copy_(moment)
