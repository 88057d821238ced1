"""Gradient clipping without stored gradients: the request, and the coefficient of norm clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memopt.backward.slot import Slot
from lightning_memopt.kernels.norms import squared_norm, squared_norm_active, squared_norm_lookup
from lightning_memopt.kernels.reference import compute_dtype


@dataclass(frozen=True)
class Clip:
    """What the step asks for.

    Attributes:
        value: Clamp each gradient element to this magnitude.
        norm: Scale all gradients so that their global 2-norm does not exceed this.
    """

    value: float | None = None
    norm: float | None = None


NO_CLIP = Clip()


@dataclass(frozen=True)
class Norms:
    """2-norms of one step's gradients, 0-dimensional tensors on the device; reading them waits for it.

    Attributes:
        total: Norm over all parameters of the optimizer.
        each: Norm by parameter name.
    """

    total: Tensor
    each: dict[str, Tensor]

    def coefficient(self, max_norm: float) -> Tensor:
        """The factor of ``torch.nn.utils.clip_grad_norm_``, or NaN if the norm is not finite.

        A NaN makes every kernel leave every element as it is, so that such a step changes nothing at all.
        """
        factor = torch.clamp(max_norm / (self.total + 1e-6), max=1.0)
        return torch.where(torch.isfinite(self.total), factor, torch.nan)


@torch.no_grad()
def gradient_norms(slots: Sequence[Slot], total: Callable[[Tensor], Tensor] = lambda squares: squares) -> Norms:
    """Norms of what waits in `slots`, each formed without forming a weight gradient from its factors.

    Args:
        slots: Parameters with a gradient.
        total: Adds up squared norms, one per parameter, over ranks that hold different parts of each.
    """
    device = slots[0].param.device
    squares = []
    for slot in slots:
        slot.hold_gradient()
        dtype, lookup = compute_dtype(slot.param), slot.only_lookup()
        if lookup is not None:
            squares.append(squared_norm_lookup(*lookup, dtype).to(device) * slot.mean**2)
            continue
        slot.fold_lookups()
        if slot.sparse is not None:
            parts = (slot.factors, slot.stored, slot.sparse.buffer, dtype)
            square = squared_norm_active(tuple(slot.weight.shape), slot.sparse.bits, *parts)
        else:
            square = squared_norm(slot.factors, slot.stored, dtype)
        squares.append(square.to(device) * slot.mean**2)
    norms = total(torch.stack(squares)).sqrt()
    return Norms(torch.linalg.vector_norm(norms), dict(zip((slot.name for slot in slots), norms, strict=True)))
