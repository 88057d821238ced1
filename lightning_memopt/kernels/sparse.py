"""Which kernel takes an update of a sparse weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_memopt.kernels import sparse_reference
from lightning_memopt.kernels.slabs import SLAB_ELEMENTS, Factors
from lightning_memopt.kernels.update import Update


def apply(update: Update, factors: Sequence[Factors], grad: Tensor | None, kernel: str) -> bool:
    """Take one step on dW = sum of dYᵀ x over `factors`, plus `grad`, at the active weights only.

    Returns:
        As `lightning_memopt.kernels.dispatch.apply_factors`.
    """
    rows, columns = update.weight.shape
    step = rows if kernel == "reference" else max(1, SLAB_ELEMENTS // columns)
    return sparse_reference.apply(update, factors, grad, step)
