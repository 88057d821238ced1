"""An update of a sparse weight as its Triton kernels take it: which they support, pointers and constants, ages."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.kernels import blocks, codes, tiles
from lightning_memopt.kernels.active import Ages
from lightning_memopt.kernels.sparse_tile import COHORTS
from lightning_memopt.kernels.update import Update
from lightning_memopt.optim.gefen_learning import CODEBOOK
from lightning_memopt.rules.gefen import BlockMean
from lightning_memopt.rules.storage import Dense
from lightning_memopt.rules.storage_8bit import Codes
from lightning_memopt.sparsity.bits import SEGMENT
from lightning_memopt.sparsity.spans import length_of

# The widest spans that a program takes.
WIDEST = 4096


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
        and max(lengths(update), default=0) <= WIDEST
        and all(tensor.dtype in blocks.FLOATS for tensor in (update.weight, *dense))
        and update.weight.is_contiguous()
        and update.weight.numel() < 1 << 31
        and update.active is not None
        and update.active.bits.data_ptr() % 16 == 0
    )


def lengths(update: Update) -> tuple[int, ...]:
    """For each moment the number of weights in its spans, a power of two; anything where it has none."""
    lengths, columns = [], update.weight.shape[1]
    for storage in update.storage:
        counts = [update.state[key].shape[1] for key in storage.per_block()]
        lengths.append(length_of(columns, counts[0]) if counts else 1)
    # A row that is one span may be taken to be longer.
    width = max([SEGMENT, *lengths])
    return tuple(width if length >= columns else length for length in lengths)


def entries_of(mean: float) -> tuple[int, int]:
    """How many entries nearly all runs have at most, if they have `mean` on average: one power of two and another."""
    most = mean + 2.8 * sqrt(mean)
    first = 32
    while 2 * first <= most:
        first *= 2
    second = 32
    while second < min(first, most - first):
        second *= 2
    return first, second


def by_slope(ages: Ages, tile: str) -> bool:
    """Whether ages reach the rule's tile function as what it divides by, so that no weight needs a division for it."""
    return tile == "adam" and "step_size" in ages.names


def ages_table(ages: Ages, tile: str, scalars: Mapping[str, float]) -> Tensor:
    """The table of ages on the host, float32: `COHORTS` numbers for each column, and whether any weight warms up.

    The first column is the ramp, the others are the scalars of the tile function that depend on the age. The last
    number has three more behind it, so that where tables follow each other all begin at multiples of 16 bytes.

    Args:
        ages: Of a weight.
        tile: Name of its rule's tile function.
        scalars: Of its update, see `lightning_memopt.kernels.Update`.
    """
    rows = torch.tensor(ages.rows, dtype=torch.float32, device="cpu")
    values = [rows[:, 0], *rows[:, 1:].unbind(1)]
    if by_slope(ages, tile):
        own = dict(zip(ages.names, values[1:], strict=True))
        step = own["step_size"]
        plain = {
            name: torch.tensor(scalars[name], dtype=torch.float32, device="cpu") for name in ("inv_sqrt_bias2", "eps")
        }
        bias, eps = (own.get(name, value) for name, value in plain.items())
        some = step > tiles.NO_STEP
        values[1:] = [torch.where(some, bias / step, 1.0), torch.where(some, eps / step, float("inf"))]
    table = torch.zeros(len(values) * COHORTS + 4, device="cpu")
    for column, value in enumerate(values):
        table[column * COHORTS : column * COHORTS + len(value)] = value
    table[len(values) * COHORTS] = (values[0] != 1.0).any()
    return table


def arguments(update: Update) -> tuple[Tensor, tuple[Any, ...], int, dict[str, Any]]:
    """Table of ages, tensors from the weight to `nonfinite`, offset, and constants of a step."""
    active = update.active
    assert active is not None and active.ages.table is not None
    assert update.row is not None and update.row_key is not None and update.nonfinite is not None
    names = codes.tile_scalars(update.rule)
    aged = tuple(active.ages.names.index(name) + 1 if name in active.ages.names else 0 for name in names)
    slope = by_slope(active.ages, update.tile)
    constants = {
        "TILE": tiles.adam_by_slope if slope else tiles.TILES[update.tile],
        "SCALARS": len(names),
        "AGED": (0, 0, 0, 1, 2) if slope else aged,
        "COLUMNS": len(active.ages.table) // COHORTS,
        "KINDS": tuple(codes.kind(storage) for storage in update.storage),
        "LENGTHS": lengths(update),
        "STOCHASTIC": update.rounding == "stochastic",
    }
    values = tuple(update.state[storage.name] for storage in update.storage)
    mask = (active.bits, active.index, active.cohort)
    offset = update.offset & 0xFFFFFFFF
    tensors = (update.weight, values, blocks.scales(update), *mask, update.row, update.row_key, update.nonfinite)
    return active.ages.table, tensors, offset - (offset >> 31 << 32), constants
