"""The update of an embedding table in one kernel: rows sum their tokens in registers, then take their step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import blocks, launch
from lightning_memopt.kernels.embedding import Segments
from lightning_memopt.kernels.launch import Call
from lightning_memopt.kernels.memory import gradient_key
from lightning_memopt.kernels.update import Update

# Weights of a tile, and tokens that a row sums at once. Most rows have few tokens or none.
WEIGHTS, TOKENS = 1024, 4


@triton.jit(do_not_specialize=["padding", "offset"])
def embedding_update(
    order, bounds, dy, w, values, scales, factor, row, key, nonfinite,
    rows, columns, padding, offset, dy_token, dy_column,
    TILE: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
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
    if factor is not None:
        factor += place[1]
    blocks.step(
        acc, start, place, valid, w, values, scales, factor, row, key, nonfinite, offset, ALIGNED,
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
    if not update.weight.numel():
        return
    memory, operands = update.memory, (tokens.order, tokens.bounds, dy)
    key = ("look-up", padding_idx, dy.stride(), *(gradient_key(operand, "") for operand in operands))
    repeat = None if memory is None else memory.recall(update, key)
    if repeat is not None and repeat(*operands):
        return
    given = blocks.arguments(update)
    launched = call(update, operands, padding_idx, given)
    compiled = launched.run()
    given.write_back()
    if memory is not None and not given.copies and not torch.cuda.is_current_stream_capturing():
        repeat = launch.prepare(launched, compiled)
        if repeat is not None:
            memory.keep(key, repeat)


def call(
    update: Update, operands: tuple[Tensor, Tensor, Tensor], padding_idx: int | None, given: blocks.Arguments
) -> Call:
    """The launch of one step on order, bounds and dY, with the arguments that `blocks` gives."""
    rows, columns = update.weight.shape
    width = blocks.width(update)
    height = WEIGHTS // width
    padding = -1 if padding_idx is None else padding_idx
    arguments = (*operands, *given.tensors, rows, columns, padding, given.offset, *operands[2].stride())
    aligned = blocks.aligned(update, columns)
    constants = given.constants | {"ROWS": height, "TOKENS": TOKENS, "WIDTH": width, "ALIGNED": aligned, "num_warps": 4}
    return Call(embedding_update, triton.cdiv(rows, height) * triton.cdiv(columns, width), arguments, constants, 3)
