"""The update of sparse weights on a stored slab of their gradient.

A program takes one run of consecutive weights and goes through its active ones by their entries, `LANES` at a time, so
that it computes for no others. 8-bit moments have blocks, the active weights in a span of a row
(`lightning_memopt.sparsity.spans`); there a run is as wide as the widest span and lies in one row, and all of its
entries are taken at once, so that a program holds whole blocks and decodes, steps and encodes them on its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import blocks, codes, sparse_find, sparse_tile
from lightning_memopt.kernels.launch import Call, prepare
from lightning_memopt.kernels.memory import gradient_key
from lightning_memopt.kernels.sparse_arguments import arguments, lengths, most_lanes
from lightning_memopt.kernels.update import Update
from lightning_memopt.sparsity.bits import SEGMENT

# Weights of a run without blocks, and entries that a program takes at a time then.
RUN, LANES = 1024, 64
# Runs of a program: on a GPU one, so that no warp waits for another's; the interpreter takes long for each program.
RUNS = 32 if triton.knobs.runtime.interpret else 1

_SEGMENT, _MEAN = tl.constexpr(SEGMENT), tl.constexpr(codes.MEAN)
_WHOLE, _SUMS = tl.constexpr(sparse_tile.WHOLE), tl.constexpr(sparse_tile.SUMS)
_LARGEST, _WRITE = tl.constexpr(sparse_tile.LARGEST), tl.constexpr(sparse_tile.WRITE)


@triton.jit
def _entries(
    grad, first, stop, rank, low, high, segment, line, columns, total, found, given, bits, index, update,
    TILE: tl.constexpr, AGED: tl.constexpr, KINDS: tl.constexpr, LENGTHS: tl.constexpr, STOCHASTIC: tl.constexpr,
    INSIDE: tl.constexpr, WORDS: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    PASS: tl.constexpr,
):  # fmt: skip
    """Step the entries of each run from its `rank`-th on: `LANES` of them or those that are left."""
    entry = low[:, None] + rank + tl.arange(0, LANES)[None, :]
    active = entry < high[:, None]
    # Lanes past the end repeat the last entry, and write nothing.
    entry = tl.minimum(entry, tl.maximum(high - 1, 0)[:, None])
    at = sparse_find.weights(bits, index, entry, segment[:, None], total, WORDS)
    ALONE: tl.constexpr = low.shape[0] == 1
    if not INSIDE:
        active &= (at >= first) & (at < stop)
    # Where a program has several runs, some may be empty.
    raw = sparse_tile.gather(grad, at - first, active, 0.0, not (INSIDE and ALONE)).to(tl.float32)
    place = (line[:, None], at - line[:, None] * columns)
    return sparse_tile.step(
        raw, at, entry, active, place, columns, found, given, update,
        TILE, AGED, KINDS, LENGTHS, WIDTH, STOCHASTIC, not ALONE, PASS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "stop", "runs", "offset"])
def slab_update(
    grad, ages, first, stop, runs, total, columns, w, values, scales, bits, index, cohort, row, key, nonfinite, offset,
    TILE: tl.constexpr, SCALARS: tl.constexpr, AGED: tl.constexpr, COLUMNS: tl.constexpr,
    KINDS: tl.constexpr, LENGTHS: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, INSIDE: tl.constexpr, WORDS: tl.constexpr, BY_ROWS: tl.constexpr,
    RUNS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One step on the active ones of the weights [first, stop), whose gradient is `grad`.

    Args:
        runs: How many there are, of up to `WIDTH` weights.
        ALIGNED: Whether all runs begin where a segment does.
        INSIDE: Whether all runs lie in [first, stop).
        WORDS: See `kernels.sparse_find.weights`.
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
        line = run * 0
        start = (first // WIDTH + run) * WIDTH
        end = tl.minimum(start + WIDTH, total)
    low = sparse_find.entries_before(bits, index, start, total, ALIGNED, WORDS)
    high = sparse_find.entries_before(bits, index, end, total, ALIGNED, WORDS)
    high = tl.where(there, high, low)
    most = tl.max(high - low, 0)
    if most == 0:
        return
    REACH: tl.constexpr = WIDTH // _SEGMENT if ALIGNED else 2 * WIDTH // _SEGMENT
    segment = start // _SEGMENT
    before = sparse_find.counts(index, segment[:, None], total, REACH)
    given = sparse_tile.shared(row, key, ages, SCALARS, COLUMNS, KINDS)
    update = (w, values, scales, cohort, nonfinite, offset, ages)
    found = sparse_tile.none(RUNS, KINDS, LENGTHS, WIDTH)
    if not BY_ROWS:
        for rank in range(0, most, LANES):
            _entries(
                grad, first, stop, rank, low, high, segment, line, columns, total, found, given, bits, before, update,
                TILE, AGED, KINDS, LENGTHS, STOCHASTIC, INSIDE, WORDS, REACH, WIDTH, LANES, _WHOLE,
            )  # fmt: skip
    elif most <= LANES:
        _entries(
            grad, first, stop, 0, low, high, segment, line, columns, total, found, given, bits, before, update,
            TILE, AGED, KINDS, LENGTHS, STOCHASTIC, INSIDE, WORDS, REACH, WIDTH, LANES, _WHOLE,
        )  # fmt: skip
    else:
        if KINDS[1] == _MEAN:
            for rank in range(0, most, LANES):
                squares, number, _, _ = _entries(
                    grad, first, stop, rank, low, high, segment, line, columns, total, found, given, bits, before,
                    update,
                    TILE, AGED, KINDS, LENGTHS, STOCHASTIC, INSIDE, WORDS, REACH, WIDTH, LANES, _SUMS,
                )  # fmt: skip
                found = found[0] + squares, found[1] + number, found[2], found[3]
        for rank in range(0, most, LANES):
            _, _, m0, m1 = _entries(
                grad, first, stop, rank, low, high, segment, line, columns, total, found, given, bits, before, update,
                TILE, AGED, KINDS, LENGTHS, STOCHASTIC, INSIDE, WORDS, REACH, WIDTH, LANES, _LARGEST,
            )  # fmt: skip
            found = found[0], found[1], tl.maximum(found[2], m0), tl.maximum(found[3], m1)
        for rank in range(0, most, LANES):
            _entries(
                grad, first, stop, rank, low, high, segment, line, columns, total, found, given, bits, before, update,
                TILE, AGED, KINDS, LENGTHS, STOCHASTIC, INSIDE, WORDS, REACH, WIDTH, LANES, _WRITE,
            )  # fmt: skip


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
    lanes = min(width, most_lanes(update)) if by_rows else LANES
    programs = triton.cdiv(count, RUNS)
    constants |= {
        "ALIGNED": not by_rows or columns % SEGMENT == 0,
        "INSIDE": by_rows or (first % width == 0 and (stop % width == 0 or stop == total)),
        "WORDS": total % SEGMENT == 0 and active.bits.data_ptr() % 8 == 0,
        "BY_ROWS": by_rows,
        "RUNS": RUNS,
        "WIDTH": width,
        "LANES": lanes,
        "num_warps": max(1, lanes // 128),
    }
    arguments_ = (grad, ages, first, stop, count, total, columns, *tensors, offset)
    return Call(slab_update, programs, arguments_, constants, operands=2)
