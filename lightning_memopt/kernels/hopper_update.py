# mypy: ignore-errors
# Device code, whose types are Triton's.
"""The update of a tile of dW that lies in the registers of a group of four warps, for `kernels.fused_hopper`.

Weight and moments come and go through shared memory a chunk at a time; scales of coded moments and moments that a block
shares are read and written directly, as they are few.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lightning_memopt.kernels import codes
from lightning_memopt.kernels.hopper_matmul import HALF, halves
from lightning_memopt.kernels.hopper_rings import PIECES, piece_offset
from lightning_memopt.kernels.hopper_step import CHUNK, clipped, step, stored

# How a quarter of a tile, which is a chunk, lies in the registers.
QUARTER = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
# Chunks in a turn of the loop over a tile. What is left of dW moves in registers after each turn: three instructions
# per weight for turns of one chunk, one for turns of two. With four, the code is slow to fetch.
TOGETHER = 2
_CHUNK, _PIECES = gl.constexpr(CHUNK), gl.constexpr(PIECES)
_TOGETHER = gl.constexpr(TOGETHER)
_HALF, _QUARTER = gl.constexpr(HALF), gl.constexpr(QUARTER)
_SIGNED, _MEAN = gl.constexpr(codes.SIGNED), gl.constexpr(codes.MEAN)


@gluon.jit
def quarters(x):
    """The chunks of a tile, row by row."""
    upper, lower = halves(x, 0, _HALF)
    x0, x1 = halves(upper, 1, _QUARTER)
    x2, x3 = halves(lower, 1, _QUARTER)
    return x0, x1, x2, x3


@gluon.jit
def row_sums(x):
    """Of each chunk of a tile, the sums of its rows."""
    x0, x1, x2, x3 = quarters(x)
    return gl.sum(x0, 1), gl.sum(x1, 1), gl.sum(x2, 1), gl.sum(x3, 1)


@gluon.jit
def _block_sums(sums, WIDTH: gl.constexpr):
    """Of each chunk of a tile, the sums of the blocks of `WIDTH` that its rows belong to."""
    s0, s1, s2, s3 = sums
    if WIDTH > _CHUNK:
        upper, lower = s0 + s1, s2 + s3
        return upper, upper, lower, lower
    else:
        return s0, s1, s2, s3


@gluon.jit
def _factors(factor, first, columns):
    """Factors of the columns of a chunk, [1, CHUNK]; 1 without any."""
    if factor is None:
        return gl.full([1, _CHUNK], 1.0, gl.float32, _QUARTER)
    else:
        at = first + gl.arange(0, _CHUNK, gl.SliceLayout(0, _QUARTER))
        return gl.load(factor + at, mask=at < columns, other=1.0)[None, :]


@gluon.jit
def _left_out(chunk, factors, common):
    """Of each row of a chunk, the sum of the squared gradients that are to be used, and how many are not."""
    g, keep = clipped(chunk, factors, common)
    return gl.sum(gl.where(keep, g * g, 0.0), 1), gl.sum(gl.where(keep, 0.0, 1.0), 1)


@gluon.jit
def _update_chunk(
    raw, slot, scales, mean, count, scale_ptrs, mask, first_mask, start, key, factors, rings, common, own, bend,
    TILE: gl.constexpr, KINDS: gl.constexpr, STOCHASTIC: gl.constexpr, ALIGNED: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """One step on a chunk of weight and moments, in place in shared memory; see `hopper_step.step`.

    Args:
        scale_ptrs: Where the scales of coded moments, and those that are shared, lie.
        mask: Which rows exist.
        first_mask: Those of them in which a block begins that shares a second moment.
    """
    moments: gl.constexpr = len(KINDS)
    held = (rings[0].index(slot).load(_QUARTER),)
    for i in gl.static_range(moments):
        held = held + (held[0] if KINDS[i] == _MEAN else rings[i + 1].index(slot).load(_QUARTER),)
    w, new, random = step(
        raw, held, scales, mean, count, start, key, factors, common, own, bend,
        TILE, KINDS, STOCHASTIC, ALIGNED, PLAIN, _QUARTER,
    )  # fmt: skip
    rings[0].index(slot).store(w)
    for i in gl.static_range(moments):
        if KINDS[i] == _MEAN:
            # A row's only element; stored as a column, it would be stored once per register that holds a copy.
            gl.store(scale_ptrs[i], gl.max(new[i], 1), mask=first_mask)
        else:
            value, scale = stored(new[i], random, bend, rings[i + 1].dtype, KINDS[i], STOCHASTIC)
            if KINDS[i] >= _SIGNED:
                gl.store(scale_ptrs[i], scale.to(scale_ptrs[i].dtype.element_ty), mask=mask)
            rings[i + 1].index(slot).store(value)


@gluon.jit
def scale_pointers(scale_ptrs, at, shared_at, KINDS: gl.constexpr):
    """Of each moment, pointers to a chunk's scales or shared values; `at` stands in for one that has neither."""
    pointers = ()
    for i in gl.static_range(len(KINDS)):
        if KINDS[i] == _MEAN:
            pointers = pointers + (scale_ptrs[i] + shared_at,)
        else:
            pointers = pointers + ((scale_ptrs[i] + at) if KINDS[i] >= _SIGNED else at,)
    return pointers


