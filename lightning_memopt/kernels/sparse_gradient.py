"""The gradient of a sparse weight: a slab at a time, and accumulated for its active weights only.

Factors that wait take memory in proportion to the tokens of a step. Past their break-even a dense weight accumulates
its gradient in a buffer of its own size; a sparse weight in one with an element per active weight. Nothing here waits
for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_memopt.kernels.slabs import Factors, pieces
from lightning_memopt.sparsity.bits import unpack

# Rows of a weight gradient with their mask: (first row, row past the last, slab, mask), the last two flat.
ActiveSlab = tuple[int, int, Tensor, Tensor]


def masked(parts: Iterable[tuple[int, int, Tensor]], bits: Tensor) -> Iterator[ActiveSlab]:
    """Parts of a gradient, (first row, row past the last, gradient of these rows), with their mask."""
    for start, stop, part in parts:
        columns = part.shape[1]
        yield start, stop, part.reshape(-1), unpack(bits, start * columns, stop * columns)


def active_slabs(
    shape: tuple[int, ...],
    bits: Tensor,
    factors: Sequence[Factors],
    grad: Tensor | None,
    stored: Tensor | None,
    dtype: torch.dtype,
    rows: int,
) -> Iterator[ActiveSlab]:
    """The weight gradient, `rows` rows at a time: (start, stop, slab in `dtype`, mask of its weights), both flat.

    Args:
        shape: [out, in].
        bits: The mask, see `lightning_memopt.sparsity.bits`.
        factors: Pairs whose products are summed.
        grad: A stored part of the sum, [out, in], or None.
        stored: A part that is known for active weights only, [active], or None. Then the slab is right there only.
        dtype: Precision of sums and slab.
        rows: Rows of a slab.
    """
    height, columns = shape
    before = torch.zeros((), dtype=torch.int64, device=bits.device)
    parts: Iterator[tuple[int, int, Tensor | None]]
    if factors or grad is not None:
        parts = iter(pieces(factors, grad, dtype, rows))
    else:
        parts = ((start, min(start + rows, height), None) for start in range(0, height, rows))
    for start, stop, part in parts:
        mask = unpack(bits, start * columns, stop * columns)
        slab = part.reshape(-1) if part is not None else None
        if stored is not None:
            entry = _entries(mask, before)
            # A shard may have no active weights at all.
            known = torch.where(mask, stored[entry.clamp_(max=len(stored) - 1)], 0) if len(stored) else mask.to(dtype)
            slab = known.to(dtype) if slab is None else slab + known
            before = before + mask.sum()
        assert slab is not None
        yield start, stop, slab, mask


def accumulate(buffer: Tensor, slabs: Iterable[ActiveSlab]) -> None:
    """Add a gradient, whose slabs come in order and without gaps, to the buffer, [active], at the active weights."""
    before = torch.zeros((), dtype=torch.int64, device=buffer.device)
    # Inactive weights go to an element past the end.
    spare = torch.cat([buffer, buffer.new_zeros(1)])
    for _, _, slab, mask in slabs:
        entry = torch.where(mask, _entries(mask, before), len(buffer))
        spare[entry] += slab
        before = before + mask.sum()
    buffer.copy_(spare[:-1])


def _entries(mask: Tensor, before: Tensor) -> Tensor:
    """Number of each active weight among all, given how many come before this slab; anything where inactive."""
    return (mask.cumsum(0) - 1 + before).clamp_(min=0)
