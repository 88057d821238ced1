"""The update on a stored gradient, in one pass over weight, moments and gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import blocks, codes
from lightning_memopt.kernels.launch import Call
from lightning_memopt.kernels.update import Update
from lightning_memopt.rules.storage_8bit import rows_of

# Weights of one program, and its warps: eight a thread. With more, instructions are fewer, but so are the threads that
# wait for memory side by side.
WEIGHTS, WARPS = 512, 2
# Registers of a thread where blocks share a second moment; the compiler would take a fifth more.
REGISTERS = 72


@triton.jit(do_not_specialize=["row", "key", "nonfinite", "offset"])
def flat_update(
    grad, w, values, scales, factor, row, key, nonfinite, total, columns, offset,
    TILE: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, STOCHASTIC: tl.constexpr,
    BY_ROWS: tl.constexpr, WHOLE: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One step of rule `TILE` on `total` weights whose gradient is `grad`.

    Runs of `WIDTH` follow each other without a gap, as if all were one row, unless `BY_ROWS`: then every row of
    `columns` has its own, of which the last may be short. `WHOLE` says that no run of any program is short or missing,
    so that nothing is masked; `ALIGNED`, that they start at multiples of `tiles.ALIGNED` in the full parameter.
    """
    run = tl.program_id(0) * RUNS + tl.arange(0, RUNS)
    lanes = tl.arange(0, WIDTH)[None, :]
    across = tl.cdiv(columns, WIDTH)
    start, first = run.to(tl.int64) * WIDTH, (run % across) * WIDTH
    valid, place = tl.full((RUNS, WIDTH), 1, tl.int1), None
    if not WHOLE and BY_ROWS:
        line = run // across
        start = line.to(tl.int64) * columns + first
        valid = (first[:, None] + lanes < columns) & (start < total)[:, None]
        place = (tl.where(start < total, line, -1), first, columns)
    elif not WHOLE:
        valid = start[:, None] + lanes < total
        place = (tl.where(start < total, run * 0, -1), start, total)
    if factor is not None:
        factor += first
    g = tl.load(grad + (start[:, None] + lanes), mask=valid, other=0.0).to(tl.float32)
    blocks.step(
        g, start, place, valid, w, values, scales, factor, row, key, nonfinite, offset, ALIGNED,
        TILE, SCALARS, KINDS, STOCHASTIC,
    )  # fmt: skip


def apply_gradient(update: Update, grad: Tensor) -> None:
    """Take one step on a gradient of the weight's shape: float32, bf16 or fp16, any strides.

    Tensors that are not contiguous are copied. Non-finite elements are left out and set ``update.nonfinite``.
    """
    if update.weight.numel():
        given = blocks.arguments(update)
        call(update, grad, given).run()
        given.write_back()


def call(update: Update, grad: Tensor, given: blocks.Arguments) -> Call:
    """The launch of one step, with the arguments that `blocks` gives; its operand is the gradient."""
    rows, columns = rows_of(update.weight)
    total = rows * columns
    width = blocks.width(update)
    runs = WEIGHTS // width
    by_rows = blocks.has_factors(update) or (blocks.in_blocks(update) and columns % width != 0)
    count = rows * triton.cdiv(columns, width) if by_rows else triton.cdiv(total, width)
    arguments = (grad.contiguous(), *given.tensors, total, columns, given.offset)
    whole = count * width == total and count % runs == 0
    aligned = blocks.aligned(update, columns if by_rows else 0)
    constants = given.constants | {
        "BY_ROWS": by_rows, "WHOLE": whole, "ALIGNED": aligned, "RUNS": runs, "WIDTH": width, "num_warps": WARPS,
    }  # fmt: skip
    if any(codes.kind(storage) == codes.MEAN for storage in update.storage):
        constants["maxnreg"] = REGISTERS
    return Call(flat_update, triton.cdiv(count, runs), arguments, constants, operands=1)
