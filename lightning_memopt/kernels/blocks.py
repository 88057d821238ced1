"""One step on blocks of weights in global memory: what every portable kernel does once it has a gradient tile.

A tile is [N, WIDTH]: N runs of up to `WIDTH` consecutive weights of one row, which begin at multiples of `WIDTH` in it.
`WIDTH` is `storage_8bit.BLOCK`, or the length of the blocks that share a second moment if those are longer (`width`).
Weight, moments and codes are contiguous and share element offsets; scales and shared moments have one value per block,
in the order of the weights. How a moment lies in memory is its kind, a constant of the compiled kernel: a new storage
is a number and a line in `kernels.codes`, and a branch in `load` and `store` here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import codes, tiles
from lightning_memopt.kernels.update import Update
from lightning_memopt.optim import gefen_columns
from lightning_memopt.optim.gefen_blocks import Blocks
from lightning_memopt.optim.gefen_learning import CODEBOOK
from lightning_memopt.rules.gefen import BlockMean, LearnedCodes
from lightning_memopt.rules.storage import Dense, Storage
from lightning_memopt.rules.storage_8bit import BLOCK, Codes, PositiveCodes, SignedCodes

FLOATS = (torch.float32, torch.bfloat16)
# The longest blocks that may share a second moment: a tile of the fused kernel is as wide.
WIDEST = 128

_SLOW, _CURVE, _MEAN = tl.constexpr(codes.SLOW), tl.constexpr(codes.CURVE), tl.constexpr(codes.MEAN)
_BLOCK, _SURE = tl.constexpr(BLOCK), tl.constexpr(codes.SURE)


# ------------------------------------------------------------------------------------------------------------- device
@triton.jit
def _blocks(start, place, WIDTH: tl.constexpr, LENGTH: tl.constexpr):
    """Of each block in a tile, [N, WIDTH / LENGTH]: its index, whether it exists, and how many weights it has."""
    within = tl.arange(0, WIDTH // LENGTH)[None, :]
    if place is None:
        index = start[:, None] // LENGTH + within
        return index, tl.full(index.shape, 1, tl.int1), tl.full(index.shape, LENGTH, tl.int32)
    else:
        line, column, columns = place
        first = column[:, None] + within * LENGTH
        index = line.to(tl.int64)[:, None] * tl.cdiv(columns, LENGTH) + first // LENGTH
        return index, (line >= 0)[:, None] & (first < columns), tl.minimum(columns - first, LENGTH)


@triton.jit
def _parts(x, LENGTH: tl.constexpr):
    """[N, blocks, LENGTH] of a tile."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // LENGTH, LENGTH))


@triton.jit
def largest(x, LENGTH: tl.constexpr):
    """The largest magnitude in each block, [N, blocks]."""
    if x.shape[1] == LENGTH:
        return tl.max(tl.abs(x), 1)[:, None]
    else:
        return tl.max(_parts(tl.abs(x), LENGTH), 2)


@triton.jit
def total(x, LENGTH: tl.constexpr):
    """The sum over each block, [N, blocks]."""
    if x.shape[1] == LENGTH:
        return tl.sum(x, 1)[:, None]
    else:
        return tl.sum(_parts(x, LENGTH), 2)


@triton.jit
def spread(values, WIDTH: tl.constexpr, LENGTH: tl.constexpr):
    """One value per block, [N, blocks], so that it broadcasts against the weights."""
    if WIDTH == LENGTH:
        return values
    else:
        parts = tl.broadcast_to(tl.expand_dims(values, 2), (values.shape[0], values.shape[1], LENGTH))
        return tl.reshape(parts, (values.shape[0], WIDTH))


@triton.jit
def load(values, scales, at, start, place, valid, bend, KIND: tl.constexpr, LENGTH: tl.constexpr):
    """A moment, and its unit.

    Args:
        values, scales: Pointers; offsets `at` [N, WIDTH] of those of `values` that are one per weight.
        start, place, valid: As `step` takes them.
        bend: Of the curve.
        KIND: See `kernels.codes`.
        LENGTH: Weights in a block of what has a value per block.
    """
    WIDTH: tl.constexpr = at.shape[1]
    unit = 1.0
    if KIND <= _SLOW:
        x = tl.load(values + at, mask=valid, other=0.0).to(tl.float32)
    elif KIND == _MEAN:
        index, exists, size = _blocks(start, place, WIDTH, LENGTH)
        x = spread(tl.load(values + index, mask=exists, other=0.0), WIDTH, LENGTH)
    else:
        x = codes.decode(tl.load(values + at, mask=valid, other=0), bend, KIND)
        index, exists, size = _blocks(start, place, WIDTH, LENGTH)
        unit = spread(codes.unit(tl.load(scales + index, mask=exists, other=0.0), KIND), WIDTH, LENGTH)
    return x, unit


@triton.jit
def store(
    x, values, scales, at, start, place, valid, random, bend,
    KIND: tl.constexpr, LENGTH: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write a moment; what a block shares may come once per block, or as often as it has weights. See `load`."""
    WIDTH: tl.constexpr = at.shape[1]
    if KIND <= _SLOW:
        if KIND == _SLOW and STOCHASTIC and values.dtype.element_ty == tl.bfloat16:
            tl.store(values + at, tiles.round_bf16(x, tiles.low_bits(random)), mask=valid)
        else:
            tl.store(values + at, x.to(values.dtype.element_ty), mask=valid)
    elif KIND == _MEAN:
        index, exists, size = _blocks(start, place, WIDTH, LENGTH)
        if x.shape[1] == WIDTH:
            x = largest(x, LENGTH)
        tl.store(values + index, x, mask=exists)
    else:
        # Lanes that are no weights hold at most the smallest live value, so they need no mask here.
        block_scale = codes.block_scale(largest(x, LENGTH))
        scale = spread(block_scale, WIDTH, LENGTH)
        tl.store(values + at, codes.encode(x, scale, random, bend, KIND), mask=valid)
        index, exists, size = _blocks(start, place, WIDTH, LENGTH)
        tl.store(scales + index, block_scale.to(scales.dtype.element_ty), mask=exists)


@triton.jit
def _factors(pointers, valid):
    """Of each weight's column."""
    if pointers is None:
        return 1.0
    else:
        return tl.load(pointers[:, None] + tl.arange(0, valid.shape[1])[None, :], mask=valid, other=0.0)


@triton.jit
def _usable(raw, SHARED: tl.constexpr):
    """Which gradient elements take part; computed only where tiles are not plain."""
    return codes.below_limit(raw) if SHARED else tiles.finite(raw)


@triton.jit
def step(
    raw, start, place, valid, w_ptr, values, scales, factor_ptr, row_ptr, key_ptr, nonfinite_ptr, offset, aligned,
    TILE: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Take one step of rule `TILE` on a tile, in place; non-finite elements are left out and reported.

    An element that is left out does not count in its block's mean; a block without any other keeps its second moment.

    Args:
        raw: float32 [N, WIDTH] gradient; zero where not `valid`.
        start: int64 [N], offset of each run's first weight.
        place: Integers [N], the row that each run is in, negative for runs that do not exist; [N], the column it
            begins at; and the length of a row. Without short blocks, all may be taken for one long row. None where no
            run is short or missing.
        valid: [N, WIDTH], which lanes are weights.
        w_ptr: The weight, float32 or bf16.
        values, scales: Tuples of pointers to the rule's moments, and to their scales (any pointer where none).
        factor_ptr: Pointers [N] to the factors of each run's columns, float32, or None.
        row_ptr, key_ptr, nonfinite_ptr: `Update.row`, `Update.row_key`, `Update.nonfinite`.
        offset: Low 32 bits of `Update.offset`.
        aligned: Whether runs start at multiples of `tiles.ALIGNED` in the full parameter, known to the compiler or not.
        TILE, SCALARS: The rule's tile function and the number of its scalars.
        KINDS: The kind of each moment, see `kernels.codes`.
        STOCHASTIC: Whether bf16 weights and bf16 slow moments are rounded stochastically, as positive codes always are.
    """
    SHARED: tl.constexpr = len(KINDS) > 1 and KINDS[1] == _MEAN
    SECOND: tl.constexpr = raw.shape[1] if SHARED else _BLOCK
    common, own = tiles.scalars(row_ptr, SCALARS)
    bend = 0.0
    if len(KINDS) > 0 and KINDS[0] == _CURVE:
        bend = tiles.next_scalar(row_ptr, SCALARS)
    at = start[:, None] + tl.arange(0, raw.shape[1])[None, :]
    old = tl.load(w_ptr + at, mask=valid, other=0.0).to(tl.float32)
    # The gradient stands in for moments that the rule does not have and never looks at.
    old0, old1, old2 = raw, raw, raw
    unit0, unit1, unit2 = 1.0, 1.0, 1.0
    if len(KINDS) > 0:
        old0, unit0 = load(values[0], scales[0], at, start, place, valid, bend, KINDS[0], _BLOCK)
    if len(KINDS) > 1:
        old1, unit1 = load(values[1], scales[1], at, start, place, valid, bend, KINDS[1], SECOND)
    if len(KINDS) > 2:
        old2, unit2 = load(values[2], scales[2], at, start, place, valid, bend, KINDS[2], _BLOCK)
    # Without value clipping and coupled decay nearly all tiles are plain. That is taken for granted, so that no branch
    # keeps a load from being asked for early; one operation per element tells whether it is so.
    w, g = old * common[3], raw * common[0] * _factors(factor_ptr, valid)
    g2 = g * g
    if SHARED:
        sums, sure = tl.sum(g2, 1), common[0] * _SURE
        doubtful = (tiles.is_plain(common) & (tl.sum(sums, 0) < sure * sure)) == 0
        index, exists, count = _blocks(start, place, raw.shape[1], raw.shape[1])
    else:
        doubtful = (tiles.is_plain(common) & tiles.small_enough(tl.sum(tl.sum(raw * raw, 1), 0))) == 0
    if doubtful:
        w, g = tiles.prepare(old, raw, common)
        g *= _factors(factor_ptr, valid)
        g2 = g * g
        if SHARED:
            keep = _usable(raw, SHARED)
            sums = tl.sum(tl.where(keep, g2, 0.0), 1)
            count = tl.sum((keep & valid).to(tl.int32), 1)[:, None].to(count.dtype)
    if SHARED:
        # The tile function computes with one value per block, as often as there are blocks.
        g2 = codes.block_mean(sums[:, None], count)
    w, m0, m1, m2 = TILE(w, g, g2, old0, old1, old2, (1.0, 1.0, unit0, unit1, unit2), own)
    if doubtful:
        keep = _usable(raw, SHARED)
        bad = tl.min(tl.reshape(keep.to(tl.int32), (raw.numel,), can_reorder=True)) == 0
        tl.store(nonfinite_ptr, 1, mask=bad)
        w = tl.where(keep, w, old)
        m0 = tl.where(keep, m0, old0 * unit0)
        m1 = tl.where(count > 0, m1, old1) if SHARED else tl.where(keep, m1, old1 * unit1)
        m2 = tl.where(keep, m2, old2 * unit2)
    random = tiles.random_bits_of_runs(tl.load(key_ptr), start + offset, aligned, raw.shape[1])
    if STOCHASTIC and w_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(w_ptr + at, tiles.round_bf16(w, tiles.high_bits(random)), mask=valid)
    else:
        tl.store(w_ptr + at, w.to(w_ptr.dtype.element_ty), mask=valid)
    if len(KINDS) > 0:
        store(m0, values[0], scales[0], at, start, place, valid, random, bend, KINDS[0], _BLOCK, STOCHASTIC)
    if len(KINDS) > 1:
        store(m1, values[1], scales[1], at, start, place, valid, random, bend, KINDS[1], SECOND, STOCHASTIC)
    if len(KINDS) > 2:
        store(m2, values[2], scales[2], at, start, place, valid, random, bend, KINDS[2], _BLOCK, STOCHASTIC)


# --------------------------------------------------------------------------------------------------------------- host
class Arguments(NamedTuple):
    """An update as `step` takes it."""

    tensors: tuple[Any, ...]  # from `w_ptr` to `nonfinite_ptr`, see `step`
    offset: int
    constants: dict[str, object]
    copies: tuple[tuple[Tensor, Tensor], ...]  # (strided tensor of the update, contiguous stand-in for it)

    def write_back(self) -> None:
        """Copy stand-ins to the tensors they stand for."""
        for strided, contiguous in self.copies:
            strided.copy_(contiguous)


def supports(update: Update) -> bool:
    """Whether the portable kernels know the dtypes and storages of this update, and its weight is dense."""
    if update.active is not None or update.entries is not None or update.weight.dtype not in FLOATS:
        return False
    return all(_supports_storage(update, storage) for storage in update.storage)


def _supports_storage(update: Update, storage: Storage) -> bool:
    if isinstance(storage, SignedCodes | PositiveCodes):
        return True
    if isinstance(storage, LearnedCodes):
        # A learned table is looked up in plain torch: see docs/gefen.md.
        return not update.state[CODEBOOK].dim()
    if isinstance(storage, BlockMean):
        return storage == update.storage[1] and BLOCK <= _shared(update, storage) <= WIDEST
    return isinstance(storage, Dense) and update.state[storage.name].dtype in FLOATS


def _shared(update: Update, storage: BlockMean) -> int:
    """Length of the blocks that share a moment; those of rows with a single block can be taken to be longer."""
    blocks = Blocks.of(update.weight, update.state[storage.name])
    return max(BLOCK, blocks.block) if blocks.count == 1 else blocks.block


def width(update: Update) -> int:
    """Width of the tiles that `step` takes for this update."""
    return max([BLOCK, *(_shared(update, storage) for storage in update.storage if isinstance(storage, BlockMean))])


def in_blocks(update: Update) -> bool:
    """Whether any moment has a value per block, so that blocks must follow the rows."""
    return any(codes.kind(storage) >= codes.SIGNED for storage in update.storage)


def has_factors(update: Update) -> bool:
    """Whether gradients are multiplied by a factor of their column."""
    return gefen_columns.SCALE in update.state


def aligned(update: Update, columns: int) -> bool:
    """Whether rows of `columns` weights start at multiples of `tiles.ALIGNED` in the full parameter."""
    return (update.offset | columns) % tiles.ALIGNED == 0


def scales(update: Update) -> tuple[Tensor, ...]:
    """The scales of each moment; a pointer that is never read stands in for those of moments that have none."""
    names = (storage.scale_name if isinstance(storage, Codes) else storage.name for storage in update.storage)
    return tuple(update.state[name] for name in names)


def arguments(update: Update) -> Arguments:
    """The pointers and constants of an update, for launch."""
    values = [update.state[storage.name] for storage in update.storage]
    contiguous = [tensor.contiguous() for tensor in (update.weight, *values)]
    strided = (update.weight, *values)
    copies = tuple((old, new) for old, new in zip(strided, contiguous, strict=True) if old is not new)
    constants = {
        "TILE": tiles.TILES[update.tile],
        "SCALARS": len(codes.tile_scalars(update.rule)),
        "KINDS": tuple(codes.kind(storage) for storage in update.storage),
        "STOCHASTIC": update.rounding == "stochastic",
    }
    assert update.row is not None and update.row_key is not None and update.nonfinite is not None
    tensors = (
        contiguous[0],
        tuple(contiguous[1:]),
        scales(update),
        update.state.get(gefen_columns.SCALE),
        update.row,
        update.row_key,
        update.nonfinite,
    )
    offset = update.offset & 0xFFFFFFFF
    return Arguments(tensors, offset - (offset >> 31 << 32), constants, copies)
