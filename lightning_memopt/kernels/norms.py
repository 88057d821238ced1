"""‖dW‖² of a weight gradient that is never stored whole.

Two exact ways, by what costs fewer operations. With T tokens, N outputs and K inputs:

    Gram     ‖dYᵀ x‖² = ⟨dY dYᵀ, x xᵀ⟩      2 T² (N + K) operations, two T × T matrices
    slabs    sum over row slabs of dW         2 T N K operations, one slab

The first follows from tr(xᵀ dY dYᵀ x) = tr(dY dYᵀ x xᵀ). On GPUs a kernel forms it for many layers at once, by half of
each of the two symmetric matrices, of which it stores none (`kernels.gram`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_memopt.kernels.slabs import Factors, join, matmul, place, slab_rows, slabs
from lightning_memopt.kernels.sparse import has_triton
from lightning_memopt.kernels.sparse_gradient import active_slabs

# By Gram products, in the kernel or of stored matrices, or by slabs.
Way = Literal["kernel", "gram", "slabs"]
# Bytes of Gram matrices that are formed together, where they are stored.
GRAM_BYTES = 1 << 25
# The kernel for Gram products needs half of their operations, each of which takes it longer than a matmul of slabs.
KERNEL_GAIN = 1.5
# Tokens of a look-up whose products with all others are formed at a time.
LOOKUP_ROWS = 1024


def best_way(factors: Sequence[Factors], grad: Tensor | None, dtype: torch.dtype) -> Way:
    """How to form ‖grad + Σ dYᵀ x‖² by the fewest operations, where there are factors; asks the kernel once."""
    if grad is not None:
        return "slabs"
    tokens, (dy, x) = sum(len(dy) for dy, _ in factors), factors[0]
    # Several pairs are joined and go by themselves, so that the kernel has few tiles to work on.
    in_kernel = len(factors) == 1 and _in_kernel(dy, x, dtype)
    if tokens * (dy.shape[1] + x.shape[1]) >= (KERNEL_GAIN if in_kernel else 1) * dy.shape[1] * x.shape[1]:
        return "slabs"
    return "kernel" if in_kernel else "gram"


def squared_norm(factors: Sequence[Factors], grad: Tensor | None, dtype: torch.dtype, way: Way) -> Tensor:
    """‖grad + Σ dYᵀ x‖² as a 0-dimensional tensor of `dtype` on the factors' device, without waiting for it.

    Args:
        factors: At least one pair.
        grad: A stored part of the gradient, or None.
        dtype: Precision of sums and result.
        way: What `best_way` said of these.
    """
    if way != "slabs":
        pair = join(factors)
        if len(factors) > 1 and _in_kernel(*pair, dtype):
            way = "kernel"
        return squared_norms([pair], dtype, way)[0]
    total = torch.zeros((), dtype=dtype, device=factors[0][0].device)
    for _, _, slab in slabs(factors, grad, dtype, slab_rows(factors[0][1].shape[1], factors[0][0].device)):
        total += torch.dot(slab.flatten(), slab.flatten())
    return total


def squared_norms(pairs: Sequence[Factors], dtype: torch.dtype, way: Way) -> Tensor:
    """‖dYᵀ x‖² of several layers, by Gram, [layers]; an x that follows itself is used once.

    In few launches for all: they cost the host more than the device.

    Args:
        pairs: Of equally many tokens, and for the kernel of one dtype.
        dtype: Precision of sums and result.
        way: "kernel" or "gram", the same for all.
    """
    return _fused(pairs) if way == "kernel" else _stored(pairs, dtype)


def _fused(pairs: Sequence[Factors]) -> Tensor:
    from lightning_memopt.kernels import gram

    return gram.squared_norms(pairs)


def _in_kernel(dy: Tensor, x: Tensor, dtype: torch.dtype) -> bool:
    if dtype != torch.float32 or not (dy.is_cuda and has_triton()):
        return False
    from lightning_memopt.kernels import gram

    return gram.supports(dy, x)


def _stored(pairs: Sequence[Factors], dtype: torch.dtype) -> Tensor:
    """The same with the Gram matrices stored, of some layers at a time."""
    together = max(1, GRAM_BYTES // max(1, len(pairs[0][0]) ** 2 * dtype.itemsize))
    return torch.cat([_stored_together(pairs[i : i + together], dtype) for i in range(0, len(pairs), together)])


def _stored_together(pairs: Sequence[Factors], dtype: torch.dtype) -> Tensor:
    gram_dys, gram_xs, before = list[Tensor](), list[Tensor](), None
    for dy, x in pairs:
        gram_dys.append(matmul(dy, dy.t(), dtype))
        same = before is not None and place(x) == before
        before = place(x)
        gram_xs.append(gram_xs[-1] if same else matmul(x, x.t(), dtype))
    return (torch.stack(gram_dys) * torch.stack(gram_xs)).sum((1, 2)).clamp_(min=0)


def squared_norm_active(
    shape: tuple[int, ...],
    bits: Tensor,
    factors: Sequence[Factors],
    grad: Tensor | None,
    stored: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """As `squared_norm`, over the active weights of a sparse one; arguments of `sparse_gradient.active_slabs`."""
    if stored is not None and not factors and grad is None:
        return torch.linalg.vector_norm(stored, dtype=dtype).square()
    total = torch.zeros((), dtype=dtype, device=bits.device)
    rows = slab_rows(shape[1], bits.device)
    for _, _, slab, mask in active_slabs(shape, bits, factors, grad, stored, dtype, rows):
        active = torch.where(mask, slab, 0)
        total += torch.dot(active, active)
    return total


def squared_norm_lookup(dy: Tensor, indices: Tensor, padding_idx: int, dtype: torch.dtype) -> Tensor:
    """‖dW‖² of a table that was only looked up: rows without tokens are zero, so only tokens are summed by row.

    Args:
        dy: [tokens, dim].
        indices: [tokens].
        padding_idx: Row without a gradient, or -1.
        dtype: Precision of sums and result.
    """
    # The Gram matrix of the tokens, summed where they share a row. Unlike adding rows up, this has one order of
    # summation on a GPU.
    dy = dy.to(dtype).masked_fill((indices == padding_idx)[:, None], 0)
    total = torch.zeros((), dtype=dtype, device=dy.device)
    for start in range(0, len(dy), LOOKUP_ROWS):
        rows = slice(start, start + LOOKUP_ROWS)
        total += ((dy[rows] @ dy.t()) * (indices[rows, None] == indices)).sum()
    return total.clamp_(min=0)  # where tokens cancel, rounding may leave it below
