"""One step on blocks of weights in global memory: what every portable kernel does once it has a gradient tile.

A tile is [N, BLOCK]: N blocks of up to `BLOCK` consecutive weights of one row. Weight, moments and codes are contiguous
and share element offsets; scales are indexed by block. How a moment lies in memory is its kind, a constant of the
compiled kernel: a new storage is a number and a line in `kernels.codes`, and a branch in `_load` and `_store` here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import codes, tiles
from lightning_memopt.kernels.update import Update
from lightning_memopt.rules.storage import Dense
from lightning_memopt.rules.storage_8bit import PositiveCodes, SignedCodes

FLOATS = (torch.float32, torch.bfloat16)

_SLOW, _SIGNED = tl.constexpr(codes.SLOW), tl.constexpr(codes.SIGNED)


# ------------------------------------------------------------------------------------------------------------- device
@triton.jit
def _load(values, scales, at, block, valid, KIND: tl.constexpr):
    if KIND <= _SLOW:
        x = tl.load(values + at, mask=valid, other=0.0).to(tl.float32)
    else:
        code = tl.load(values + at, mask=valid, other=0)
        scale = tl.load(scales + block[:, None], mask=block[:, None] >= 0, other=0.0).to(tl.float32)
        x = codes.decode_signed(code, scale) if KIND == _SIGNED else codes.decode_positive(code, scale)
    return x


@triton.jit
def _store(x, values, scales, at, block, valid, random, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    if KIND <= _SLOW:
        if KIND == _SLOW and STOCHASTIC and values.dtype.element_ty == tl.bfloat16:
            tl.store(values + at, tiles.round_bf16(x, tiles.low_bits(random)), mask=valid)
        else:
            tl.store(values + at, x.to(values.dtype.element_ty), mask=valid)
    else:
        # Lanes beyond the end of a row hold at most the smallest live value, so they need no mask here.
        scale = codes.block_scale(tl.max(tl.abs(x), 1))[:, None]
        if KIND == _SIGNED:
            code = codes.encode_signed(x, scale)
        else:
            code = codes.encode_positive(x, scale, tiles.low_bits(random), STOCHASTIC)
        tl.store(values + at, code, mask=valid)
        tl.store(scales + block[:, None], scale.to(scales.dtype.element_ty), mask=block[:, None] >= 0)


@triton.jit
def step(
    raw, start, block, valid, w_ptr, values, scales, row_ptr, key_ptr, nonfinite_ptr, offset,
    TILE: tl.constexpr, SCALARS: tl.constexpr, KINDS: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Take one step of rule `TILE` on a tile, in place; non-finite elements are left out and reported.

    Args:
        raw: float32 [N, BLOCK] gradient; zero where not `valid`.
        start: int64 [N], offset of each block's first weight.
        block: Integer [N], index of each block's scale, negative for blocks that do not exist.
        valid: [N, BLOCK], which lanes are weights.
        w_ptr: The weight, float32 or bf16.
        values, scales: Tuples of pointers to the rule's moments, and to their scales (any pointer where none).
        row_ptr, key_ptr, nonfinite_ptr: `Update.row`, `Update.row_key`, `Update.nonfinite`.
        offset: Low 32 bits of `Update.offset`.
        TILE, SCALARS: The rule's tile function and the number of its scalars.
        KINDS: The kind of each moment, see `kernels.codes`.
        STOCHASTIC: Whether a bf16 weight, bf16 slow moments and positive codes are rounded stochastically.
    """
    common, own = tiles.scalars(row_ptr, SCALARS)
    at = start[:, None] + tl.arange(0, raw.shape[1])[None, :]
    old = tl.load(w_ptr + at, mask=valid, other=0.0).to(tl.float32)
    # The gradient stands in for moments that the rule does not have and never looks at.
    old0, old1, old2 = raw, raw, raw
    if len(KINDS) > 0:
        old0 = _load(values[0], scales[0], at, block, valid, KINDS[0])
    if len(KINDS) > 1:
        old1 = _load(values[1], scales[1], at, block, valid, KINDS[1])
    if len(KINDS) > 2:
        old2 = _load(values[2], scales[2], at, block, valid, KINDS[2])
    w, g = tiles.prepare(old, raw, common)
    w, m0, m1, m2 = TILE(w, g, g * g, old0, old1, old2, own)
    keep = tiles.finite(raw)
    if tl.min(tl.reshape(keep.to(tl.int32), (raw.numel,), can_reorder=True)) == 0:
        tl.store(nonfinite_ptr, 1)
        w = tl.where(keep, w, old)
        m0 = tl.where(keep, m0, old0)
        m1 = tl.where(keep, m1, old1)
        m2 = tl.where(keep, m2, old2)
    random = tiles.random_bits(tl.load(key_ptr), at + offset)
    if STOCHASTIC and w_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(w_ptr + at, tiles.round_bf16(w, tiles.high_bits(random)), mask=valid)
    else:
        tl.store(w_ptr + at, w.to(w_ptr.dtype.element_ty), mask=valid)
    if len(KINDS) > 0:
        _store(m0, values[0], scales[0], at, block, valid, random, KINDS[0], STOCHASTIC)
    if len(KINDS) > 1:
        _store(m1, values[1], scales[1], at, block, valid, random, KINDS[1], STOCHASTIC)
    if len(KINDS) > 2:
        _store(m2, values[2], scales[2], at, block, valid, random, KINDS[2], STOCHASTIC)


# --------------------------------------------------------------------------------------------------------------- host
class Arguments(NamedTuple):
    """An update as `step` takes it."""

    tensors: tuple[Any, ...]  # from `w_ptr` to `nonfinite_ptr`
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
    kept = [storage for storage in update.storage if not isinstance(storage, SignedCodes | PositiveCodes)]
    return all(isinstance(storage, Dense) and update.state[storage.name].dtype in FLOATS for storage in kept)


def in_blocks(update: Update) -> bool:
    """Whether any moment has scales, so that blocks must follow the rows."""
    return any(len(storage.entries()) > 1 for storage in update.storage)


def arguments(update: Update) -> Arguments:
    """The pointers and constants of an update, for launch."""
    values = [update.state[storage.name] for storage in update.storage]
    # A pointer that is never read stands in for the scales of moments that have none.
    scales = [update.state.get(storage.entries()[-1]) for storage in update.storage]
    contiguous = [tensor.contiguous() for tensor in (update.weight, *values)]
    strided = (update.weight, *values)
    copies = tuple((old, new) for old, new in zip(strided, contiguous, strict=True) if old is not new)
    constants = {
        "TILE": tiles.TILES[update.tile],
        "SCALARS": len(update.rule.scalar_names),
        "KINDS": tuple(codes.kind(storage) for storage in update.storage),
        "STOCHASTIC": update.rounding == "stochastic",
    }
    assert update.row is not None and update.row_key is not None and update.nonfinite is not None
    tensors = (
        contiguous[0],
        tuple(contiguous[1:]),
        tuple(scales),
        update.row,
        update.row_key,
        update.nonfinite,
    )
    offset = update.offset & 0xFFFFFFFF
    return Arguments(tensors, offset - (offset >> 31 << 32), constants, copies)
