"""Updates of sparse weights in Triton: on a stored slab of the gradient, and fused with the matmul that forms it.

A tile is [N, SEGMENT]: N segments of the mask (`lightning_memopt.sparsity.bits`). Its bits are read, an active weight's
entry is the index element of its segment plus the active weights before it, a sum along the tile, and only the entries
of active weights are gathered, updated and written back. A tile without active weights is left at once, in the fused
kernel before its matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import blocks, codes, tiles
from lightning_memopt.kernels.slabs import Factors, join
from lightning_memopt.kernels.update import Update
from lightning_memopt.rules.storage import Dense
from lightning_memopt.sparsity.bits import SEGMENT

# Segments of a program on a stored gradient; rows of a fused tile, and of the part of it that is updated at once (more
# would not fit the registers); height of the bands in which fused tiles are taken, so that operands stay in L2.
SEGMENTS, ROWS, PART_ROWS, BAND = 8, 128, 16, 8

_SLOW = tl.constexpr(codes.SLOW)
# The interpreter's dot is wrong for bf16.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# ------------------------------------------------------------------------------------------------------------- device
@triton.jit
def _store(x, values, entry, active, random, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    if KIND == _SLOW and STOCHASTIC and values.dtype.element_ty == tl.bfloat16:
        tl.store(values + entry, tiles.round_bf16(x, tiles.low_bits(random)), mask=active)
    else:
        tl.store(values + entry, x.to(values.dtype.element_ty), mask=active)


@triton.jit
def step(
    raw, segment, valid, total, w_ptr, values, bits, index, cohort, ages, row_ptr, key_ptr, nonfinite_ptr, offset,
    TILE: tl.constexpr, SCALARS: tl.constexpr, AGED: tl.constexpr, WIDTH: tl.constexpr,
    KINDS: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Take one step of rule `TILE` on the active weights of a tile, in place.

    Args:
        raw: float32 [N, SEGMENT] gradient.
        segment: int [N], number of each segment.
        valid: [N, SEGMENT], which weights `raw` has a gradient for.
        total: Weights of the layer.
        w_ptr: The weight, float32 or bf16.
        values: Tuple of pointers to the rule's moments, one entry per active weight.
        bits, index, cohort, ages: See `lightning_memopt.kernels.active`.
        row_ptr, key_ptr, nonfinite_ptr: `Update.row`, `Update.row_key`, `Update.nonfinite`.
        offset: Low 32 bits of `Update.offset`.
        TILE, SCALARS: The rule's tile function and the number of its scalars.
        AGED: For each scalar its column in `ages`, or 0 where it is the same for all weights.
        WIDTH: Columns of `ages`; the first is the ramp.
        KINDS: The kind of each moment, see `kernels.codes`.
        STOCHASTIC: Whether a bf16 weight and bf16 slow moments are rounded stochastically.
    """
    lanes = tl.arange(0, raw.shape[1])[None, :]
    at = segment.to(tl.int64)[:, None] * raw.shape[1] + lanes
    byte = tl.load(bits + at // 8, mask=at < total, other=0).to(tl.int32)
    flag = (byte >> (lanes % 8)) & 1
    active = (flag != 0) & valid
    exists = segment.to(tl.int64) * raw.shape[1] < total
    entry = tl.load(index + segment, mask=exists, other=0)[:, None] + tl.cumsum(flag, 1) - flag

    common, plain = tiles.scalars(row_ptr, SCALARS)
    age = tl.load(cohort + entry, mask=active, other=0).to(tl.int32) * WIDTH
    ramp = tl.load(ages + age, mask=active, other=1.0)
    own = ()
    for i in tl.static_range(SCALARS):
        if AGED[i] > 0:  # noqa: SIM108
            own = own + (tl.load(ages + age + AGED[i], mask=active, other=1.0),)  # type: ignore[assignment]
        else:
            own = own + (plain[i],)  # type: ignore[assignment]

    old = tl.load(w_ptr + at, mask=active, other=0.0).to(tl.float32)
    old0, old1, old2 = raw, raw, raw
    if len(KINDS) > 0:
        old0 = tl.load(values[0] + entry, mask=active, other=0.0).to(tl.float32)
    if len(KINDS) > 1:
        old1 = tl.load(values[1] + entry, mask=active, other=0.0).to(tl.float32)
    if len(KINDS) > 2:
        old2 = tl.load(values[2] + entry, mask=active, other=0.0).to(tl.float32)
    decayed, g = tiles.prepare(old, raw, common)
    w, m0, m1, m2 = TILE(decayed, g, g * g, old0, old1, old2, (1.0, 1.0, 1.0, 1.0, 1.0), own)
    w = tl.where(ramp == 1.0, w, decayed + (w - decayed) * ramp)

    bad = active & (tiles.finite(raw) == 0)
    if tl.max(tl.reshape(bad.to(tl.int32), (raw.numel,), can_reorder=True)) != 0:
        tl.store(nonfinite_ptr, 1)
    active = active & tiles.finite(raw)
    random = tiles.random_bits(tl.load(key_ptr), at + offset)
    if STOCHASTIC and w_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(w_ptr + at, tiles.round_bf16(w, tiles.high_bits(random)), mask=active)
    else:
        tl.store(w_ptr + at, w.to(w_ptr.dtype.element_ty), mask=active)
    if len(KINDS) > 0:
        _store(m0, values[0], entry, active, random, KINDS[0], STOCHASTIC)
    if len(KINDS) > 1:
        _store(m1, values[1], entry, active, random, KINDS[1], STOCHASTIC)
    if len(KINDS) > 2:
        _store(m2, values[2], entry, active, random, KINDS[2], STOCHASTIC)


@triton.jit(do_not_specialize=["first", "stop", "offset"])
def slab_update(
    grad, first, stop, total, w, values, bits, index, cohort, ages, row, key, nonfinite, offset,
    TILE: tl.constexpr, SCALARS: tl.constexpr, AGED: tl.constexpr, WIDTH: tl.constexpr,
    KINDS: tl.constexpr, STOCHASTIC: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One step on the active ones of the weights [first, stop), whose gradient is `grad`."""
    segment = first // SEGMENT + tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    begin = segment.to(tl.int64) * SEGMENT
    there = begin < total
    count = tl.load(index + segment + 1, mask=there, other=0) - tl.load(index + segment, mask=there, other=0)
    if tl.sum(count, 0) == 0:
        return
    at = begin[:, None] + tl.arange(0, SEGMENT)[None, :]
    valid = (at >= first) & (at < stop)
    g = tl.load(grad + (at - first), mask=valid, other=0.0).to(tl.float32)
    step(
        g, segment, valid, total, w, values, bits, index, cohort, ages, row, key, nonfinite, offset,
        TILE, SCALARS, AGED, WIDTH, KINDS, STOCHASTIC,
    )  # fmt: skip


@triton.jit
def _step_parts(
    acc, first_row, j, rows, columns, update,
    TILE: tl.constexpr, SCALARS: tl.constexpr, AGED: tl.constexpr, WIDTH: tl.constexpr,
    KINDS: tl.constexpr, STOCHASTIC: tl.constexpr, PART_ROWS: tl.constexpr,
):  # fmt: skip
    """Update a tile some rows at a time: all of it at once would not fit the registers."""
    height: tl.constexpr = acc.shape[0]
    width: tl.constexpr = acc.shape[1]
    if height > PART_ROWS:
        upper, lower = tl.split(tl.permute(tl.reshape(acc, (2, height // 2, width)), (1, 2, 0)))
        _step_parts(
            upper, first_row, j, rows, columns, update, TILE, SCALARS, AGED, WIDTH, KINDS, STOCHASTIC, PART_ROWS
        )
        _step_parts(
            lower, first_row + height // 2, j, rows, columns, update,
            TILE, SCALARS, AGED, WIDTH, KINDS, STOCHASTIC, PART_ROWS,
        )  # fmt: skip
    else:
        w, values, bits, index, cohort, ages, row, key, nonfinite, offset = update
        r = first_row + tl.arange(0, height)
        valid = (r < rows)[:, None] & (tl.arange(0, width) >= 0)[None, :]
        step(
            acc, r * (columns // width) + j, valid, rows.to(tl.int64) * columns,
            w, values, bits, index, cohort, ages, row, key, nonfinite, offset,
            TILE, SCALARS, AGED, WIDTH, KINDS, STOCHASTIC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "offset"])
def weight_gradient_update(
    dy, x, w, values, bits, index, cohort, ages, row, key, nonfinite, rows, columns, tokens, offset,
    dy_token, dy_row, x_token, x_column,
    TILE: tl.constexpr, SCALARS: tl.constexpr, AGED: tl.constexpr, WIDTH: tl.constexpr,
    KINDS: tl.constexpr, STOCHASTIC: tl.constexpr, PRECISION: tl.constexpr,
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
    update = (w, values, bits, index, cohort, ages, row, key, nonfinite, offset)
    _step_parts(acc, first_row, j, rows, columns, update, TILE, SCALARS, AGED, WIDTH, KINDS, STOCHASTIC, PART_ROWS)


# --------------------------------------------------------------------------------------------------------------- host
def supports(update: Update) -> bool:
    """Whether these kernels know the dtypes and storages of this update: float32 or bf16, moments without codes."""
    tensors = [update.weight, *(update.state[storage.name] for storage in update.storage)]
    return (
        all(isinstance(storage, Dense) for storage in update.storage)
        and all(tensor.dtype in blocks.FLOATS for tensor in tensors)
        and update.weight.is_contiguous()
        and update.weight.numel() < 1 << 31
    )


def apply_slab(update: Update, grad: Tensor, first_row: int) -> None:
    """Take one step on the gradient [rows, columns] of the rows from `first_row` on; any float dtype and strides."""
    columns = update.weight.shape[1]
    first, stop = first_row * columns, (first_row + len(grad)) * columns
    if first == stop:
        return
    segments = -(-stop // SEGMENT) - first // SEGMENT
    tensors, offset, constants = _arguments(update)
    slab_update[(triton.cdiv(segments, SEGMENTS),)](
        grad.contiguous(),
        first,
        stop,
        update.weight.numel(),
        *tensors,
        offset,
        **constants,
        SEGMENTS=SEGMENTS,
        SEGMENT=SEGMENT,
        num_warps=4,
    )


def fuses(update: Update) -> bool:
    """Whether `apply_factors` takes this update: segments must not cross rows."""
    return update.weight.shape[1] % SEGMENT == 0


def apply_factors(update: Update, factors: Sequence[Factors]) -> None:
    """Take one step on dW = sum of dYᵀ x over `factors`: bf16, fp16 or float32, any strides."""
    dy, x = join(factors)
    if dy.dtype != x.dtype:
        dtype = torch.promote_types(dy.dtype, x.dtype)
        dy, x = dy.to(dtype), x.to(dtype)
    rows, columns = update.weight.shape
    tensors, offset, constants = _arguments(update)
    weight_gradient_update[(triton.cdiv(rows, ROWS) * (columns // SEGMENT),)](
        dy,
        x,
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


def _arguments(update: Update) -> tuple[tuple[Any, ...], int, dict[str, Any]]:
    """Pointers from `w_ptr` to `nonfinite_ptr`, offset, and constants of `step`."""
    active = update.active
    assert active is not None and active.ages.table is not None
    assert update.row is not None and update.row_key is not None and update.nonfinite is not None
    names = codes.tile_scalars(update.rule)
    constants = {
        "TILE": tiles.TILES[update.tile],
        "SCALARS": len(names),
        "AGED": tuple(active.ages.names.index(name) + 1 if name in active.ages.names else 0 for name in names),
        "WIDTH": 1 + len(active.ages.names),
        "KINDS": tuple(codes.kind(storage) for storage in update.storage),
        "STOCHASTIC": update.rounding == "stochastic",
    }
    values = tuple(update.state[storage.name] for storage in update.storage)
    mask = (active.bits, active.index, active.cohort, active.ages.table)
    offset = update.offset & 0xFFFFFFFF
    tensors = (update.weight, values, *mask, update.row, update.row_key, update.nonfinite)
    return tensors, offset - (offset >> 31 << 32), constants
