# mypy: ignore-errors
# Device code, whose types are Triton's.
"""Weight gradient and update in one kernel for Hopper GPUs (compute capability 9.0), in Gluon.

dW = dYᵀ x is formed tile by tile in float32 registers and consumed there; it is never stored. One program per
multiprocessor walks over its tiles with four roles that run side by side:

    operands    one warp; keeps a ring of dY and x stages full, by TMA
    consumers   two groups of four warps; each owns every other tile: wgmma over the tokens, then the update
    stream      one warp; brings weight and moments of the next chunks into a second ring, and takes them back

While one group multiplies, the other updates, so that tensor cores and memory are busy at once. The order in which the
groups use either ring is fixed by two `turn` barriers: a parity wait cannot tell a phase from the one after the next,
so a group may look at a ring only once the other has seen its own last stage of it.

Shapes need not be multiples of the tile: TMA reads zeros beyond the edge and writes nothing there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from lightning_memopt.kernels import codes, tiles
from lightning_memopt.kernels.hopper_matmul import (
    HALF,
    TILE_COLUMNS,
    TILE_ROWS,
    corner,
    first_product,
    more_products,
    operands,
    tile_count,
)
from lightning_memopt.kernels.hopper_rings import PIECES, PLAIN, piece_offset, stream
from lightning_memopt.kernels.hopper_step import CHUNK
from lightning_memopt.kernels.hopper_update import QUARTER, read_scales, row_sums, scale_pointers, update_tile

_ROWS, _COLUMNS = gl.constexpr(TILE_ROWS), gl.constexpr(TILE_COLUMNS)
_CHUNK, _PIECES = gl.constexpr(CHUNK), gl.constexpr(PIECES)
_HALF, _QUARTER = gl.constexpr(HALF), gl.constexpr(QUARTER)
_CURVE, _MEAN = gl.constexpr(codes.CURVE), gl.constexpr(codes.MEAN)
_SURE = gl.constexpr(codes.SURE)
# How a group reads the factors of a tile's columns.
_FACTORS, _PLAIN = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0])), gl.constexpr(PLAIN)


@gluon.jit
def _consume(
    GROUP: gl.constexpr, shared,
    TILE: gl.constexpr, SCALARS: gl.constexpr, KINDS: gl.constexpr, WIDTH: gl.constexpr, STOCHASTIC: gl.constexpr,
    ALIGNED: gl.constexpr,
):  # fmt: skip
    """Every other tile of this program: its matmul while the other group updates, then its update."""
    dy_ring, x_ring, full, empty, turn, rings, ready, done, chunk_turn = shared[:9]
    down, across, steps, group, rows, columns, offset, row_ptr, key_ptr, nonfinite_ptr, scale_ptrs = shared[9:20]
    factor, factors = shared[20:]
    stages: gl.constexpr = x_ring.type.shape[0]
    SHARED: gl.constexpr = len(KINDS) > 1 and KINDS[1] == _MEAN
    common, own = tiles.scalars(row_ptr, SCALARS)
    bend = 0.0
    if len(KINDS) > 0 and KINDS[0] == _CURVE:
        bend = tiles.next_scalar(row_ptr, SCALARS)
    plain = tiles.is_plain(common)
    in_chunk = gl.arange(0, _CHUNK, gl.SliceLayout(1, _QUARTER))
    # The random bits depend on the row-major index in the full parameter, modulo 2^32.
    starts = in_chunk * columns + offset
    key = gl.load(key_ptr)
    scale_row, shared_row = gl.cdiv(columns, _CHUNK), gl.cdiv(columns, WIDTH)
    i = GROUP * steps
    e = GROUP * _PIECES
    parity = 1 - GROUP
    next_row, next_column = corner(GROUP, down, across, group)
    for n in range(GROUP, tile_count(down, across), 2):
        row, column = next_row, next_column
        # Asked for now, so that they are there when the matmul is done.
        existing = rows - row - in_chunk
        scale_at = (row + in_chunk) * scale_row + column // _CHUNK
        shared_at = (row + in_chunk) * shared_row + column // WIDTH
        scales = ()
        for c in gl.static_range(_PIECES):
            r, k = piece_offset(c, False)
            at, shared_c = scale_at + (r * scale_row + k // _CHUNK), shared_at + (r * shared_row + k // WIDTH)
            mask = (existing > r) & (column + k < columns)
            scales = scales + (read_scales(scale_pointers(scale_ptrs, at, shared_c, KINDS), mask, KINDS),)
        if factor is not None:
            # Zeros beyond the last column, where dW is zero.
            at = column + gl.arange(0, _COLUMNS, _FACTORS)
            async_copy.async_copy_global_to_shared(factors.index(GROUP), factor + at, mask=at < columns)
            async_copy.commit_group()
        mbarrier.wait(turn.index(GROUP), parity)
        acc = first_product(i, dy_ring, x_ring, full)
        # Divisions, while products are on their way.
        next_row, next_column = corner(n + 2, down, across, group)
        acc, i = more_products(acc, i, dy_ring, x_ring, full, empty, steps)
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((i + stages - 1) % stages), count=1)
        i += steps
        if factor is not None:
            async_copy.wait_group(0)
            acc *= factors.index(GROUP).load(gl.SliceLayout(0, _HALF))[None, :]
        if SHARED:
            # If the sum of all squares is below the square of what surely can be taken, so is each; NaN is not.
            sums = row_sums(acc * acc)
            all_finite = gl.sum(sums[0] + sums[1] + (sums[2] + sums[3]), 0) < _SURE * _SURE
        else:
            sums = (existing, existing, existing, existing)
            all_finite = tiles.small_enough(gl.sum(gl.sum(acc * acc, 1), 0))
        mbarrier.wait(chunk_turn.index(GROUP), parity)
        if all_finite & plain:
            update_tile(
                acc, scales, sums, e, starts, key, existing, scale_at, shared_at, columns, row, column, ready, done,
                chunk_turn.index(1 - GROUP), rings, scale_ptrs, factor, nonfinite_ptr, common, own, bend,
                TILE, KINDS, WIDTH, STOCHASTIC, ALIGNED, True,
            )  # fmt: skip
        else:
            if not SHARED:
                # 0 * g is NaN for the elements that must be left out, and for no others. Where moments are shared,
                # the update finds out.
                all_finite = gl.sum(gl.sum(acc * 0.0, 1), 0) == 0.0
            if not SHARED and not all_finite:
                gl.store(nonfinite_ptr, 1)
            update_tile(
                acc, scales, sums, e, starts, key, existing, scale_at, shared_at, columns, row, column, ready, done,
                chunk_turn.index(1 - GROUP), rings, scale_ptrs, factor, nonfinite_ptr, common, own, bend,
                TILE, KINDS, WIDTH, STOCHASTIC, ALIGNED, False,
            )  # fmt: skip
        e += 2 * _PIECES
        parity ^= 1


@gluon.jit(do_not_specialize=["row_ptr", "key_ptr", "nonfinite_ptr", "rows", "columns", "tokens", "offset", "group"])
def weight_gradient_update(
    dy, x, w, m0, m1, m2, scale0, scale1, scale2, factor, row_ptr, key_ptr, nonfinite_ptr,
    rows, columns, tokens, offset, group,
    TILE: gl.constexpr, SCALARS: gl.constexpr, KINDS: gl.constexpr, WIDTH: gl.constexpr, STOCHASTIC: gl.constexpr,
    ALIGNED: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, LAG: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Form dW = dYᵀ x and take the step of rule `TILE` on weight and moments, in place.

    Args:
        dy, x: Descriptors of the factors, [tokens, rows] and [tokens, columns], bf16 or fp16.
        w, m0, m1, m2: Descriptors of the weight and of as many moments as `KINDS` has entries; a moment that blocks
            share has none.
        scale0, scale1, scale2: Of each moment, pointer to its blocks' scales, where it has any, or to what they share.
        factor: Pointer to the factors of columns, or None.
        row_ptr, key_ptr, nonfinite_ptr: `Update.row`, `Update.row_key`, `Update.nonfinite`.
        offset: Low 32 bits of `Update.offset`.
        group: Height of the bands in which tiles are taken.
        KINDS: Of each moment, as in `kernels.codes`.
        WIDTH: Length of the blocks that share a second moment: 64 or 128.
        ALIGNED: Rows of the full parameter start at multiples of `tiles.ALIGNED`.
        BYTES: Of one chunk of weight and moments.
    """
    # The second moment is the only one that may be shared.
    moments: gl.constexpr = 1 if len(KINDS) > 1 and KINDS[1] == _MEAN else len(KINDS)
    dy_ring = gl.allocate_shared_memory(dy.dtype, [STAGES, dy.block_type.shape[0], _ROWS], dy.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_type.shape[0], _COLUMNS], x.layout)
    tensors = (w,)
    rings = (gl.allocate_shared_memory(w.dtype, [SLOTS, _CHUNK, _CHUNK], w.layout),)
    if moments > 0:
        tensors = tensors + (m0,)
        rings = rings + (gl.allocate_shared_memory(m0.dtype, [SLOTS, _CHUNK, _CHUNK], m0.layout),)
    if moments > 1:
        tensors = tensors + (m1,)
        rings = rings + (gl.allocate_shared_memory(m1.dtype, [SLOTS, _CHUNK, _CHUNK], m1.layout),)
    if moments > 2:
        tensors = tensors + (m2,)
        rings = rings + (gl.allocate_shared_memory(m2.dtype, [SLOTS, _CHUNK, _CHUNK], m2.layout),)
    factors = rings[0]  # stands in where there are none
    if factor is not None:
        factors = gl.allocate_shared_memory(gl.float32, [2, _COLUMNS], _PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    chunk_turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
        mbarrier.init(chunk_turn.index(i), count=1)
    fence_async_shared()
    down, across = gl.cdiv(rows, _ROWS), gl.cdiv(columns, _COLUMNS)
    steps = gl.cdiv(tokens, x.block_type.shape[0])
    shared = (
        dy_ring, x_ring, full, empty, turn, rings, ready, done, chunk_turn, down, across, steps, group,
        rows, columns, offset, row_ptr, key_ptr, nonfinite_ptr, (scale0, scale1, scale2),
        factor, factors,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (0, shared, TILE, SCALARS, KINDS, WIDTH, STOCHASTIC, ALIGNED)),
            (_consume, (1, shared, TILE, SCALARS, KINDS, WIDTH, STOCHASTIC, ALIGNED)),
            (operands, (dy, x, dy_ring, x_ring, full, empty, down, across, steps, group)),
            (stream, (tensors, rings, ready, done, down, across, group, BYTES, LAG, False)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )
