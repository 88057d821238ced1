"""Which kernel takes an update of a sparse weight: plain torch, Triton on slabs, or Triton fused with the matmul.

The fused kernel is portable Triton, whose matmul is slower than the vendor's, so it runs only where it is asked for; it
pays where block masks leave tiles empty. On the step whose gradient decides where to grow, slabs of it are looked at,
so that one is not fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from lightning_memopt.kernels import sparse_reference
from lightning_memopt.kernels.slabs import SLAB_ELEMENTS, Factors
from lightning_memopt.kernels.sparse_gradient import active_slabs
from lightning_memopt.kernels.update import Update

# Elements of a slab of dW in float32 on a GPU: 16 MiB.
GPU_SLAB_ELEMENTS = 1 << 22


def apply(update: Update, factors: Sequence[Factors], grad: Tensor | None, kernel: str) -> bool:
    """Take one step on dW = sum of dYᵀ x over `factors`, plus `grad`, at the active weights only.

    Returns:
        As `lightning_memopt.kernels.dispatch.apply_factors`.
    """
    rows, columns = update.weight.shape
    elements = GPU_SLAB_ELEMENTS if update.weight.is_cuda else SLAB_ELEMENTS
    step = rows if kernel == "reference" else max(1, elements // columns)
    if kernel != "reference" and _in_triton(update):
        in_triton(update, factors, grad, step, fused=kernel == "fused")
        return True
    return sparse_reference.apply(update, factors, grad, step)


def _in_triton(update: Update) -> bool:
    if not update.weight.is_cuda or update.row is None or find_spec("triton") is None:
        return False
    from lightning_memopt.kernels import sparse_triton

    return sparse_triton.supports(update)


def in_triton(update: Update, factors: Sequence[Factors], grad: Tensor | None, rows: int, fused: bool) -> None:
    """Take one step by Triton kernels; non-finite elements are left out and set ``update.nonfinite``."""
    from lightning_memopt.kernels import sparse_triton

    active, (height, columns) = update.active, update.weight.shape
    assert active is not None
    if active.ages.table is None:
        table = torch.tensor(active.ages.rows, dtype=torch.float32)
        cuda = update.weight.is_cuda
        active.ages.table = (table.pin_memory() if cuda else table).to(update.weight.device, non_blocking=True)
    whole = grad is None and active.stored is None and active.growth is None
    if fused and whole and sparse_triton.fuses(update):
        sparse_triton.apply_factors(update, factors)
        return
    dtype = torch.float32
    for start, _, slab, mask in active_slabs((height, columns), active.bits, factors, grad, active.stored, dtype, rows):
        if active.growth is not None:
            active.growth.add(start * columns, slab, mask)
        sparse_triton.apply_slab(update, slab.view(-1, columns), start)
