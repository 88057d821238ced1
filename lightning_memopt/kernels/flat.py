"""The update on a stored gradient, in one pass over weight, moments and gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import blocks
from lightning_memopt.kernels.update import Update
from lightning_memopt.rules.storage_8bit import BLOCK, rows_of

# Blocks of one program: 2048 weights.
BLOCKS = 32


@triton.jit(do_not_specialize=["offset"])
def flat_update(
    grad, w, values, scales, row, key, nonfinite, total, columns, offset,
    TILE: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, STOCHASTIC: tl.constexpr,
    RAGGED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of rule `TILE` on `total` weights whose gradient is `grad`.

    Blocks follow each other without a gap, unless `RAGGED`: then the last block of every row of `columns` is short.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    lanes = tl.arange(0, BLOCK)[None, :]
    if RAGGED:
        across = tl.cdiv(columns, BLOCK)
        first = (block % across) * BLOCK
        start = (block // across).to(tl.int64) * columns + first
        exists = start < total
        valid = (first[:, None] + lanes < columns) & exists[:, None]
    else:
        start = block.to(tl.int64) * BLOCK
        exists = start < total
        valid = start[:, None] + lanes < total
    g = tl.load(grad + (start[:, None] + lanes), mask=valid, other=0.0).to(tl.float32)
    blocks.step(
        g, start, tl.where(exists, block, -1), valid, w, values, scales, row, key, nonfinite, offset,
        TILE, SCALARS, KINDS, STOCHASTIC,
    )  # fmt: skip


def apply_gradient(update: Update, grad: Tensor) -> None:
    """Take one step on a gradient of the weight's shape: float32, bf16 or fp16, any strides.

    Tensors that are not contiguous are copied. Non-finite elements are left out and set ``update.nonfinite``.
    """
    rows, columns = rows_of(update.weight)
    total = rows * columns
    if not total:
        return
    ragged = blocks.in_blocks(update) and columns % BLOCK != 0
    count = rows * triton.cdiv(columns, BLOCK) if ragged else triton.cdiv(total, BLOCK)
    call = blocks.arguments(update)
    flat_update[(triton.cdiv(count, BLOCKS),)](
        grad.contiguous(),
        *call.tensors,
        total,
        columns,
        call.offset,
        **call.constants,
        RAGGED=ragged,
        BLOCKS=BLOCKS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    call.write_back()
