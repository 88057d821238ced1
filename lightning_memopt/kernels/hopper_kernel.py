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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from lightning_memopt.kernels import codes, tiles
from lightning_memopt.kernels.hopper_matmul import HALF, TILE_COLUMNS, TILE_ROWS, multiply, operands, tile_position
from lightning_memopt.kernels.hopper_step import CHUNK
from lightning_memopt.kernels.hopper_update import (
    ACROSS,
    CHUNKS,
    QUARTER,
    read_scales,
    row_sums,
    scale_pointers,
    update_tile,
)

_ROWS, _COLUMNS = gl.constexpr(TILE_ROWS), gl.constexpr(TILE_COLUMNS)
_CHUNK, _ACROSS, _CHUNKS = gl.constexpr(CHUNK), gl.constexpr(ACROSS), gl.constexpr(CHUNKS)
_HALF, _QUARTER = gl.constexpr(HALF), gl.constexpr(QUARTER)
_CURVE, _MEAN = gl.constexpr(codes.CURVE), gl.constexpr(codes.MEAN)
_SURE = gl.constexpr(codes.SURE)


# ---------------------------------------------------------------------------------------------------------- chunk ring
@gluon.jit
def _chunk_position(e, down, across, group):
    """Row and column of the `e`-th chunk that this program works on."""
    row, column = tile_position(gl.program_id(0) + e // _CHUNKS * gl.num_programs(0), down, across, group)
    c = e % _CHUNKS
    return row * _ROWS + c // _ACROSS * _CHUNK, column * _COLUMNS + c % _ACROSS * _CHUNK


@gluon.jit
def fetch(tensors, rings, ready, slot, position, COUNT: gl.constexpr, BYTES: gl.constexpr):
    """Ask for what lies at `position` of weight and moments, into a slot of their rings."""
    mbarrier.expect(ready.index(slot), BYTES)
    for i in gl.static_range(COUNT):
        tma.async_copy_global_to_shared(tensors[i], position, ready.index(slot), rings[i].index(slot))


@gluon.jit
def _stream(
    tensors, rings, ready, done, down, across, group,
    COUNT: gl.constexpr, BYTES: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Fetch chunks; once one is updated in place, write it back; reuse its slot `LAG` chunks later."""
    slots: gl.constexpr = rings[0].type.shape[0]
    total = gl.cdiv(down * across - gl.program_id(0), gl.num_programs(0)) * _CHUNKS
    for e in range(gl.minimum(slots, total)):
        row, column = _chunk_position(e, down, across, group)
        fetch(tensors, rings, ready, e, [row, column], COUNT, BYTES)
    for e in range(total):
        slot = e % slots
        row, column = _chunk_position(e, down, across, group)
        mbarrier.wait(done.index(slot), (e // slots) & 1)
        for i in gl.static_range(COUNT):
            tma.async_copy_shared_to_global(tensors[i], [row, column], rings[i].index(slot))
        tma.store_wait(pendings=COUNT * LAG)
        n = e + slots - LAG
        if (n >= slots) & (n < total):
            row, column = _chunk_position(n, down, across, group)
            fetch(tensors, rings, ready, n % slots, [row, column], COUNT, BYTES)
    tma.store_wait(pendings=0)


# ----------------------------------------------------------------------------------------------------------- consumers
@gluon.jit
def _consume(
    GROUP: gl.constexpr, shared,
    TILE: gl.constexpr, SCALARS: gl.constexpr, KINDS: gl.constexpr, WIDTH: gl.constexpr, STOCHASTIC: gl.constexpr,
    ALIGNED: gl.constexpr,
):  # fmt: skip
    """Every other tile of this program: its matmul while the other group updates, then its update."""
    dy_ring, x_ring, full, empty, turn, rings, ready, done, chunk_turn = shared[:9]
    down, across, steps, group, rows, columns, offset, row_ptr, key_ptr, nonfinite_ptr, scale_ptrs, factor = shared[9:]
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
    e = GROUP * _CHUNKS
    parity = 1 - GROUP
    for tile in range(gl.program_id(0) + GROUP * gl.num_programs(0), down * across, 2 * gl.num_programs(0)):
        tile_row, tile_column = tile_position(tile, down, across, group)
        row, column = tile_row * _ROWS, tile_column * _COLUMNS
        # Asked for now, so that they are there when the matmul is done.
        existing = rows - row - in_chunk
        scale_at = (row + in_chunk) * scale_row + tile_column * _ACROSS
        shared_at = (row + in_chunk) * shared_row + tile_column * (_COLUMNS // WIDTH)
        scales = ()
        for c in gl.static_range(_CHUNKS):
            r, k = c // _ACROSS * _CHUNK, c % _ACROSS * _CHUNK
            at, shared_c = scale_at + (r * scale_row + k // _CHUNK), shared_at + (r * shared_row + k // WIDTH)
            mask = (existing > r) & (column + k < columns)
            scales = scales + (read_scales(scale_pointers(scale_ptrs, at, shared_c, KINDS), mask, KINDS),)
        mbarrier.wait(turn.index(GROUP), parity)
        acc, i = multiply(i, dy_ring, x_ring, full, empty, steps)
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
        if factor is not None:
            # While the last products are on their way; earlier, registers would have to be spilled for these.
            at = column + gl.arange(0, _COLUMNS, gl.SliceLayout(0, _HALF))
            factors = gl.load(factor + at, mask=at < columns, other=1.0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((i + stages - 1) % stages), count=1)
        i += steps
        if factor is not None:
            acc *= factors[None, :]
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
        e += 2 * _CHUNKS
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
        rows, columns, offset, row_ptr, key_ptr, nonfinite_ptr, (scale0, scale1, scale2), factor,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (0, shared, TILE, SCALARS, KINDS, WIDTH, STOCHASTIC, ALIGNED)),
            (_consume, (1, shared, TILE, SCALARS, KINDS, WIDTH, STOCHASTIC, ALIGNED)),
            (operands, (dy, x, dy_ring, x_ring, full, empty, down, across, steps, group)),
            (_stream, (tensors, rings, ready, done, down, across, group, moments + 1, BYTES, LAG)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )
