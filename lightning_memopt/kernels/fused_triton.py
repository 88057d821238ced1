"""Weight gradient and update in one kernel, for any GPU that Triton knows and for operands of any strides.

One program per tile of the weight: dW = dYᵀ x is summed over the tokens in float32 registers, then consumed there. It
serves GPUs without Hopper's units, and on those the operands that TMA cannot take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import blocks
from lightning_memopt.kernels.slabs import Factors, join
from lightning_memopt.kernels.update import Update

# Rows and columns of a tile; weights of the part of it that is updated at once, which is one block wide; height of the
# bands in which tiles are taken, so that operands stay in L2.
ROWS, COLUMNS, PART, BAND = 128, blocks.WIDEST, 4096, 8
# The interpreter's dot is wrong for bf16.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _step_parts(
    acc, first_row, first_column, rows, columns, update,
    TILE: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, STOCHASTIC: tl.constexpr,
    WIDTH: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Update a tile part by part: all of it at once would not fit the registers."""
    height: tl.constexpr = acc.shape[0]
    width: tl.constexpr = acc.shape[1]
    if width > WIDTH:
        left, right = tl.split(tl.permute(tl.reshape(acc, (height, 2, width // 2)), (0, 2, 1)))
        _step_parts(
            left, first_row, first_column, rows, columns, update,
            TILE, SCALARS, KINDS, STOCHASTIC, WIDTH, PART, ALIGNED,
        )  # fmt: skip
        _step_parts(
            right, first_row, first_column + width // 2, rows, columns, update,
            TILE, SCALARS, KINDS, STOCHASTIC, WIDTH, PART, ALIGNED,
        )  # fmt: skip
    elif height * width > PART:
        upper, lower = tl.split(tl.permute(tl.reshape(acc, (2, height // 2, width)), (1, 2, 0)))
        _step_parts(
            upper, first_row, first_column, rows, columns, update,
            TILE, SCALARS, KINDS, STOCHASTIC, WIDTH, PART, ALIGNED,
        )  # fmt: skip
        _step_parts(
            lower, first_row + height // 2, first_column, rows, columns, update,
            TILE, SCALARS, KINDS, STOCHASTIC, WIDTH, PART, ALIGNED,
        )  # fmt: skip
    else:
        w, values, scales, factor, row, key, nonfinite, offset = update
        r = first_row + tl.arange(0, height)
        valid = (r < rows)[:, None] & (first_column + tl.arange(0, width) < columns)[None, :]
        start = r.to(tl.int64) * columns + first_column
        place = (tl.where(r < rows, r, -1), first_column + r * 0, columns)
        if factor is not None:
            factor += place[1]
        blocks.step(
            acc, start, place, valid, w, values, scales, factor, row, key, nonfinite, offset, ALIGNED,
            TILE, SCALARS, KINDS, STOCHASTIC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "offset"])
def weight_gradient_update(
    dy, x, grad, w, values, scales, factor, row, key, nonfinite, rows, columns, tokens, offset,
    dy_token, dy_row, x_token, x_column, grad_row, grad_column,
    TILE: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, STOCHASTIC: tl.constexpr,
    STORED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, BAND: tl.constexpr,
    WIDTH: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Form dW = dYᵀ x (+ grad, if `STORED`) and take one step of rule `TILE` on weight and moments.

    Args:
        dy, x: The factors, [tokens, rows] and [tokens, columns], with their strides per token, row and column.
        grad: A stored part of the gradient, [rows, columns], with its strides.
        PRECISION: Of float32 products: "ieee" or "tf32".
    """
    across = tl.cdiv(columns, COLUMNS)
    band = BAND * across
    top = tl.program_id(0) // band * BAND
    height = tl.minimum(tl.cdiv(rows, ROWS) - top, BAND)
    first_row = (top + tl.program_id(0) % band % height) * ROWS
    first_column = tl.program_id(0) % band // height * COLUMNS
    r = first_row + tl.arange(0, ROWS)
    c = first_column + tl.arange(0, COLUMNS)
    t = tl.arange(0, TOKENS)
    dy_at = dy + r.to(tl.int64)[:, None] * dy_row
    x_at = x + c.to(tl.int64)[None, :] * x_column
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, tokens, TOKENS):
        token = (first + t).to(tl.int64)
        a = tl.load(dy_at + token[None, :] * dy_token, mask=(r < rows)[:, None] & (token < tokens)[None, :], other=0.0)
        b = tl.load(x_at + token[:, None] * x_token, mask=(token < tokens)[:, None] & (c < columns)[None, :], other=0.0)
        if _INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if STORED:
        grad_at = grad + r.to(tl.int64)[:, None] * grad_row + c.to(tl.int64)[None, :] * grad_column
        acc += tl.load(grad_at, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0).to(tl.float32)
    update = (w, values, scales, factor, row, key, nonfinite, offset)
    _step_parts(
        acc, first_row, first_column, rows, columns, update,
        TILE, SCALARS, KINDS, STOCHASTIC, WIDTH, PART, ALIGNED,
    )  # fmt: skip


def apply_factors(update: Update, factors: Sequence[Factors], grad: Tensor | None) -> None:
    """Take one step on dW = sum of dYᵀ x over `factors`, plus `grad` if a part of the sum is stored.

    Args:
        update: Weight [rows, columns], float32 or bf16; what is not contiguous is copied.
        factors: Pairs (dY [tokens, rows], x [tokens, columns]), bf16, fp16 or float32, any strides; no tokens are a
            zero gradient. float32 products are exact unless ``torch.backends.cuda.matmul.allow_tf32``.
        grad: [rows, columns], any float dtype and strides, or None.
    """
    dy, x = join(factors)
    if dy.dtype != x.dtype:
        dtype = torch.promote_types(dy.dtype, x.dtype)
        dy, x = dy.to(dtype), x.to(dtype)
    rows, columns = update.weight.shape
    if not rows * columns:
        return
    call = blocks.arguments(update)
    stored = grad if grad is not None else dy
    weight_gradient_update[(triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS),)](
        dy,
        x,
        stored,
        *call.tensors,
        rows,
        columns,
        len(x),
        call.offset,
        *dy.stride(),
        *x.stride(),
        *stored.stride(),
        **call.constants,
        STORED=grad is not None,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TOKENS=32,
        BAND=BAND,
        WIDTH=blocks.width(update),
        ALIGNED=blocks.aligned(update, columns),
        PART=PART,
        num_warps=8,
        num_stages=3,
    )
    call.write_back()
