"""One step on the active weights of a sparse parameter, in plain torch: any device, dtype, rule and storage.

The gradient is formed a few rows at a time. The active weights of those rows are gathered, take an ordinary step of
their rule on their own, compact moments, and are put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_memopt.kernels import reference
from lightning_memopt.kernels.active import Entries
from lightning_memopt.kernels.slabs import Factors, finite
from lightning_memopt.kernels.sparse_gradient import ActiveSlab, active_slabs
from lightning_memopt.kernels.update import Update
from lightning_memopt.sparsity.spans import WHERE, Where


@torch.no_grad()
def apply(update: Update, factors: Sequence[Factors], grad: Tensor | None, rows: int) -> bool:
    """Take one step on dW = sum of dYᵀ x over `factors`, plus `grad`; weights off the mask are not touched.

    Returns:
        False, with nothing written, if the gradient holds a value that is not finite.
    """
    active, (height, columns) = update.active, update.weight.shape
    assert active is not None
    dtype, limit = reference.compute_dtype(update.weight), update.rule.limit
    stored = active.stored
    if stored is not None and not (stored.abs() < limit).all():
        return False
    if rows < height and not _finite(factors, grad, dtype, rows, limit):
        return False
    return apply_slabs(update, active_slabs((height, columns), active.bits, factors, grad, stored, dtype, rows))


@torch.no_grad()
def apply_slabs(update: Update, slabs: Iterable[ActiveSlab]) -> bool:
    """Take one step on a gradient that comes in parts, in order and without gaps.

    Returns:
        Whether all that was seen is finite. Slabs that came before one that is not have been used.
    """
    active, columns = update.active, update.weight.shape[1]
    assert active is not None
    taken = 0
    for start, stop, slab, mask in slabs:
        if active.growth is not None:
            active.growth.add(update.offset + start * columns, slab, mask)
        at = mask.nonzero().view(-1)
        if not _step(update, slice(start, stop), at, slab[at], taken):
            return False
        taken += len(at)
    return True


def _finite(factors: Sequence[Factors], grad: Tensor | None, dtype: torch.dtype, rows: int, limit: float) -> bool:
    if not factors:
        return grad is None or bool((grad.abs() < limit).all())
    return finite(factors, grad, dtype, rows, limit)


def _step(update: Update, rows: slice, at: Tensor, g: Tensor, first: int) -> bool:
    """Step the active weights of some rows, at the indices `at` from their first on; their entries begin at `first`."""
    active, columns = update.active, update.weight.shape[1]
    assert active is not None
    if not len(at):
        return True
    mine = slice(first, first + len(at))
    state = {key: view for storage in update.storage for key, view in storage.compact(update.state, mine, rows).items()}
    state[WHERE] = Where(at, columns)
    at = at + rows.start * columns
    where = (at // columns, at % columns)
    weight = update.weight[where][None]
    entries = Entries(at + update.offset, active.cohort[mine], active.ages)
    gathered = replace(update, weight=weight, state=state, active=None, entries=entries)
    if not reference.apply_gradient(gathered, g[None]):
        return False
    update.weight[where] = weight[0]
    return True
