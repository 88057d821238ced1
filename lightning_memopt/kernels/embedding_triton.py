"""The update of an embedding table in one kernel: rows sum their tokens in registers, then take their step."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import blocks
from lightning_memopt.kernels.embedding import Segments
from lightning_memopt.kernels.update import Update

# Weights of a tile, and tokens that a row sums at once. Most rows have few tokens or none.
WEIGHTS, TOKENS = 1024, 4


@triton.jit(do_not_specialize=["padding", "offset"])
def embedding_update(
    order, bounds, dy, w, values, scales, factor, row, key, nonfinite,
    rows, columns, padding, offset, dy_token, dy_column,
    TILE: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dW[r] = sum of dY[t] over the tokens of row r, and one step of rule `TILE` on every row, in place.

    Args:
        order, bounds: `Segments`.
        dy: [tokens, columns] with its strides.
        padding: Row whose tokens are left out, or -1.
    """
    across = tl.cdiv(columns, WIDTH)
    j = tl.program_id(0) % across
    r = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    c = j * WIDTH + tl.arange(0, WIDTH)
    first = tl.load(bounds + r, mask=r < rows, other=0)
    count = tl.load(bounds + r + 1, mask=r < rows, other=0) - first
    count = tl.where(r == padding, 0, count)
    dy_at = dy + c.to(tl.int64)[None, None, :] * dy_column
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for done in range(0, tl.max(count, 0).to(tl.int32), TOKENS):
        i = done + tl.arange(0, TOKENS)[None, :]
        token = tl.load(order + first[:, None] + i, mask=i < count[:, None], other=0).to(tl.int64)
        mask = (i < count[:, None])[:, :, None] & (c < columns)[None, None, :]
        acc += tl.sum(tl.load(dy_at + token[:, :, None] * dy_token, mask=mask, other=0.0).to(tl.float32), 1)
    valid = (r < rows)[:, None] & (c < columns)[None, :]
    start = r.to(tl.int64) * columns + j * WIDTH
    place = (tl.where(r < rows, r, -1), j * WIDTH + r * 0, columns)
    blocks.step(
        acc, start, place, valid, w, values, scales, factor, row, key, nonfinite, offset,
        TILE, SCALARS, KINDS, STOCHASTIC,
    )  # fmt: skip


def apply_embedding(update: Update, tokens: Segments, dy: Tensor, padding_idx: int | None) -> None:
    """Take one step on the gradient of ``weight[indices]``; see `lightning_memopt.kernels.embedding.apply_embedding`.

    Args:
        update: The table's update.
        tokens: `segments` of the indices.
        dy: [tokens, dim], bf16, fp16 or float32, any strides.
        padding_idx: Row that receives no gradient.
    """
    rows, columns = update.weight.shape
    if not rows * columns:
        return
    call = blocks.arguments(update)
    width = blocks.width(update)
    height = WEIGHTS // width
    embedding_update[(triton.cdiv(rows, height) * triton.cdiv(columns, width),)](
        tokens.order,
        tokens.bounds,
        dy,
        *call.tensors,
        rows,
        columns,
        -1 if padding_idx is None else padding_idx,
        call.offset,
        *dy.stride(),
        **call.constants,
        ROWS=height,
        TOKENS=TOKENS,
        WIDTH=width,
        num_warps=4,
    )
    call.write_back()
