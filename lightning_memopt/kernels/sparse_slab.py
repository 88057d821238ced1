"""The update of sparse weights on a stored slab of their gradient.

A program takes one run of consecutive weights and goes through its active ones by their entries, `LANES` at a time, so
that it computes for no others. 8-bit moments have blocks, the active weights in a span of a row
(`lightning_memopt.sparsity.spans`); there a run is as wide as the widest span and lies in one row, and all of its
entries are taken at once, so that a program holds whole blocks and decodes, steps and encodes them on its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import blocks, codes, sparse_find, sparse_tile
from lightning_memopt.kernels.launch import Call, prepare
from lightning_memopt.kernels.memory import gradient_key
from lightning_memopt.kernels.sparse_arguments import arguments, entries_of, lengths
from lightning_memopt.kernels.update import Update
from lightning_memopt.sparsity.bits import SEGMENT

# Weights of a run without blocks, and entries that a program takes at a time then.
RUN, LANES = 1024, 64
# Runs of a program: on a GPU one, so that no warp waits for another's; the interpreter takes long for each program.
RUNS = 32 if triton.knobs.runtime.interpret else 1

_SEGMENT, _MEAN = tl.constexpr(SEGMENT), tl.constexpr(codes.MEAN)


@triton.jit
def _tile(
    grad, rank, runs, given, update,
    AGED: tl.constexpr, KINDS: tl.constexpr, LENGTHS: tl.constexpr, INSIDE: tl.constexpr,
    REACH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The entries of each run from its `rank`-th on: `LANES` of them or those that are left."""
    bits, index, low, high, start, line, column, first, stop, total, columns = runs
    entry = low[:, None] + rank + tl.arange(0, LANES)[None, :]
    active = entry < high[:, None]
    # Lanes past the end repeat the last entry, and write nothing.
    entry = tl.minimum(entry, tl.maximum(high - 1, 0)[:, None])
    at = sparse_find.weights(bits, index, entry, (start // _SEGMENT)[:, None], total, REACH)
    if not INSIDE:
        active &= (at >= first) & (at < stop)
    # Where a program has several runs, some may be empty.
    SEVERAL: tl.constexpr = low.shape[0] > 1
    raw = sparse_tile.gather(grad, at - first, active, 0.0, SEVERAL or not INSIDE).to(tl.float32)
    place = (line[:, None], column[:, None], (low < high)[:, None], at - start[:, None])
    return sparse_tile.read(raw, at, entry, active, place, columns, given, update, AGED, KINDS, LENGTHS, WIDTH, SEVERAL)


@triton.jit(do_not_specialize=["first", "stop", "runs", "offset"])
def slab_update(
    grad, ages, first, stop, runs, total, columns, w, values, scales, bits, index, cohort, row, key, nonfinite, offset,
    TILE: tl.constexpr, SCALARS: tl.constexpr, AGED: tl.constexpr, COLUMNS: tl.constexpr,
    KINDS: tl.constexpr, LENGTHS: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, INSIDE: tl.constexpr, BY_ROWS: tl.constexpr,
    RUNS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """One step on the active ones of the weights [first, stop), whose gradient is `grad`.

    Args:
        runs: How many there are, of up to `WIDTH` weights.
        ALIGNED: Whether all runs begin where a segment does.
        INSIDE: Whether all runs lie in [first, stop).
        BY_ROWS: Whether [first, stop) are whole rows of `columns`, each with its own runs; otherwise runs follow each
            other as if all rows were one, and begin with the one that has the weight `first`.
        RUNS: Of a program.
        LANES: Entries of a run that are taken at a time; with `BY_ROWS`, unless there are more.
    """
    run = tl.program_id(0) * RUNS + tl.arange(0, RUNS)
    there = run < runs
    run = tl.minimum(run, runs - 1)
    if BY_ROWS:
        across = tl.cdiv(columns, WIDTH)
        line, column = first // columns + run // across, run % across * WIDTH
        start = line * columns + column
        end = start + tl.minimum(columns - column, WIDTH)
    else:
        line, column = run * 0, run * 0
        start = (first // WIDTH + run) * WIDTH
        end = start + tl.minimum(total - start, WIDTH)
    low = sparse_find.entries_before(bits, index, start, total, ALIGNED)
    high = sparse_find.entries_before(bits, index, end, total, ALIGNED)
    high = tl.where(there, high, low)
    most = tl.max(high - low, 0)
    if most == 0:
        return
    REACH: tl.constexpr = WIDTH // _SEGMENT if ALIGNED else 2 * WIDTH // _SEGMENT
    given = sparse_tile.shared(row, key, ages, SCALARS, COLUMNS, KINDS)
    update = (w, values, scales, cohort, nonfinite, offset, ages)
    every = (bits, index, low, high, start, line, column, first, stop, total, columns)
    SEVERAL: tl.constexpr = RUNS > 1
    if not BY_ROWS:
        for rank in range(0, most, LANES):
            tile = _tile(grad, rank, every, given, update, AGED, KINDS, LENGTHS, INSIDE, REACH, WIDTH, LANES)
            sparse_tile.step(tile, columns, given, update, TILE, KINDS, LENGTHS, WIDTH, STOCHASTIC, SEVERAL)
    elif most <= LANES:
        tile = _tile(grad, 0, every, given, update, AGED, KINDS, LENGTHS, INSIDE, REACH, WIDTH, LANES)
        sparse_tile.step(tile, columns, given, update, TILE, KINDS, LENGTHS, WIDTH, STOCHASTIC, SEVERAL)
    elif most <= LANES + MORE:
        tile = _tile(grad, 0, every, given, update, AGED, KINDS, LENGTHS, INSIDE, REACH, WIDTH, LANES)
        rest = _tile(grad, LANES, every, given, update, AGED, KINDS, LENGTHS, INSIDE, REACH, WIDTH, MORE)
        total0, number0 = sparse_tile.sums(tile, KINDS, LENGTHS, WIDTH)
        total1, number1 = sparse_tile.sums(rest, KINDS, LENGTHS, WIDTH)
        total0, number0 = sparse_tile.added(total0, total1), sparse_tile.added(number0, number1)
        new, m0, m1 = sparse_tile.compute(tile, total0, number0, TILE, KINDS, LENGTHS, WIDTH)
        new_rest, m2, m3 = sparse_tile.compute(rest, total0, number0, TILE, KINDS, LENGTHS, WIDTH)
        m0, m1 = sparse_tile.larger(m0, m2), sparse_tile.larger(m1, m3)
        sparse_tile.write(tile, new, m0, m1, given, update, KINDS, LENGTHS, STOCHASTIC, SEVERAL)
        sparse_tile.write(rest, new_rest, m0, m1, given, update, KINDS, LENGTHS, STOCHASTIC, SEVERAL)
        sparse_tile.write_blocks(tile, new, m0, m1, columns, update, KINDS, LENGTHS, WIDTH)
    else:
        # Rare: three passes over all entries, which find the sums, find what is largest, and write.
        squares, number, m0, m1 = sparse_tile.nothing(RUNS, KINDS, LENGTHS, WIDTH)
        count = tl.cdiv(most, LANES)
        for i in range(0, 3 * count):
            tile = _tile(
                grad, i % count * LANES, every, given, update, AGED, KINDS, LENGTHS, INSIDE, REACH, WIDTH, LANES
            )
            squares1, number1 = sparse_tile.sums(tile, KINDS, LENGTHS, WIDTH)
            if i < count:
                squares, number = sparse_tile.added(squares, squares1), sparse_tile.added(number, number1)
            new, m2, m3 = sparse_tile.compute(tile, squares, number, TILE, KINDS, LENGTHS, WIDTH)
            if i // count == 1:
                m0, m1 = sparse_tile.larger(m0, m2), sparse_tile.larger(m1, m3)
            if i // count == 2:
                sparse_tile.write(tile, new, m0, m1, given, update, KINDS, LENGTHS, STOCHASTIC, SEVERAL)
            if i == 3 * count - 1:
                tl.debug_barrier()  # all warps have read what is written now
                sparse_tile.write_blocks(tile, new, m0, m1, columns, update, KINDS, LENGTHS, WIDTH)


def apply(update: Update, grad: Tensor, first_row: int) -> None:
    """Take one step on the gradient [rows, columns] of the rows from `first_row` on; any float dtype and strides.

    What is remembered of the update (`Update.memory`) has been looked at for this step.
    """
    active, memory = update.active, update.memory
    assert active is not None and active.ages.table is not None
    if not grad.numel():
        return
    grad = grad.contiguous()
    key = first_row, len(grad), active.ages.names, gradient_key(grad, "slab")
    repeat = memory.get(key) if memory is not None else None
    if repeat is not None and repeat(grad, active.ages.table):
        return
    given = call(update, grad, first_row)
    compiled = given.run()
    if memory is not None and (repeat := prepare(given, compiled)) is not None:
        memory.keep(key, repeat)


def call(update: Update, grad: Tensor, first_row: int) -> Call:
    """The launch of one step on a contiguous gradient; its operands are that and the table of ages."""
    active = update.active
    assert active is not None
    columns, total = update.weight.shape[1], update.weight.numel()
    first, stop = first_row * columns, (first_row + len(grad)) * columns
    ages, tensors, offset, constants = arguments(update)
    by_rows = blocks.in_blocks(update)
    width = max(SEGMENT, *lengths(update)) if by_rows else RUN
    count = len(grad) * triton.cdiv(columns, width) if by_rows else triton.cdiv(stop, width) - first // width
    lanes, more = entries_of(width * len(active.cohort) / total) if by_rows else (LANES, 0)
    means = [
        length for kind, length in zip(constants["KINDS"], constants["LENGTHS"], strict=True) if kind == codes.MEAN
    ]
    if any(length < width for length in means):
        lanes = width  # several means in a run are written by the weights of one tile
    programs = triton.cdiv(count, RUNS)
    constants |= {
        "ALIGNED": not by_rows or columns % SEGMENT == 0,
        "INSIDE": by_rows or (first % width == 0 and (stop % width == 0 or stop == total)),
        "BY_ROWS": by_rows,
        "RUNS": RUNS,
        "WIDTH": width,
        "LANES": lanes,
        "MORE": more,
        "num_warps": max(1, lanes // 128),
    }
    if by_rows and update.weight.is_cuda and torch.cuda.get_device_capability(update.weight.device)[0] == 9:
        # Measured on Hopper: more warps at a time hide more than it costs to keep some values in local memory.
        constants["maxnreg"] = 64 if means else 48
    arguments_ = (grad, ages, first, stop, count, total, columns, *tensors, offset)
    return Call(slab_update, programs, arguments_, constants, operands=2)
