"""One step on the active weights of a sparse parameter, in plain torch: any device, dtype, rule and storage.

The gradient is formed a few rows at a time. The active weights of those rows are gathered, take an ordinary step of
their rule on their own, compact moments, and are put back. Where moments share something (8-bit codes have a scale per
block), the gradient of the active weights is gathered from all rows before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_memopt.kernels import reference
from lightning_memopt.kernels.active import Entries
from lightning_memopt.kernels.slabs import Factors, finite
from lightning_memopt.kernels.sparse_gradient import active_slabs
from lightning_memopt.kernels.update import Update
from lightning_memopt.rules.storage import Dense


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
    apart = all(isinstance(storage, Dense) for storage in update.storage)
    if stored is not None and not (stored.abs() < limit).all():
        return False
    if apart and rows < height and not _finite(factors, grad, dtype, rows, limit):
        return False
    taken = 0
    waiting: list[tuple[Tensor, Tensor]] = []
    for start, _, slab, mask in active_slabs((height, columns), active.bits, factors, grad, stored, dtype, rows):
        if active.growth is not None:
            active.growth.add(start * columns, slab, mask)
        at = mask.nonzero().view(-1)
        g, at = slab[at], at + start * columns
        if not apart:
            waiting.append((at, g))
        elif not _step(update, at, g, taken):
            return False
        taken += len(at)
    return apart or _step(update, torch.cat([at for at, _ in waiting]), torch.cat([g for _, g in waiting]), 0)


def _finite(factors: Sequence[Factors], grad: Tensor | None, dtype: torch.dtype, rows: int, limit: float) -> bool:
    if not factors:
        return grad is None or bool((grad.abs() < limit).all())
    return finite(factors, grad, dtype, rows, limit)


def _step(update: Update, at: Tensor, g: Tensor, first: int) -> bool:
    """Step the active weights at the indices `at`, whose entries begin at `first`."""
    active, columns = update.active, update.weight.shape[1]
    assert active is not None
    if not len(at):
        return True
    stop = first + len(at)
    state = update.state
    if stop - first < len(active.cohort):
        state = {storage.name: state[storage.name][:, first:stop] for storage in update.storage}
    where = (at // columns, at % columns)
    weight = update.weight[where][None]
    entries = Entries(at + update.offset, active.cohort[first:stop], active.ages)
    gathered = replace(update, weight=weight, state=state, active=None, entries=entries)
    if not reference.apply_gradient(gathered, g[None]):
        return False
    update.weight[where] = weight[0]
    return True
