"""Updates of sparse weights in Triton: on a stored slab of the gradient, and fused with the matmul that forms it.

A tile is [N, WIDTH]: N runs of consecutive weights. The bits of the mask (`lightning_memopt.sparsity.bits`) are read,
an active weight's entry is what the index says of the segment that its run begins in plus the active weights from there
on, a sum along the tile, and only the entries of active weights are gathered, updated and written back. A tile without
active weights is left at once, in the fused kernel before its matmul.

Moments without blocks take runs of a segment, whatever the rows. 8-bit moments have blocks, the active weights in a
span of a row (`lightning_memopt.sparsity.spans`); there a run is as wide as the widest span and lies in one row, so
that a tile holds whole blocks and decodes, steps and encodes them on its own, by the functions of `kernels.blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import blocks, codes, tiles
from lightning_memopt.kernels.launch import Call, prepare
from lightning_memopt.kernels.memory import gradient_key
from lightning_memopt.kernels.slabs import Factors, join
from lightning_memopt.kernels.update import Update
from lightning_memopt.optim.gefen_learning import CODEBOOK
from lightning_memopt.rules.gefen import BlockMean
from lightning_memopt.rules.storage import Dense
from lightning_memopt.rules.storage_8bit import Codes
from lightning_memopt.sparsity.bits import SEGMENT
from lightning_memopt.sparsity.spans import length_of

# Weights of a program on a stored gradient; the widest spans that one takes; rows of a fused tile, and of the part of
# it that is updated at once (more would not fit the registers); height of the bands in which fused tiles are taken, so
# that operands stay in L2.
WEIGHTS, WIDEST, ROWS, PART_ROWS, BAND = 1024, 4096, 128, 16, 8

_SEGMENT = tl.constexpr(SEGMENT)
_CURVE, _MEAN = tl.constexpr(codes.CURVE), tl.constexpr(codes.MEAN)
# The interpreter's dot is wrong for bf16.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# ------------------------------------------------------------------------------------------------------------- device
@triton.jit
def _entries_before(bits, index, start, exists, ALIGNED: tl.constexpr):
    """Active weights before each of the weights `start` [N]; of those that are not all first of a segment, counted."""
    segment = start // _SEGMENT
    count = tl.load(index + segment, mask=exists, other=0)
    if not ALIGNED:
        # What lies before the weight in each byte of its segment.
        before = (start % _SEGMENT).to(tl.int32)[:, None] - tl.arange(0, _SEGMENT // 8)[None, :] * 8
        at = segment[:, None] * (_SEGMENT // 8) + tl.arange(0, _SEGMENT // 8)[None, :]
        byte = tl.load(bits + at, mask=exists[:, None] & (before > 0), other=0).to(tl.int32)
        byte &= (1 << tl.minimum(tl.maximum(before, 0), 8)) - 1
        byte -= (byte >> 1) & 0x55
        byte = (byte & 0x33) + ((byte >> 2) & 0x33)
        count += tl.sum((byte + (byte >> 4)) & 0xF, 1)
    return count


@triton.jit
def step(
    raw, start, place, valid, total, update,
    TILE: tl.constexpr, SCALARS: tl.constexpr, AGED: tl.constexpr, COLUMNS: tl.constexpr,
    KINDS: tl.constexpr, LENGTHS: tl.constexpr, ALIGNED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Take one step of rule `TILE` on the active weights of a tile, in place.

    A non-finite gradient of an active weight is left out, with what the weight's moments were, and reported; it does
    not count in a second moment that its block shares, which stays as it is where no other is left.

    Args:
        raw: float32 [N, WIDTH] gradient.
        start: int64 [N], number of the first weight of each run.
        place: Row, column and row length of each run, as `kernels.blocks.step` takes them.
        valid: [N, WIDTH], which weights `raw` has a gradient for.
        total: Weights of the layer.
        update: The weight, float32 or bf16; tuples of pointers to the rule's moments, which have one entry per active
            weight or one value per block, and to their scales (any pointer where none); bits, index and cohort
            (`lightning_memopt.kernels.active`); `Update.row`, `Update.row_key`, `Update.nonfinite`; the low 32 bits of
            `Update.offset`; and `Ages.table`.
        TILE, SCALARS: The rule's tile function and the number of its scalars.
        AGED: For each scalar its column in `ages`, or 0 where it is the same for all weights.
        COLUMNS: Columns of `ages`; the first is the ramp.
        KINDS: The kind of each moment, see `kernels.codes`.
        LENGTHS: Weights in each moment's spans, divisors of WIDTH; anything for one without.
        ALIGNED: Whether all runs begin where a segment does.
        STOCHASTIC: Whether a bf16 weight, bf16 slow moments and positive codes are rounded stochastically.
    """
    w_ptr, values, scales, bits, index, cohort, row_ptr, key_ptr, nonfinite_ptr, offset, ages = update
    WIDTH: tl.constexpr = raw.shape[1]
    SHARED: tl.constexpr = len(KINDS) > 1 and KINDS[1] == _MEAN
    lanes = tl.arange(0, WIDTH)[None, :]
    at = start[:, None] + lanes
    byte = tl.load(bits + at // 8, mask=at < total, other=0).to(tl.int32)
    flag = (byte >> (at % 8).to(tl.int32)) & 1
    active = (flag != 0) & valid
    entry = _entries_before(bits, index, start, start < total, ALIGNED)[:, None] + tl.cumsum(flag, 1) - flag

    common, plain = tiles.scalars(row_ptr, SCALARS)
    bend = 0.0
    if len(KINDS) > 0 and KINDS[0] == _CURVE:
        bend = tiles.next_scalar(row_ptr, SCALARS)
    age = tl.load(cohort + entry, mask=active, other=0).to(tl.int32) * COLUMNS
    ramp = tl.load(ages + age, mask=active, other=1.0)
    own = ()
    for i in tl.static_range(SCALARS):
        if AGED[i] > 0:  # noqa: SIM108
            own = own + (tl.load(ages + age + AGED[i], mask=active, other=1.0),)  # type: ignore[assignment]
        else:
            own = own + (plain[i],)  # type: ignore[assignment]

    # Weights that take no step have neither value nor gradient, so nothing of theirs counts in their block.
    raw = tl.where(active, raw, 0.0)
    old = tl.load(w_ptr + at, mask=active, other=0.0).to(tl.float32)
    old0, old1, old2 = raw, raw, raw
    unit0, unit1, unit2 = 1.0, 1.0, 1.0
    if len(KINDS) > 0:
        old0, unit0 = blocks.load(values[0], scales[0], entry, place, active, bend, KINDS[0], LENGTHS[0])
    if len(KINDS) > 1:
        old1, unit1 = blocks.load(values[1], scales[1], entry, place, active, bend, KINDS[1], LENGTHS[1])
    if len(KINDS) > 2:
        old2, unit2 = blocks.load(values[2], scales[2], entry, place, active, bend, KINDS[2], LENGTHS[2])
    decayed, g = tiles.prepare(old, raw, common)
    keep = codes.below_limit(raw) if SHARED else tiles.finite(raw)
    g2 = g * g
    if SHARED:
        count = blocks.total((active & keep).to(tl.int32), LENGTHS[1])
        mean = codes.block_mean(blocks.total(tl.where(keep, g2, 0.0), LENGTHS[1]), count)
        g2 = blocks.spread(mean, WIDTH, LENGTHS[1])
    w, m0, m1, m2 = TILE(decayed, g, g2, old0, old1, old2, (1.0, 1.0, unit0, unit1, unit2), own)
    w = tl.where(ramp == 1.0, w, decayed + (w - decayed) * ramp)

    if SHARED:
        m1 = tl.where(blocks.spread(count, WIDTH, LENGTHS[1]) > 0, m1, old1)
    # One operation per element tells that all may be kept; only where it does not, each is looked at.
    if tiles.small_enough(tl.sum(tl.sum(raw * raw, 1), 0)) == 0:
        bad = tl.min(tl.reshape(keep.to(tl.int32), (raw.numel,), can_reorder=True)) == 0
        tl.store(nonfinite_ptr, 1, mask=bad)
        w = tl.where(keep, w, old)
        m0 = tl.where(keep, m0, old0 * unit0)
        m1 = m1 if SHARED else tl.where(keep, m1, old1 * unit1)
        m2 = tl.where(keep, m2, old2 * unit2)
    random = blocks.random_bits(tl.load(key_ptr), start, offset, place[2], WIDTH)
    if STOCHASTIC and w_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(w_ptr + at, tiles.round_bf16(w, tiles.high_bits(random)), mask=active)
    else:
        tl.store(w_ptr + at, w.to(w_ptr.dtype.element_ty), mask=active)
    if len(KINDS) > 0:
        blocks.store(m0, values[0], scales[0], entry, place, active, random, bend, KINDS[0], LENGTHS[0], STOCHASTIC)
    if len(KINDS) > 1:
        blocks.store(m1, values[1], scales[1], entry, place, active, random, bend, KINDS[1], LENGTHS[1], STOCHASTIC)
    if len(KINDS) > 2:
        blocks.store(m2, values[2], scales[2], entry, place, active, random, bend, KINDS[2], LENGTHS[2], STOCHASTIC)


@triton.jit(do_not_specialize=["first", "stop", "offset"])
def slab_update(
    grad, ages, first, stop, total, columns, w, values, scales, bits, index, cohort, row, key, nonfinite, offset,
    TILE: tl.constexpr, SCALARS: tl.constexpr, AGED: tl.constexpr, COLUMNS: tl.constexpr,
    KINDS: tl.constexpr, LENGTHS: tl.constexpr, ALIGNED: tl.constexpr, STOCHASTIC: tl.constexpr,
    BY_ROWS: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One step on the active ones of the weights [first, stop), whose gradient is `grad`.

    Runs of `WIDTH` follow each other as if all rows were one, and begin with the one that has the weight `first`,
    unless `BY_ROWS`: then [first, stop) are whole rows of `columns`, and each has its own runs.
    """
    run = tl.program_id(0) * RUNS + tl.arange(0, RUNS)
    if BY_ROWS:
        across = tl.cdiv(columns, WIDTH)
        line, column, length = first // columns + run // across, run % across * WIDTH, columns
        start = line.to(tl.int64) * columns + column
        room = columns - column
    else:
        start = (first // WIDTH + run).to(tl.int64) * WIDTH
        line, column, length = run * 0, start, total
        room = run * 0 + WIDTH
    end = tl.minimum(start + WIDTH, total)
    there = start < total
    before = tl.load(index + start // _SEGMENT, mask=there, other=0)
    count = tl.load(index + tl.cdiv(end, _SEGMENT), mask=there, other=0) - before
    # At least as many as are active in the runs.
    if tl.sum(count, 0) == 0:
        return
    lanes = tl.arange(0, WIDTH)[None, :]
    at = start[:, None] + lanes
    valid = (at >= first) & (at < stop) & (lanes < room[:, None])
    g = tl.load(grad + (at - first), mask=valid, other=0.0).to(tl.float32)
    update = (w, values, scales, bits, index, cohort, row, key, nonfinite, offset, ages)
    step(
        g, start, (tl.where(start < stop, line, -1), column, length), valid, total, update,
        TILE, SCALARS, AGED, COLUMNS, KINDS, LENGTHS, ALIGNED, STOCHASTIC,
    )  # fmt: skip


@triton.jit
def _step_parts(
    acc, first_row, j, rows, columns, update,
    TILE: tl.constexpr, SCALARS: tl.constexpr, AGED: tl.constexpr, COLUMNS: tl.constexpr,
    KINDS: tl.constexpr, LENGTHS: tl.constexpr, STOCHASTIC: tl.constexpr, PART_ROWS: tl.constexpr,
):  # fmt: skip
    """Update a tile some rows at a time: all of it at once would not fit the registers."""
    height: tl.constexpr = acc.shape[0]
    width: tl.constexpr = acc.shape[1]
    if height > PART_ROWS:
        upper, lower = tl.split(tl.permute(tl.reshape(acc, (2, height // 2, width)), (1, 2, 0)))
        _step_parts(
            upper, first_row, j, rows, columns, update,
            TILE, SCALARS, AGED, COLUMNS, KINDS, LENGTHS, STOCHASTIC, PART_ROWS,
        )  # fmt: skip
        _step_parts(
            lower, first_row + height // 2, j, rows, columns, update,
            TILE, SCALARS, AGED, COLUMNS, KINDS, LENGTHS, STOCHASTIC, PART_ROWS,
        )  # fmt: skip
    else:
        r = first_row + tl.arange(0, height)
        valid = (r < rows)[:, None] & (tl.arange(0, width) >= 0)[None, :]
        place = (tl.where(r < rows, r, -1), r * 0 + j * width, columns)
        step(
            acc, r.to(tl.int64) * columns + j * width, place, valid, rows.to(tl.int64) * columns, update,
            TILE, SCALARS, AGED, COLUMNS, KINDS, LENGTHS, True, STOCHASTIC,
        )  # fmt: skip


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
    update = (w, values, scales, bits, index, cohort, row, key, nonfinite, offset, ages)
    _step_parts(
        acc, first_row, j, rows, columns, update, TILE, SCALARS, AGED, COLUMNS, KINDS, LENGTHS, STOCHASTIC, PART_ROWS
    )


# --------------------------------------------------------------------------------------------------------------- host
def supports(update: Update) -> bool:
    """Whether these kernels know the dtypes and storages of this update; all others run in plain torch.

    They know float32 or bf16 weights, moments of the same dtypes and 8-bit ones, but neither codes that are looked up
    in a table, nor factors of columns, nor spans of more than `WIDEST` weights.
    """
    dense = [update.state[storage.name] for storage in update.storage if isinstance(storage, Dense)]
    return (
        all(isinstance(storage, Dense | Codes | BlockMean) for storage in update.storage)
        and not (CODEBOOK in update.state and update.state[CODEBOOK].dim())
        and not blocks.has_factors(update)
        and max(_lengths(update), default=0) <= WIDEST
        and all(tensor.dtype in blocks.FLOATS for tensor in (update.weight, *dense))
        and update.weight.is_contiguous()
        and update.weight.numel() < 1 << 31
    )


def _lengths(update: Update) -> tuple[int, ...]:
    """For each moment the number of weights in its spans, a power of two; anything where it has none."""
    lengths, columns = [], update.weight.shape[1]
    for storage in update.storage:
        counts = [update.state[key].shape[1] for key in storage.per_block()]
        lengths.append(length_of(columns, counts[0]) if counts else 1)
    # A row that is one span may be taken to be longer.
    width = max([SEGMENT, *lengths])
    return tuple(width if length >= columns else length for length in lengths)


def apply_slab(update: Update, grad: Tensor, first_row: int) -> None:
    """Take one step on the gradient [rows, columns] of the rows from `first_row` on; any float dtype and strides."""
    active, memory = update.active, update.memory
    assert active is not None and active.ages.table is not None
    if not grad.numel():
        return
    grad = grad.contiguous()
    key = first_row, len(grad), active.ages.names, gradient_key(grad, "slab")
    repeat = memory.recall(update, key) if memory is not None else None
    if repeat is not None and repeat(grad, active.ages.table):
        return
    given = call(update, grad, first_row)
    compiled = given.run()
    if memory is not None and (repeat := prepare(given, compiled)) is not None:
        memory.keep(key, repeat)


def call(update: Update, grad: Tensor, first_row: int) -> Call:
    """The launch of one step on a contiguous gradient; its operands are that and the table of ages."""
    columns = update.weight.shape[1]
    first, stop = first_row * columns, (first_row + len(grad)) * columns
    ages, tensors, offset, constants = _arguments(update)
    by_rows = blocks.in_blocks(update)
    width = max(SEGMENT, *constants["LENGTHS"]) if by_rows else SEGMENT
    count = len(grad) * triton.cdiv(columns, width) if by_rows else triton.cdiv(stop, width) - first // width
    runs = max(1, WEIGHTS // width)
    constants |= {
        "ALIGNED": not by_rows or columns % SEGMENT == 0,
        "BY_ROWS": by_rows,
        "RUNS": runs,
        "WIDTH": width,
        "num_warps": max(4, width // 512),
    }
    arguments = (grad, ages, first, stop, update.weight.numel(), columns, *tensors, offset)
    return Call(slab_update, triton.cdiv(count, runs), arguments, constants, operands=2)


def fuses(update: Update) -> bool:
    """Whether `apply_factors` takes this update: neither segments nor spans may cross its tiles."""
    return update.weight.shape[1] % SEGMENT == 0 and max(_lengths(update), default=0) <= SEGMENT


def apply_factors(update: Update, factors: Sequence[Factors]) -> None:
    """Take one step on dW = sum of dYᵀ x over `factors`: bf16, fp16 or float32, any strides."""
    dy, x = join(factors)
    if dy.dtype != x.dtype:
        dtype = torch.promote_types(dy.dtype, x.dtype)
        dy, x = dy.to(dtype), x.to(dtype)
    rows, columns = update.weight.shape
    ages, tensors, offset, constants = _arguments(update)
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


def _arguments(update: Update) -> tuple[Tensor, tuple[Any, ...], int, dict[str, Any]]:
    """Table of ages, tensors from the weight to `nonfinite`, offset, and constants of `step`."""
    active = update.active
    assert active is not None and active.ages.table is not None
    assert update.row is not None and update.row_key is not None and update.nonfinite is not None
    names = codes.tile_scalars(update.rule)
    constants = {
        "TILE": tiles.TILES[update.tile],
        "SCALARS": len(names),
        "AGED": tuple(active.ages.names.index(name) + 1 if name in active.ages.names else 0 for name in names),
        "COLUMNS": 1 + len(active.ages.names),
        "KINDS": tuple(codes.kind(storage) for storage in update.storage),
        "LENGTHS": _lengths(update),
        "STOCHASTIC": update.rounding == "stochastic",
    }
    values = tuple(update.state[storage.name] for storage in update.storage)
    mask = (active.bits, active.index, active.cohort)
    offset = update.offset & 0xFFFFFFFF
    tensors = (update.weight, values, blocks.scales(update), *mask, update.row, update.row_key, update.nonfinite)
    return active.ages.table, tensors, offset - (offset >> 31 << 32), constants
