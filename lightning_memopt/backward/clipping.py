"""Gradient clipping without stored gradients: the request, and the coefficient of norm clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memopt.backward.slot import Slot
from lightning_memopt.kernels import Factors
from lightning_memopt.kernels.norms import (
    Way,
    best_way,
    squared_norm,
    squared_norm_active,
    squared_norm_lookup,
    squared_norms,
)
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
    stored: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    squares: dict[int, Tensor] = {}
    few: dict[tuple[torch.device, torch.dtype, Way, torch.dtype, int], dict[int, Factors]] = {}
    for i, slot in enumerate(slots):
        slot.hold_gradient()
        dtype, lookup = compute_dtype(slot.param), slot.only_lookup()
        if lookup is not None:
            squares[i] = squared_norm_lookup(*lookup, dtype)
            continue
        slot.fold_lookups()
        if slot.sparse is not None:
            parts = (slot.factors, slot.stored, slot.sparse.buffer, dtype)
            squares[i] = squared_norm_active(tuple(slot.weight.shape), slot.sparse.bits, *parts)
        elif slot.factors:
            way, (dy, _) = best_way(slot.factors, slot.stored, dtype), slot.factors[0]
            if way == "slabs" or len(slot.factors) > 1:
                squares[i] = squared_norm(slot.factors, slot.stored, dtype, way)
            else:
                few.setdefault((dy.device, dtype, way, dy.dtype, len(dy)), {})[i] = slot.factors[0]
        else:
            assert slot.stored is not None
            stored.setdefault((slot.param.device, dtype), {})[i] = slot.stored
    for (_, dtype, way, *_), pairs in few.items():
        squares |= zip(pairs, squared_norms(list(pairs.values()), dtype, way).unbind(), strict=True)
    for (_, dtype), grads in stored.items():  # all in a few launches
        roots = torch.stack(torch._foreach_norm(list(grads.values()), 2, dtype))
        squares |= zip(grads, roots.square().unbind(), strict=True)
    together = torch.stack([squares[i].to(device) for i in range(len(slots))])
    norms = total(_scaled(together, [slot.mean**2 for slot in slots])).sqrt()
    return Norms(torch.linalg.vector_norm(norms), dict(zip((slot.name for slot in slots), norms, strict=True)))


def _scaled(values: Tensor, factors: Sequence[float]) -> Tensor:
    """Each value times its factor; the host does not wait for the device."""
    if all(factor == 1 for factor in factors):
        return values
    host = torch.tensor(factors, dtype=values.dtype, device="cpu")
    return values * (host.pin_memory() if values.is_cuda else host).to(values.device, non_blocking=True)
