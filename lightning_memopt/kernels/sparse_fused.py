"""The update of sparse weights fused with the matmul that forms their gradient, for any GPU that Triton knows.

One program per tile of the weight, one segment of the mask wide. A tile without active weights is left before its
matmul; of others, all weights pass through registers, and an active one's entry is what the index says of its segment
plus the active weights before it, a sum along the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lightning_memopt.kernels import sparse_tile
from lightning_memopt.kernels.slabs import Factors, join
from lightning_memopt.kernels.sparse_arguments import arguments, lengths
from lightning_memopt.kernels.update import Update
from lightning_memopt.sparsity.bits import SEGMENT

# Rows of a tile, and of the part of it that is updated at once (more would not fit the registers); height of the bands
# in which tiles are taken, so that operands stay in L2.
ROWS, PART_ROWS, BAND = 128, 8, 8

# The interpreter's dot is wrong for bf16.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _step_parts(
    acc, first_row, j, rows, columns, update,
    TILE: tl.constexpr, AGED: tl.constexpr, KINDS: tl.constexpr, LENGTHS: tl.constexpr, STOCHASTIC: tl.constexpr,
    PART_ROWS: tl.constexpr,
):  # fmt: skip
    """Update a tile some rows at a time: all of it at once would not fit the registers."""
    height: tl.constexpr = acc.shape[0]
    width: tl.constexpr = acc.shape[1]
    if height > PART_ROWS:
        upper, lower = tl.split(tl.permute(tl.reshape(acc, (2, height // 2, width)), (1, 2, 0)))
        _step_parts(
            upper, first_row, j, rows, columns, update,
            TILE, AGED, KINDS, LENGTHS, STOCHASTIC, PART_ROWS,
        )  # fmt: skip
        _step_parts(
            lower, first_row + height // 2, j, rows, columns, update,
            TILE, AGED, KINDS, LENGTHS, STOCHASTIC, PART_ROWS,
        )  # fmt: skip
    else:
        bits, index, given, tensors = update
        r = first_row + tl.arange(0, height)
        lane = tl.arange(0, width)[None, :]
        start = r * columns + j * width
        inside = (r < rows)[:, None] & (lane >= 0)
        byte = tl.load(bits + (start // 8)[:, None] + lane // 8, mask=inside, other=0).to(tl.int32)
        flag = (byte >> lane % 8) & 1
        entry = tl.load(index + start // width, mask=r < rows, other=0)[:, None] + tl.cumsum(flag, 1) - flag
        place = (r[:, None], r[:, None] * 0 + j * width, (r < rows)[:, None], lane + start[:, None] * 0)
        tile = sparse_tile.read(
            acc, start[:, None] + lane, entry, flag != 0, place, columns, given, tensors,
            AGED, KINDS, LENGTHS, width, True,
        )  # fmt: skip
        sparse_tile.step(tile, columns, given, tensors, TILE, KINDS, LENGTHS, width, STOCHASTIC, True)


@triton.jit(do_not_specialize=["tokens", "offset"])
def weight_gradient_update(
    dy, x, ages, w, values, scales, bits, index, cohort, row, key, nonfinite, rows, columns, tokens, offset,
    dy_token, dy_row, x_token, x_column,
    TILE: tl.constexpr, SCALARS: tl.constexpr, AGED: tl.constexpr, COLUMNS: tl.constexpr,
    KINDS: tl.constexpr, LENGTHS: tl.constexpr, STOCHASTIC: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, SEGMENT: tl.constexpr, TOKENS: tl.constexpr, BAND: tl.constexpr, PART_ROWS: tl.constexpr,
):  # fmt: skip
    """Form dW = dYᵀ x and take one step of rule `TILE` on the active weights; `SEGMENT` divides `columns`."""
    across = columns // SEGMENT
    band = BAND * across
    top = tl.program_id(0) // band * BAND
    height = tl.minimum(tl.cdiv(rows, ROWS) - top, BAND)
    first_row = (top + tl.program_id(0) % band % height) * ROWS
    j = tl.program_id(0) % band // height
    r = first_row + tl.arange(0, ROWS)
    segment = r * across + j
    count = tl.load(index + segment + 1, mask=r < rows, other=0) - tl.load(index + segment, mask=r < rows, other=0)
    if tl.sum(count, 0) == 0:
        return
    c = j * SEGMENT + tl.arange(0, SEGMENT)
    t = tl.arange(0, TOKENS)
    dy_at = dy + r.to(tl.int64)[:, None] * dy_row
    x_at = x + c.to(tl.int64)[None, :] * x_column
    acc = tl.zeros((ROWS, SEGMENT), tl.float32)
    for first in range(0, tokens, TOKENS):
        token = (first + t).to(tl.int64)
        a = tl.load(dy_at + token[None, :] * dy_token, mask=(r < rows)[:, None] & (token < tokens)[None, :], other=0.0)
        b = tl.load(x_at + token[:, None] * x_token, mask=(token < tokens)[:, None], other=0.0)
        if _INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    given = sparse_tile.shared(row, key, ages, SCALARS, COLUMNS, KINDS)
    update = (bits, index, given, (w, values, scales, cohort, nonfinite, offset, ages))
    _step_parts(acc, first_row, j, rows, columns, update, TILE, AGED, KINDS, LENGTHS, STOCHASTIC, PART_ROWS)


def fuses(update: Update) -> bool:
    """Whether `apply_factors` takes this update: neither segments nor spans may cross its tiles."""
    return update.weight.shape[1] % SEGMENT == 0 and max(lengths(update), default=0) <= SEGMENT


def apply_factors(update: Update, factors: Sequence[Factors]) -> None:
    """Take one step on dW = sum of dYᵀ x over `factors`: bf16, fp16 or float32, any strides."""
    dy, x = join(factors)
    if dy.dtype != x.dtype:
        dtype = torch.promote_types(dy.dtype, x.dtype)
        dy, x = dy.to(dtype), x.to(dtype)
    rows, columns = update.weight.shape
    ages, tensors, offset, constants = arguments(update)
    weight_gradient_update[(triton.cdiv(rows, ROWS) * (columns // SEGMENT),)](
        dy,
        x,
        ages,
        *tensors,
        rows,
        columns,
        len(x),
        offset,
        *dy.stride(),
        *x.stride(),
        **constants,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        ROWS=ROWS,
        SEGMENT=SEGMENT,
        TOKENS=32,
        BAND=BAND,
        PART_ROWS=PART_ROWS,
        num_warps=8,
        num_stages=3,
    )