@gluon.jit
def read_scales(pointers, mask, KINDS: gl.constexpr):
    """Of each moment, a chunk's scales or shared values."""
    scales = ()
    for i in gl.static_range(len(KINDS)):
        if KINDS[i] >= _SIGNED:
            scales = scales + (gl.load(pointers[i], mask=mask, other=1.0),)
        else:
            scales = scales + (pointers[i],)
    return scales


@gluon.jit
def _moved_up(of_chunks, COUNT: gl.constexpr):
    """What belongs to the chunks of a tile, without the first ones; the last stay where they are, too."""
    return of_chunks[COUNT:] + of_chunks[_PIECES - COUNT :]


@gluon.jit
def update_tile(
    acc, scales, sums, e, starts, key, existing, scale_at, shared_at, columns, row, column, ready, done, next_turn,
    rings, scale_ptrs, factor, nonfinite_ptr, common, own, bend,
    TILE: gl.constexpr, KINDS: gl.constexpr, WIDTH: gl.constexpr, STOCHASTIC: gl.constexpr, ALIGNED: gl.constexpr,
    PLAIN: gl.constexpr,
):  # fmt: skip
    """One step on the chunks `e`, `e` + 1, ... that make up the tile at `row` and `column`.

    Rolled by hand, as code for all chunks at once would not fit into the instruction cache: registers cannot be
    indexed, so what is left of dW moves up instead.

    Args:
        acc: The tile of dW, times its columns' factors.
        sums: Of each chunk, the sums of its rows' squares; looked at where a second moment is shared.
        factor: Pointer to the factors of columns, or None.
        nonfinite_ptr: Set where a second moment is shared; for others the caller knows as much.
        scale_at, shared_at: Of each row of the first chunk, the index of its scale, and of its shared moment.
        WIDTH: Length of the blocks that share a second moment.
    """
    slots: gl.constexpr = rings[0].type.shape[0]
    SHARED: gl.constexpr = len(KINDS) > 1 and KINDS[1] == _MEAN
    TOGETHER: gl.constexpr = _TOGETHER if PLAIN else 1
    scale_row, shared_row = gl.cdiv(columns, _CHUNK), gl.cdiv(columns, WIDTH)
    counts = (existing, existing, existing, existing)
    chunks = quarters(acc)
    if SHARED:
        if PLAIN:
            sums = _block_sums(sums, WIDTH)
        else:
            # In as many turns as there are chunks, each is back in its place.
            counts = sums
            for n in range(_PIECES):
                _, before = piece_offset(n, False)
                total, count = _left_out(chunks[0], _factors(factor, column + before, columns), common)
                chunks, sums, counts = chunks[1:] + chunks[:1], sums[1:] + (total,), counts[1:] + (count,)
            if gl.sum(counts[0] + counts[1] + (counts[2] + counts[3]), 0) > 0:
                gl.store(nonfinite_ptr, 1)
            sums, counts = _block_sums(sums, WIDTH), _block_sums(counts, WIDTH)
    for first in range(0, _PIECES, TOGETHER):
        for j in gl.static_range(TOGETHER):
            c = first + j
            slot = e % slots
            mbarrier.wait(ready.index(slot), (e // slots) & 1)
            if c == _PIECES - 1:
                mbarrier.arrive(next_turn, count=1)
            r, k = piece_offset(c, False)
            start = starts + ((row + r) * columns + column + k)
            at, shared = scale_at + (r * scale_row + k // _CHUNK), shared_at + (r * shared_row + k // WIDTH)
            pointers = scale_pointers(scale_ptrs, at, shared, KINDS)
            mask = (existing > r) & (column + k < columns)
            mean, count, own_factors = sums[j], counts[j], 1.0
            if SHARED:
                size = gl.minimum(columns - column - k // WIDTH * WIDTH, WIDTH)
                if PLAIN:
                    mean = codes.block_mean(sums[j] * common[0] * common[0], size)
                else:
                    count = size - counts[j]
                    mean = codes.block_mean(sums[j], count)
                    own_factors = _factors(factor, column + k, columns)
            _update_chunk(
                chunks[j], slot, scales[j], mean, count, pointers, mask, mask & (k % WIDTH == 0), start, key,
                own_factors, rings, common, own, bend,
                TILE, KINDS, STOCHASTIC, ALIGNED, PLAIN,
            )  # fmt: skip
            fence_async_shared()
            mbarrier.arrive(done.index(slot), count=1)
            e += 1
        chunks, scales = _moved_up(chunks, TOGETHER), _moved_up(scales, TOGETHER)
        sums, counts = _moved_up(sums, TOGETHER), _moved_up(counts, TOGETHER)
