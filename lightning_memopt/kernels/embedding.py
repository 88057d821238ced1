"""The update of an embedding table, whose gradient, zero in most rows, is never formed.

dW[r] = sum of dY[t] over the tokens with indices[t] = r. Optimizer semantics are dense: rows without tokens have a zero
gradient, and still decay and move by their moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memopt.kernels import reference
from lightning_memopt.kernels.dispatch import Kernel, apply_gradient
from lightning_memopt.kernels.slabs import slab_rows
from lightning_memopt.kernels.update import Update


class Segments(NamedTuple):
    """Tokens grouped by the row they look up, in their own order within a row.

    Attributes:
        order: int64 [tokens], token numbers.
        bounds: int64 [rows + 1]; row r's tokens are ``order[bounds[r] : bounds[r + 1]]``.
    """

    order: Tensor
    bounds: Tensor


def segments(indices: Tensor, rows: int) -> Segments:
    """Group tokens by row, without waiting for the device. The sort is stable, so sums have one order."""
    ordered, order = torch.sort(indices.reshape(-1), stable=True)
    limits = torch.arange(rows + 1, device=indices.device, dtype=ordered.dtype)
    return Segments(order, torch.searchsorted(ordered, limits))


def embedding_gradient(
    indices: Tensor, dy: Tensor, rows: int, dtype: torch.dtype, padding_idx: int | None = None
) -> Tensor:
    """The dense gradient [rows, dim] in `dtype`, for a table that also takes part in other layers."""
    indices, dy = indices.reshape(-1), dy.reshape(-1, dy.shape[-1]).to(dtype)
    # torch's own: it sorts tokens by row, so that a GPU sums them in one order.
    return torch.ops.aten.embedding_dense_backward(dy, indices, rows, -1 if padding_idx is None else padding_idx, False)


def apply_embedding(
    update: Update, indices: Tensor, dy: Tensor, kernel: Kernel, padding_idx: int | None = None
) -> bool:
    """Take one step on the gradient of ``weight[indices]``.

    Args:
        update: The table's update, weight [rows, dim].
        indices: Integers of any shape, in [0, rows).
        dy: Gradient of the output, [*indices.shape, dim], any float dtype and strides.
        kernel: "reference" for plain torch; any other name for the GPU's kernel where there is one.
        padding_idx: Row that receives no gradient.

    Returns:
        As `lightning_memopt.kernels.apply_gradient`.
    """
    dy = dy.reshape(-1, dy.shape[-1])
    rows, dtype = len(update.weight), reference.compute_dtype(update.weight)
    if update.active is not None:
        return apply_gradient(update, embedding_gradient(indices, dy, rows, dtype, padding_idx), kernel)
    if kernel != "reference" and update.weight.is_cuda:
        from lightning_memopt.kernels import blocks, embedding_triton

        if blocks.supports(update):
            embedding_triton.apply_embedding(update, segments(indices, rows), dy, padding_idx)
            return True
    # A slab cannot be taken back, so whether all are finite is asked first; a bound on the sums nearly always answers.
    limit = update.rule.limit
    bounded = not dy.numel() or float(dy.abs().amax()) * len(dy) < min(limit, torch.finfo(dtype).max)
    if not bounded and not all((g.abs() < limit).all() for *_, g in _slabs(update, indices, dy, padding_idx)):
        return False
    for start, stop, slab in _slabs(update, indices, dy, padding_idx):
        if not reference.apply_gradient(update.rows(start, stop), slab):
            return False
    return True


def _slabs(update: Update, indices: Tensor, dy: Tensor, padding_idx: int | None) -> Iterator[tuple[int, int, Tensor]]:
    """The dense gradient a few rows at a time: (start, stop, slab)."""
    rows, dim = update.weight.shape
    order, bounds = segments(indices, rows)
    step = slab_rows(dim, update.weight.device)
    dtype = reference.compute_dtype(update.weight)
    flat, limits = indices.reshape(-1), [*bounds[::step].tolist(), len(order)]
    for i, start in enumerate(range(0, rows, step)):
        tokens = order[limits[i] : limits[i + 1]]
        stop = min(start + step, rows)
        padding = padding_idx - start if padding_idx is not None else None
        yield start, stop, embedding_gradient(flat[tokens] - start, dy[tokens], stop - start, dtype, padding)
