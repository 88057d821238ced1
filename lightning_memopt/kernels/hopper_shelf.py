# mypy: ignore-errors
# Device code, whose types are Triton's.
"""Weight gradient and update in one kernel for Hopper GPUs, with warps that only update: for long updates, few tokens.

Where a tile's matmul is short, the four warps that formed a tile take much longer to update it than to form the next
(`kernels.hopper_kernel`). Here they hand it over to eight others: while these update one tile, the next one is formed.
The roles of a program, one per multiprocessor:

    operands    one warp; keeps a ring of dY and x stages full, by TMA
    products    four warps; form tiles of dW and put them on the shelf in shared memory, a half at a time
    updates     eight warps; take a strip of a half, a quarter of the tile, and step its weight and moments in place
    stream      one warp; brings strips of weight and moments into a second ring by TMA, and takes them back
    scales      one warp; the same for the scales of coded moments, which are too few for TMA

The updating warps read and write shared memory only: before a strip is given back they wait for all that they have
under way, which would include what they had asked of global memory.

Shapes need not be multiples of the tile: TMA reads zeros beyond the edge and writes nothing there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from lightning_memopt.kernels import codes, tiles
from lightning_memopt.kernels.hopper_matmul import (
    HALF,
    TILE_COLUMNS,
    TILE_ROWS,
    corner,
    first_product,
    halves,
    more_products,
    operands,
    tile_count,
    tile_position,
)
from lightning_memopt.kernels.hopper_rings import BLOCKS, PIECES, PLAIN, STRIP, piece_offset, stream
from lightning_memopt.kernels.hopper_step import CHUNK, step, stored

WARPS = 8
HALVES = 2
# How a strip lies in registers as it lies in memory, and as a chunk, each row of which is a block; they are the same.
AS_STRIP = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
AS_CHUNK = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])


def _shelf(rows: int) -> gl.SharedLinearLayout:
    """Rows of a tile in shared memory, so that neither who writes nor who reads them has two lanes at one bank."""
    swizzled = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32 + 4], [0, 64 + 8], [1, 8], [2, 16]]
    return gl.SharedLinearLayout([*swizzled, *([1 << bit, 0] for bit in range(2, rows.bit_length() - 1))])


_SHELF, _SHELF_HALF = gl.constexpr(_shelf(STRIP)), gl.constexpr(_shelf(TILE_ROWS // HALVES))
_ROWS, _COLUMNS, _CHUNK = gl.constexpr(TILE_ROWS), gl.constexpr(TILE_COLUMNS), gl.constexpr(CHUNK)
_STRIP, _PIECES, _BLOCKS, _HALVES = (gl.constexpr(count) for count in (STRIP, PIECES, BLOCKS, HALVES))
_HALF, _AS_STRIP, _AS_CHUNK = gl.constexpr(HALF), gl.constexpr(AS_STRIP), gl.constexpr(AS_CHUNK)
_PLAIN = gl.constexpr(PLAIN)
_OF_A_WARP = gl.constexpr(gl.BlockedLayout([CHUNK // 32], [32], [1], [0]))
_WRITER = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_READER = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
_SIGNED = gl.constexpr(codes.SIGNED)


# ------------------------------------------------------------------------------------------------------------ products
@gluon.jit
def _products(shared, SCALARS: gl.constexpr):
    """The matmul of every tile of this program, handed over with a flag: whether its update may take the fast path."""
    dy_ring, x_ring, full, empty, filled, taken, shelf, flag, down, across, steps, row_ptr, nonfinite_ptr = shared
    stages: gl.constexpr = x_ring.type.shape[0]
    common, own = tiles.scalars(row_ptr, SCALARS)
    plain = tiles.is_plain(common)
    shelf_halves = shelf._reinterpret(gl.float32, [_HALVES, _ROWS // _HALVES, _COLUMNS], _SHELF_HALF)
    i, parity = 0, 1
    for _ in range(gl.program_id(0), down * across, gl.num_programs(0)):
        acc = first_product(i, dy_ring, x_ring, full)
        acc, i = more_products(acc, i, dy_ring, x_ring, full, empty, steps)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((i + stages - 1) % stages), count=1)
        small = tiles.small_enough(gl.sum(gl.sum(acc * acc, 1), 0))
        if not small:
            # 0 * g is NaN for the elements that must be left out, and for no others.
            all_finite = gl.sum(gl.sum(acc * 0.0, 1), 0) == 0.0
            if not all_finite:
                gl.store(nonfinite_ptr, 1)
        upper, lower = halves(acc, 0, _HALF)
        mbarrier.wait(taken.index(0), parity)
        shelf_halves.index(0).store(upper)
        # Who updates reads it once, before the first half is taken.
        flag.store(gl.full([1], gl.where(small & plain, 1, 0), gl.int32, _WRITER))
        mbarrier.arrive(filled.index(0), count=1)
        mbarrier.wait(taken.index(1), parity)
        shelf_halves.index(1).store(lower)
        mbarrier.arrive(filled.index(1), count=1)
        parity ^= 1


# -------------------------------------------------------------------------------------------------------------- scales
@gluon.jit
def _scale_places(c, row, column, rows, columns):
    """Where the scales of the `c`-th strip of the tile at `row` and `column` lie, and which exist."""
    i = gl.arange(0, _CHUNK, _OF_A_WARP)
    first, _ = piece_offset(c, True)
    r, k = row + first + i // _BLOCKS, column + i % _BLOCKS * _CHUNK
    return r * gl.cdiv(columns, _CHUNK) + k // _CHUNK, (r < rows) & (k < columns)


@gluon.jit
def _ask(c, row, column, pointers, rows, columns, KINDS: gl.constexpr):
    at, exist = _scale_places(c, row, column, rows, columns)
    asked = ()
    for i in gl.static_range(len(KINDS)):
        if KINDS[i] >= _SIGNED:
            asked = asked + (gl.load(pointers[i] + at, mask=exist, other=1.0).to(gl.float32),)
        else:
            asked = asked + (at,)
    return asked


@gluon.jit
def _scales(shared, KINDS: gl.constexpr, SLOTS: gl.constexpr):
    """As `stream`, for scales: those of the next strip are asked for while this one's wait for their slot."""
    pointers, rings, ready, done, down, across, group, rows, columns = shared
    total = tile_count(down, across) * _PIECES
    # First row and column of the tile whose scales are taken back, and of the one whose are asked for.
    row, column = 0, 0
    next_row, next_column = corner(0, down, across, group)
    asked = _ask(0, next_row, next_column, pointers, rows, columns, KINDS)
    for e in range(total + SLOTS):
        # When there are no more, the last one's are read again, and not used.
        slot, n, old = e % SLOTS, gl.minimum(e + 1, total - 1), e - SLOTS
        if n % _PIECES == 0:
            next_row, next_column = corner(n // _PIECES, down, across, group)
        later = _ask(n % _PIECES, next_row, next_column, pointers, rows, columns, KINDS)
        if old >= 0:
            if old % _PIECES == 0:
                row, column = corner(old // _PIECES, down, across, group)
            at, exist = _scale_places(old % _PIECES, row, column, rows, columns)
            mbarrier.wait(done.index(slot), (e // SLOTS - 1) & 1)
            for i in gl.static_range(len(KINDS)):
                if KINDS[i] >= _SIGNED:
                    new = rings[i].index(slot).load(_OF_A_WARP)
                    gl.store(pointers[i] + at, new.to(pointers[i].dtype.element_ty), mask=exist)
        if e < total:
            for i in gl.static_range(len(KINDS)):
                if KINDS[i] >= _SIGNED:
                    rings[i].index(slot).store(asked[i])
            mbarrier.arrive(ready.index(slot), count=1)
        asked = later


# ------------------------------------------------------------------------------------------------------------- updates
@gluon.jit
def _chunk(x):
    """A strip as a chunk: only a renaming, which the compiler is made to prove."""
    return gl.convert_layout(x.reshape([_CHUNK, _CHUNK]), _AS_CHUNK, assert_trivial=True)


@gluon.jit
def _strip(x):
    return gl.convert_layout(x.reshape([_STRIP, _COLUMNS]), _AS_STRIP, assert_trivial=True)


@gluon.jit
def _update_strip(
    raw, slot, start, key, rings, scale_rings, common, own,
    TILE: gl.constexpr, KINDS: gl.constexpr, STOCHASTIC: gl.constexpr, ALIGNED: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """One step on a strip of weight and moments, in place in shared memory; see `hopper_step.step`."""
    held = (_chunk(rings[0].index(slot).load(_AS_STRIP)),)
    scales = ()
    for i in gl.static_range(len(KINDS)):
        held = held + (_chunk(rings[i + 1].index(slot).load(_AS_STRIP)),)
        if KINDS[i] >= _SIGNED:
            scales = scales + (scale_rings[i].index(slot).load(gl.SliceLayout(1, _AS_CHUNK)),)
        else:
            scales = scales + (start,)
    w, new, random = step(
        raw, held, scales, start, start, start, key, 1.0, common, own, 0.0,
        TILE, KINDS, STOCHASTIC, ALIGNED, PLAIN, _AS_CHUNK,
    )  # fmt: skip
    rings[0].index(slot).store(_strip(w))
    for i in gl.static_range(len(KINDS)):
        value, scale = stored(new[i], random, 0.0, rings[i + 1].dtype, KINDS[i], STOCHASTIC)
        if KINDS[i] >= _SIGNED:
            scale_rings[i].index(slot).store(scale)
        rings[i + 1].index(slot).store(_strip(value))


@gluon.jit
def _update_tile(
    e, parity, start, key, columns, shelf, filled, taken, rings, scale_rings, ready, done, common, own,
    TILE: gl.constexpr, KINDS: gl.constexpr, STOCHASTIC: gl.constexpr, ALIGNED: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """One step on the tile on the shelf, whose first half is there: the strips from `e` on."""
    slots: gl.constexpr = rings[0].type.shape[0]
    in_half: gl.constexpr = _PIECES // _HALVES
    for c in range(_PIECES):
        slot = e % slots
        if c == in_half:
            mbarrier.wait(filled.index(1), parity)
        raw = _chunk(shelf.index(c).load(_AS_STRIP))
        mbarrier.wait(ready.index(slot), (e // slots) & 1)
        if c % in_half == in_half - 1:
            mbarrier.arrive(taken.index(c // in_half), count=1)
        _update_strip(
            raw, slot, start + c * _STRIP * columns, key, rings, scale_rings, common, own,
            TILE, KINDS, STOCHASTIC, ALIGNED, PLAIN,
        )  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(done.index(slot), count=1)
        e += 1


@gluon.jit
def _updates(
    shared,
    TILE: gl.constexpr, SCALARS: gl.constexpr, KINDS: gl.constexpr, STOCHASTIC: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """The update of every tile of this program."""
    shelf, flag, filled, taken, rings, scale_rings, ready, done, down, across, group, columns = shared[:12]
    offset, row_ptr, key_ptr = shared[12:]
    common, own = tiles.scalars(row_ptr, SCALARS)
    # The random bits depend on the row-major index in the full parameter, modulo 2^32.
    in_strip = gl.arange(0, _CHUNK, gl.SliceLayout(1, _AS_CHUNK))
    starts = in_strip // _BLOCKS * columns + in_strip % _BLOCKS * _CHUNK + offset
    key = gl.load(key_ptr)
    e, parity = 0, 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        tile_row, tile_column = tile_position(tile, down, across, group)
        start = starts + (tile_row * _ROWS * columns + tile_column * _COLUMNS)
        mbarrier.wait(filled.index(0), parity)
        if gl.max(flag.load(_READER), 0) > 0:
            _update_tile(
                e, parity, start, key, columns, shelf, filled, taken, rings, scale_rings, ready, done, common, own,
                TILE, KINDS, STOCHASTIC, ALIGNED, True,
            )  # fmt: skip
        else:
            _update_tile(
                e, parity, start, key, columns, shelf, filled, taken, rings, scale_rings, ready, done, common, own,
                TILE, KINDS, STOCHASTIC, ALIGNED, False,
            )  # fmt: skip
        e += _PIECES
        parity ^= 1


@gluon.jit(do_not_specialize=["row_ptr", "key_ptr", "nonfinite_ptr", "rows", "columns", "tokens", "offset", "group"])
def weight_gradient_handed_over(
    dy, x, w, m0, m1, m2, scale0, scale1, scale2, factor, row_ptr, key_ptr, nonfinite_ptr,
    rows, columns, tokens, offset, group,
    TILE: gl.constexpr, SCALARS: gl.constexpr, KINDS: gl.constexpr, STOCHASTIC: gl.constexpr, ALIGNED: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """As `hopper_kernel.weight_gradient_update`, for rules whose moments no block shares, of which one is coded.

    Args:
        factor: None.
        BYTES: Of one strip of weight and moments.
    """
    moments: gl.constexpr = len(KINDS)
    dy_ring = gl.allocate_shared_memory(dy.dtype, [STAGES, dy.block_type.shape[0], _ROWS], dy.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_type.shape[0], _COLUMNS], x.layout)
    shelf = gl.allocate_shared_memory(gl.float32, [_PIECES, _STRIP, _COLUMNS], _SHELF)
    flag = gl.allocate_shared_memory(gl.int32, [1], _PLAIN)
    tensors = (w, m0, m1, m2)[: moments + 1]
    rings = ()
    for i in gl.static_range(moments + 1):
        rings = rings + (gl.allocate_shared_memory(tensors[i].dtype, [SLOTS, _STRIP, _COLUMNS], tensors[i].layout),)
    scale_rings = ()
    for i in gl.static_range(moments):
        if KINDS[i] >= _SIGNED:
            scale_rings = scale_rings + (gl.allocate_shared_memory(gl.float32, [SLOTS, _CHUNK], _PLAIN),)
        else:
            scale_rings = scale_rings + (flag,)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [_HALVES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [_HALVES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=2)  # weight and moments, and scales
        mbarrier.init(done.index(i), count=1)
    for i in gl.static_range(_HALVES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    down, across = gl.cdiv(rows, _ROWS), gl.cdiv(columns, _COLUMNS)
    steps = gl.cdiv(tokens, x.block_type.shape[0])
    updates = (
        shelf, flag, filled, taken, rings, scale_rings, ready, done, down, across, group, columns,
        offset, row_ptr, key_ptr,
    )  # fmt: skip
    products = (
        dy_ring, x_ring, full, empty, filled, taken, shelf, flag, down, across, steps, row_ptr, nonfinite_ptr,
    )  # fmt: skip
    scales = ((scale0, scale1, scale2), scale_rings, ready, done, down, across, group, rows, columns)
    gl.warp_specialize(
        [
            (_updates, (updates, TILE, SCALARS, KINDS, STOCHASTIC, ALIGNED)),
            (_products, (products, SCALARS)),
            (operands, (dy, x, dy_ring, x_ring, full, empty, down, across, steps, group)),
            (stream, (tensors, rings, ready, done, down, across, group, BYTES, 0, True)),
            (_scales, (scales, KINDS, SLOTS)),
        ],
        [4, 1, 1, 1],
        [184, 40, 40, 40],
    )
