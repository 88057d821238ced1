"""Gradients that are added up over micro-batches in the weight's precision, so that what is added is not lost.

A bf16 sum takes half of the memory of a float32 one, as much as autograd's own. Rounded to nearest, parts smaller than
1/512 of it would leave it as it is. Rounded stochastically it has the right mean whatever is added, as a weight has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memopt.kernels.rounding import round_stochastic
from lightning_memopt.kernels.slabs import equal_rows, slab_rows
from lightning_memopt.kernels.sparse import has_triton

# Elements of a product that are formed at a time on a GPU: more than where slabs stay in cache, for fewer launches.
GPU_ELEMENTS = 1 << 25


def rows_at_a_time(total: Tensor) -> int:
    """Rows of the parts in which a product is added to a matrix of this shape."""
    rows, columns = total.shape
    return equal_rows(rows, columns, GPU_ELEMENTS) if total.is_cuda else slab_rows(columns, total.device)


def add(total: Tensor, part: Tensor, key: int | None, offset: int) -> None:
    """Add a part to some rows of a sum, in place. What is not finite stays so.

    Args:
        total: Contiguous.
        part: float32 (float64), contiguous, of the same shape.
        key: `rounding_key` by which to round to bf16 stochastically, or None for rounding to nearest.
        offset: Index of the first element in the whole parameter.
    """
    if key is None or total.dtype != torch.bfloat16:
        total.add_(part)
    elif total.is_cuda and has_triton():
        from lightning_memopt.kernels import sums_triton

        sums_triton.add(total, part, key, offset)
    else:
        exact = total.float() + part
        total.copy_(torch.where(exact.isfinite(), round_stochastic(exact, key, offset), exact))
