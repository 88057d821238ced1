# mypy: ignore-errors
# Device code, whose types are Triton's.
"""Weight and moments on their way through shared memory, a piece at a time, for both Hopper kernels.

A piece is a quarter of a tile: a chunk [CHUNK, CHUNK] or, where tiles are handed over, a strip of whole rows with as
many weights. The four of a tile are numbered row by row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from lightning_memopt.kernels.hopper_matmul import TILE_COLUMNS, TILE_ROWS, corner, tile_count
from lightning_memopt.kernels.hopper_step import CHUNK

# Pieces of a tile; blocks of codes in one of its rows; rows of a piece that is a strip.
PIECES = TILE_ROWS * TILE_COLUMNS // CHUNK**2
BLOCKS = TILE_COLUMNS // CHUNK
STRIP = TILE_ROWS // PIECES
# How scales and factors lie in shared memory: one after the other.
PLAIN = gl.SwizzledSharedLayout(1, 1, 1, [0])
_CHUNK, _PIECES, _BLOCKS, _STRIP = (gl.constexpr(count) for count in (CHUNK, PIECES, BLOCKS, STRIP))


@gluon.jit
def piece_offset(c, STRIPS: gl.constexpr):
    """Row and column, in its tile, at which the `c`-th piece begins."""
    if STRIPS:
        return c * _STRIP, 0
    else:
        return c // _BLOCKS * _CHUNK, c % _BLOCKS * _CHUNK


@gluon.jit
def _fetch(tensors, rings, ready, slot, row, column, BYTES: gl.constexpr):
    """Ask for a piece of weight and moments, into a slot of their rings."""
    mbarrier.expect(ready.index(slot), BYTES)
    for i in gl.static_range(len(tensors)):
        tma.async_copy_global_to_shared(tensors[i], [row, column], ready.index(slot), rings[i].index(slot))


@gluon.jit
def stream(
    tensors, rings, ready, done, down, across, group,
    BYTES: gl.constexpr, LAG: gl.constexpr, STRIPS: gl.constexpr,
):  # fmt: skip
    """Fetch pieces; once one is updated in place, write it back; reuse its slot `LAG` pieces later."""
    COUNT: gl.constexpr = len(tensors)
    slots: gl.constexpr = rings[0].type.shape[0]
    total = tile_count(down, across) * _PIECES
    # First row and column of the tile to write back to, and of the one to fetch from.
    row, column = 0, 0
    next_row, next_column = 0, 0
    for n in range(gl.minimum(slots, total)):
        if n % _PIECES == 0:
            next_row, next_column = corner(n // _PIECES, down, across, group)
        r, k = piece_offset(n % _PIECES, STRIPS)
        _fetch(tensors, rings, ready, n, next_row + r, next_column + k, BYTES)
    for e in range(total):
        slot, n = e % slots, e + slots - LAG
        # Before a wait rather than after it.
        if e % _PIECES == 0:
            row, column = corner(e // _PIECES, down, across, group)
        if n % _PIECES == 0:
            next_row, next_column = corner(n // _PIECES, down, across, group)
        r, k = piece_offset(e % _PIECES, STRIPS)
        next_r, next_k = piece_offset(n % _PIECES, STRIPS)
        mbarrier.wait(done.index(slot), (e // slots) & 1)
        for i in gl.static_range(COUNT):
            tma.async_copy_shared_to_global(tensors[i], [row + r, column + k], rings[i].index(slot))
        if (n >= slots) & (n < total):
            tma.store_wait(pendings=COUNT * LAG)
            _fetch(tensors, rings, ready, n % slots, next_row + next_r, next_column + next_k, BYTES)
    tma.store_wait(pendings=0)
