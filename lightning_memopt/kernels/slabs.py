"""dW = dYᵀ x a few rows at a time, and the operations on factors that every route shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor]  # dY [tokens, out], x [tokens, in]

# Elements of a slab of dW: small enough to stay in cache between the matmul that writes it and what reads it. A GPU's
# second-level cache holds 32 MiB, and its launches want work: slabs of the size for CPUs would take a thousand of them
# for one layer.
CPU_SLAB_ELEMENTS, GPU_SLAB_ELEMENTS = 1 << 18, 1 << 23
# Rows of a tile of a matmul; a slab of dW begins where a tile does, or the matmul falls back to a slow kernel.
TILE_ROWS = 128


def slab_rows(columns: int, device: torch.device) -> int:
    """Rows of a slab of a matrix with so many columns: whole tiles of a matmul, unless one is too large."""
    elements = GPU_SLAB_ELEMENTS if device.type == "cuda" else CPU_SLAB_ELEMENTS
    rows = max(1, elements // max(1, columns))
    return rows - rows % TILE_ROWS if rows > TILE_ROWS else rows


def equal_rows(rows: int, columns: int, most: int) -> int:
    """Rows of slabs of at most about `most` elements: whole tiles of a matmul, and the last slab no sliver."""
    count = -(-rows * columns // most)
    return -(-rows // count // TILE_ROWS) * TILE_ROWS if count > 1 else rows


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of a and b, summed and returned in `dtype`: no bit is lost to the operands' own precision."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def slabs(
    factors: Sequence[Factors], grad: Tensor | None, dtype: torch.dtype, rows: int
) -> Iterator[tuple[int, int, Tensor]]:
    """The weight gradient, `rows` rows at a time: (start, stop, slab in `dtype`).

    Args:
        factors: Pairs whose products dYᵀ x are summed.
        grad: A stored part of the sum, [out, in], or None.
        dtype: Precision of sums and slab.
        rows: Rows of a slab; 0 where there are none at all.
    """
    out = factors[0][0].shape[1]
    for start in range(0, out, max(1, rows)):
        stop = min(start + rows, out)
        slab = grad[start:stop].to(dtype, copy=True) if grad is not None else None
        for dy, x in factors:
            dw = matmul(dy[:, start:stop].t(), x, dtype)
            slab = dw if slab is None else slab.add_(dw)
        assert slab is not None
        yield start, stop, slab


def pieces(
    factors: Sequence[Factors], grad: Tensor | None, dtype: torch.dtype, rows: int
) -> Iterator[tuple[int, int, Tensor]]:
    """As `slabs`, also where all of the gradient is stored and there are no factors."""
    if factors:
        yield from slabs(factors, grad, dtype, rows)
        return
    assert grad is not None
    for start in range(0, len(grad), max(1, rows)):
        yield start, min(start + rows, len(grad)), grad[start : start + rows].to(dtype)


def place(part: Tensor) -> tuple[object, ...]:
    """What is equal for equal views of one memory."""
    return part.data_ptr(), part.shape, part.stride()


def join(factors: Sequence[Factors]) -> Factors:
    """One pair with the tokens of all: the sum of products is the product of the concatenations."""
    if len(factors) == 1:
        return factors[0]
    return torch.cat([dy for dy, _ in factors]), torch.cat([x for _, x in factors])


def largest_possible(dy: Tensor, x: Tensor) -> float:
    """What no element of dYᵀ x exceeds in magnitude; waits for the device."""
    if not dy.numel() or not x.numel():
        return 0.0
    return float(dy.abs().amax()) * float(x.abs().amax()) * len(dy)


def finite(factors: Sequence[Factors], grad: Tensor | None, dtype: torch.dtype, rows: int, limit: float) -> bool:
    """Whether every element of the weight gradient is smaller than `limit` in magnitude; waits for the device.

    A slab cannot be taken back, so this is asked before the first one is consumed. Bounds on the factors answer it
    nearly always; only gradients near the limit, or beyond, are formed once more than needed.
    """
    bound = 0.0 if grad is None or not grad.numel() else float(grad.abs().amax())
    bound += sum(largest_possible(dy, x) for dy, x in factors)
    if bound < min(limit, torch.finfo(dtype).max):
        return True
    return all(bool((slab.abs() < limit).all()) for _, _, slab in slabs(factors, grad, dtype, rows))
