"""The update on many small stored gradients in one launch: what `flat` does, one program for each piece of a tensor.

A row of a table in device memory says where a piece's gradient, weight and moments lie; nothing of it changes from step
to step. Gradients do lie elsewhere in every step, so they are copied to a buffer first, which is one launch more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import blocks, codes, launch, tiles
from lightning_memopt.kernels.flat import WARPS, WEIGHTS
from lightning_memopt.kernels.launch import Call
from lightning_memopt.kernels.update import Update
from lightning_memopt.optim import gefen_columns
from lightning_memopt.rules.storage_8bit import BLOCK

# Columns of the table: number of weights, low 32 bits of the first one's index in the whole parameter, addresses of
# gradient, weight, `Update.row`, `row_key`, `nonfinite`, and of up to three moments.
COLUMNS = 10
_COLUMNS, _ALIGNED = tl.constexpr(COLUMNS), tl.constexpr(tiles.ALIGNED)


@triton.jit
def batch_update(
    table, grad, w, values, row, key, nonfinite,
    TILE: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, STOCHASTIC: tl.constexpr,
    RUNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One step of rule `TILE` on the pieces of `table`, int64 [programs, COLUMNS], of up to `RUNS` * `WIDTH` weights.

    The other pointers are those of one of the updates. They only tell what the addresses in the table point to.
    """
    entry = table + tl.program_id(0) * _COLUMNS
    total, offset = tl.load(entry), tl.load(entry + 1)
    grad = tl.load(entry + 2).to(grad.dtype)
    moments = ()
    for i in tl.static_range(len(KINDS)):
        moments = moments + (tl.load(entry + 7 + i).to(values[i].dtype),)  # type: ignore[assignment]
    start = tl.arange(0, RUNS).to(tl.int64) * WIDTH
    at = start[:, None] + tl.arange(0, WIDTH)[None, :]
    valid = at < total
    g = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
    blocks.step(
        g, start, (tl.where(start < total, 0, -1), start, total), valid,
        tl.load(entry + 3).to(w.dtype), moments, moments, None, tl.load(entry + 4).to(row.dtype),
        tl.load(entry + 5).to(key.dtype), tl.load(entry + 6).to(nonfinite.dtype), offset,
        offset & (_ALIGNED - 1) == 0, TILE, SCALARS, KINDS, STOCHASTIC,
    )  # fmt: skip


def kind(update: Update, grad: Tensor) -> Hashable:
    """What updates of one batch have in common; None for one that none can take."""
    moments = [update.state[storage.name] for storage in update.storage]
    kinds = tuple(codes.kind(storage) for storage in update.storage)
    whole = all(kind <= codes.SLOW for kind in kinds) and gefen_columns.SCALE not in update.state
    if not whole or grad.dtype != update.weight.dtype or not update.weight.numel():
        return None
    if not all(tensor.is_contiguous() for tensor in (update.weight, *moments)):
        return None
    dtypes = (update.weight.dtype, *(moment.dtype for moment in moments))
    return update.tile, codes.tile_scalars(update.rule), kinds, update.rounding, update.weight.device, dtypes


class Batch:
    """The launch for some updates of one `kind`, made once.

    Args:
        updates: Of which nothing but the values of tensors changes.
        grads: Their gradients in this step; others have the same dtype and shapes.
    """

    def __init__(self, updates: Sequence[Update], grads: Sequence[Tensor]) -> None:
        self.updates = tuple(updates)  # what the table points to must live
        sizes = [grad.numel() for grad in grads]
        self.buffer = torch.empty(sum(sizes), dtype=grads[0].dtype, device=grads[0].device)
        parts = self.buffer.split(sizes)
        self.parts = [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)]
        pieces = [piece for update, part in zip(updates, parts, strict=True) for piece in _pieces(update, part)]
        self.table = torch.tensor(pieces, dtype=torch.int64).to(self.buffer.device)
        first = blocks.arguments(updates[0])
        weight, values, _, _, *scalars = first.tensors
        arguments = (self.table, self.buffer, weight, values, *scalars)
        constants = first.constants | {"RUNS": WEIGHTS // BLOCK, "WIDTH": BLOCK, "num_warps": WARPS}
        self.call = Call(batch_update, len(pieces), arguments, constants, operands=0)
        self.repeat: launch.Prepared | None = None

    def step(self, grads: Sequence[Tensor]) -> None:
        """Take one step on gradients of any strides. Non-finite elements are left out and set ``nonfinite``."""
        torch._foreach_copy_(self.parts, list(grads))
        if self.repeat is None:
            self.repeat = launch.prepare(self.call, self.call.run())
        elif not self.repeat():
            self.call.run()


def _pieces(update: Update, grad: Tensor) -> list[list[int]]:
    """The rows of an update in the table."""
    assert update.row is not None and update.row_key is not None and update.nonfinite is not None
    size, moments = update.weight.numel(), [update.state[storage.name] for storage in update.storage]
    scalars = [tensor.data_ptr() for tensor in (update.row, update.row_key, update.nonfinite)]

    def at(tensor: Tensor, start: int) -> int:
        return tensor.data_ptr() + start * tensor.element_size()

    rows = []
    for start in range(0, size, WEIGHTS):
        row = [
            min(WEIGHTS, size - start),
            update.offset + start & 0xFFFFFFFF,
            at(grad, start),
            at(update.weight, start),
        ]
        row += [*scalars, *(at(moment, start) for moment in moments)]
        rows.append(row + [0] * (COLUMNS - len(row)))
    return rows
