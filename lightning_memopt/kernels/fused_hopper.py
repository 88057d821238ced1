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

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lightning_memopt.kernels import blocks, codes, tiles
from lightning_memopt.kernels.update import Update

# A tile of the weight, and the rows of a chunk: what one step of the update works on. Chunks are as wide as the tile
# or half of it. Coded moments need the former, as a block of codes is as wide as a tile.
TILE_ROWS, TILE_COLUMNS, CHUNK_ROWS = 128, 128, 64
# Tokens in a stage of the operand ring.
TOKENS = 64
_ROWS, _COLUMNS = gl.constexpr(TILE_ROWS), gl.constexpr(TILE_COLUMNS)
_CHUNK_ROWS = gl.constexpr(CHUNK_ROWS)
# Columns a group works on at once: as much as its registers hold.
_STEP_COLUMNS = gl.constexpr(64)
# Where a quarter of a tile lies in a group's registers.
_QUARTER = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_DENSE_STOCHASTIC, _SIGNED = gl.constexpr(blocks.DENSE_STOCHASTIC), gl.constexpr(blocks.SIGNED)
_POSITIVE_STOCHASTIC = gl.constexpr(blocks.POSITIVE_STOCHASTIC)


@gluon.jit
def _tile_position(i, down, across, group):
    """Tile `i` of a `down` by `across` grid, taken in bands of `group` rows so that operands stay in L2."""
    band = group * across
    first = (i // band) * group
    height = gl.minimum(down - first, group)
    return first + (i % band) % height, (i % band) // height


@gluon.jit
def _halves(x, axis: gl.constexpr, layout: gl.constexpr):
    """A tile cut in two along `axis`: only a renaming of registers, which the compiler is made to prove."""
    if axis == 1:
        a, b = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
    else:
        a, b = x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute([1, 2, 0]).split()
    return gl.convert_layout(a, layout, assert_trivial=True), gl.convert_layout(
        b, layout, assert_trivial=True
    )


# -------------------------------------------------------------------------------------------------------- operand ring
@gluon.jit
def _operands(dy, x, dy_ring, x_ring, full, empty, down, across, steps, group):
    stages: gl.constexpr = x_ring.type.shape[0]
    tokens: gl.constexpr = x.block_type.shape[0]
    i = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        row, column = _tile_position(tile, down, across, group)
        for t in range(steps):
            stage = i % stages
            mbarrier.wait(empty.index(stage), ((i // stages) & 1) ^ 1)
            mbarrier.expect(full.index(stage), dy.block_type.nbytes + x.block_type.nbytes)
            tma.async_copy_global_to_shared(
                dy, [t * tokens, row * _ROWS], full.index(stage), dy_ring.index(stage)
            )
            tma.async_copy_global_to_shared(
                x, [t * tokens, column * _COLUMNS], full.index(stage), x_ring.index(stage)
            )
            i += 1


@gluon.jit
def _multiply(i, dy_ring, x_ring, full, empty, steps):
    """All token steps of one tile, one wgmma in flight; the last one is still running on return."""
    stages: gl.constexpr = x_ring.type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    acc = gl.zeros([_ROWS, _COLUMNS], gl.float32, layout)
    for t in range(steps):
        stage = i % stages
        mbarrier.wait(full.index(stage), (i // stages) & 1)
        acc = warpgroup_mma(
            dy_ring.index(stage).permute((1, 0)), x_ring.index(stage), acc, is_async=True, use_acc=t > 0
        )
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((i + stages - 1) % stages), count=1, pred=t > 0)
        i += 1
    return acc, i


# ---------------------------------------------------------------------------------------------------------- chunk ring
@gluon.jit
def _chunk_place(c, width: gl.constexpr):
    """Row and column of chunk `c` within its tile."""
    across: gl.constexpr = _COLUMNS // width
    return c // across * _CHUNK_ROWS, c % across * width


@gluon.jit
def _chunk_position(e, down, across, group, width: gl.constexpr):
    """Row and column of the `e`-th chunk that this program works on."""
    chunks: gl.constexpr = (_ROWS // _CHUNK_ROWS) * (_COLUMNS // width)
    row, column = _tile_position(gl.program_id(0) + e // chunks * gl.num_programs(0), down, across, group)
    r, c = _chunk_place(e % chunks, width)
    return row * _ROWS + r, column * _COLUMNS + c


@gluon.jit
def _fetch(tensors, rings, ready, e, position, COUNT: gl.constexpr, BYTES: gl.constexpr):
    slot = e % rings[0].type.shape[0]
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
    width: gl.constexpr = rings[0].type.shape[2]
    chunks: gl.constexpr = (_ROWS // _CHUNK_ROWS) * (_COLUMNS // width)
    total = gl.cdiv(down * across - gl.program_id(0), gl.num_programs(0)) * chunks
    for e in range(gl.minimum(slots, total)):
        row, column = _chunk_position(e, down, across, group, width)
        _fetch(tensors, rings, ready, e, [row, column], COUNT, BYTES)
    for e in range(total):
        slot = e % slots
        row, column = _chunk_position(e, down, across, group, width)
        mbarrier.wait(done.index(slot), (e // slots) & 1)
        for i in gl.static_range(COUNT):
            tma.async_copy_shared_to_global(tensors[i], [row, column], rings[i].index(slot))
        tma.store_wait(pendings=COUNT * LAG)
        n = e + slots - LAG
        if (n >= slots) & (n < total):
            row, column = _chunk_position(n, down, across, group, width)
            _fetch(tensors, rings, ready, n, [row, column], COUNT, BYTES)
    tma.store_wait(pendings=0)


# -------------------------------------------------------------------------------------------------------------- update
@gluon.jit
def _part(rings, slot, U: gl.constexpr):
    """Columns [64 U, 64 U + 64) of a slot of every ring."""
    parts = ()
    for i in gl.static_range(len(rings)):
        parts = parts + (rings[i].index(slot).slice(U * _STEP_COLUMNS, _STEP_COLUMNS, dim=1),)
    return parts


@gluon.jit
def _load(part, scale, FORMAT: gl.constexpr):
    stored = part.load(_QUARTER)
    if FORMAT == _SIGNED:
        return codes.decode_signed(stored, scale[:, None])
    elif FORMAT > _SIGNED:
        return codes.decode_positive(stored, scale[:, None])
    else:
        return stored.to(gl.float32)


@gluon.jit
def _random(start):
    """32 bits for each element, `start` being what a row contributes to them."""
    in_row = gl.arange(0, _STEP_COLUMNS, gl.SliceLayout(0, _QUARTER))
    return tiles.mix(start[:, None] + tiles.spread(in_row)[None, :])


@gluon.jit
def _step(
    raw, part, scales, start, common, own,
    TILE: gl.constexpr, FORMATS: gl.constexpr, STOCHASTIC: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """One step on part of a chunk, in place in shared memory; returns the moments that are still to be coded.

    Args:
        raw: The part's dW.
        part: Weight and moments in shared memory.
        scales: Of each moment, one per row; looked at where the moment is coded.
        start: What a row contributes to the random bits.
        PLAIN: The gradient is finite and neither clipped by value nor coupled to the weight, as is nearly always so.
    """
    moments: gl.constexpr = len(FORMATS)
    old = part[0].load(_QUARTER).to(gl.float32)
    # The moments a rule does not have are never looked at; the gradient stands in for them.
    old0 = _load(part[1], scales[0], FORMATS[0]) if moments > 0 else raw
    old1 = _load(part[2], scales[1], FORMATS[1]) if moments > 1 else raw
    old2 = _load(part[3], scales[2], FORMATS[2]) if moments > 2 else raw
    if PLAIN:
        w, g = tiles.prepare_plain(old, raw, common)
    else:
        w, g = tiles.prepare(old, raw, common)
    w, m0, m1, m2 = TILE(w, g, g * g, old0, old1, old2, own)
    if not PLAIN:
        # What was bf16 before rounds to itself, so undoing the step in float32 is enough.
        keep = tiles.finite(raw)
        w = gl.where(keep, w, old)
        m0 = gl.where(keep, m0, old0)
        m1 = gl.where(keep, m1, old1)
        m2 = gl.where(keep, m2, old2)
    random = _random(start)
    if STOCHASTIC:
        part[0].store(tiles.round_bf16(w, tiles.high_bits(random)))
    else:
        part[0].store(w.to(part[0].dtype))
    new = (m0, m1, m2)
    coded = ()
    for i in gl.static_range(moments):
        if FORMATS[i] >= _SIGNED:
            coded = coded + (new[i],)
        elif FORMATS[i] == _DENSE_STOCHASTIC:
            part[i + 1].store(tiles.round_bf16(new[i], tiles.low_bits(random)))
        else:
            part[i + 1].store(new[i].to(part[i + 1].dtype))
    return coded


@gluon.jit
def _encode(x, part, scale, start, FORMAT: gl.constexpr):
    if FORMAT == _SIGNED:
        part.store(codes.encode_signed(x, scale[:, None]))
    else:
        low = tiles.low_bits(_random(start))
        part.store(codes.encode_positive(x, scale[:, None], low, FORMAT == _POSITIVE_STOCHASTIC))


@gluon.jit
def _update_tile(
    acc, upper_scales, lower_scales, e, starts, at, existing, columns, across, row, column, ready, done, next_turn,
    rings, scale_ptrs, common, own,
    TILE: gl.constexpr, FORMATS: gl.constexpr, STOCHASTIC: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """One step on the chunks `e`, `e` + 1, ... that make up the tile at `row` and `column`.

    Rolled by hand, as code for all chunks at once would not fit into the instruction cache: registers cannot be indexed,
    so what is left of dW moves up a place instead.
    """
    slots: gl.constexpr = rings[0].type.shape[0]
    width: gl.constexpr = rings[0].type.shape[2]
    chunks: gl.constexpr = (_ROWS // _CHUNK_ROWS) * (_COLUMNS // width)
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    upper, lower = _halves(acc, 0, half)
    x0, x1 = _halves(upper, 1, _QUARTER)
    x2, x3 = _halves(lower, 1, _QUARTER)
    scales = upper_scales
    for c in range(chunks):
        slot = e % slots
        mbarrier.wait(ready.index(slot), (e // slots) & 1)
        if c == chunks - 1:
            mbarrier.arrive(next_turn, count=1)
        r, k = _chunk_place(c, width)
        start = starts + tiles.spread((row + r) * columns + column + k)
        left = _part(rings, slot, 0)
        left_coded = _step(x0, left, scales, start, common, own, TILE, FORMATS, STOCHASTIC, PLAIN)
        if width == _STEP_COLUMNS:
            x0, x1, x2 = x1, x2, x3
        else:
            right = _part(rings, slot, 1)
            right_start = starts + tiles.spread((row + r) * columns + column + k + _STEP_COLUMNS)
            right_coded = _step(x1, right, scales, right_start, common, own, TILE, FORMATS, STOCHASTIC, PLAIN)
            for i in gl.static_range(len(left_coded)):
                # A row of a chunk is a block.
                largest = gl.maximum(gl.max(gl.abs(left_coded[i]), 1), gl.max(gl.abs(right_coded[i]), 1))
                scale = codes.block_scale(largest)
                gl.store(scale_ptrs[i] + at + r * across, scale, mask=existing > r)
                _encode(left_coded[i], left[i + 1], scale, start, FORMATS[i])
                _encode(right_coded[i], right[i + 1], scale, right_start, FORMATS[i])
            x0, x1, scales = x2, x3, lower_scales
        fence_async_shared()
        mbarrier.arrive(done.index(slot), count=1)
        e += 1


@gluon.jit
def _read_scales(scale_ptrs, at, mask, FORMATS: gl.constexpr):
    """Of each moment, the scales of a row's block; of one that has none, something to hand on in their place."""
    scales = ()
    for i in gl.static_range(len(FORMATS)):
        if FORMATS[i] >= _SIGNED:
            scales = scales + (gl.load(scale_ptrs[i] + at, mask=mask, other=1.0),)
        else:
            scales = scales + (at,)
    return scales


@gluon.jit
def _consume(
    GROUP: gl.constexpr, shared,
    TILE: gl.constexpr, SCALARS: gl.constexpr, FORMATS: gl.constexpr, STOCHASTIC: gl.constexpr,
):  # fmt: skip
    """Every other tile of this program: its matmul while the other group updates, then its update."""
    dy_ring, x_ring, full, empty, turn, rings, ready, done, chunk_turn = shared[:9]
    down, across, steps, group, rows, columns, offset, row_ptr, key_ptr, nonfinite_ptr, scale_ptrs = shared[9:]
    stages: gl.constexpr = x_ring.type.shape[0]
    width: gl.constexpr = rings[0].type.shape[2]
    chunks: gl.constexpr = (_ROWS // _CHUNK_ROWS) * (_COLUMNS // width)
    common, own = tiles.scalars(row_ptr, SCALARS)
    plain = tiles.is_plain(common)
    # The random bits depend on the row-major index in the full parameter, modulo 2^32.
    in_chunk = gl.arange(0, _CHUNK_ROWS, gl.SliceLayout(1, _QUARTER))
    starts = tiles.spread(in_chunk * columns + offset) + gl.load(key_ptr).to(gl.uint32)
    i = GROUP * steps
    e = GROUP * chunks
    parity = 1 - GROUP
    for tile in range(gl.program_id(0) + GROUP * gl.num_programs(0), down * across, 2 * gl.num_programs(0)):
        tile_row, tile_column = _tile_position(tile, down, across, group)
        row, column = tile_row * _ROWS, tile_column * _COLUMNS
        # Asked for now, so that they are there when the matmul is done.
        at = (row + in_chunk) * across + tile_column
        existing = rows - row - in_chunk
        upper_scales = _read_scales(scale_ptrs, at, existing > 0, FORMATS)
        lower_scales = _read_scales(scale_ptrs, at + _CHUNK_ROWS * across, existing > _CHUNK_ROWS, FORMATS)
        mbarrier.wait(turn.index(GROUP), parity)
        acc, i = _multiply(i, dy_ring, x_ring, full, empty, steps)
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((i + stages - 1) % stages), count=1)
        i += steps
        # 0 * g is NaN for the elements that must be left out, and for no others.
        all_finite = gl.sum(gl.sum(acc * 0.0, 1), 0) == 0.0
        mbarrier.wait(chunk_turn.index(GROUP), parity)
        next_turn = chunk_turn.index(1 - GROUP)
        if all_finite & plain:
            _update_tile(
                acc, upper_scales, lower_scales, e, starts, at, existing, columns, across, row, column,
                ready, done, next_turn, rings, scale_ptrs, common, own, TILE, FORMATS, STOCHASTIC, True,
            )  # fmt: skip
        else:
            if not all_finite:
                gl.store(nonfinite_ptr, 1)
            _update_tile(
                acc, upper_scales, lower_scales, e, starts, at, existing, columns, across, row, column,
                ready, done, next_turn, rings, scale_ptrs, common, own, TILE, FORMATS, STOCHASTIC, False,
            )  # fmt: skip
        e += 2 * chunks
        parity ^= 1


@gluon.jit(do_not_specialize=["rows", "columns", "tokens", "offset", "group"])
def weight_gradient_update(
    dy, x, w, m0, m1, m2, scale0, scale1, scale2, row_ptr, key_ptr, nonfinite_ptr,
    rows, columns, tokens, offset, group,
    TILE: gl.constexpr, SCALARS: gl.constexpr, FORMATS: gl.constexpr, STOCHASTIC: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, LAG: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """dW = dYᵀ x and the step of rule `TILE` on weight and moments, in place.

    Args:
        dy, x: Descriptors of the factors, [tokens, rows] and [tokens, columns], bf16 or fp16.
        w, m0, m1, m2: Descriptors of the weight and of as many moments as `FORMATS` has entries.
        scale0, scale1, scale2: Of each moment, pointer to its blocks' scales, where it has any.
        row_ptr, key_ptr, nonfinite_ptr: `Update.row`, `Update.row_key`, `Update.nonfinite`.
        offset: Low 32 bits of `Update.offset`.
        group: Height of the bands in which tiles are taken.
        FORMATS: Of each moment, as in `kernels.blocks`; all of them coded, or none.
        BYTES: Of one chunk of weight and moments.
    """
    moments: gl.constexpr = len(FORMATS)
    chunk: gl.constexpr = w.block_type.shape
    dy_ring = gl.allocate_shared_memory(dy.dtype, [STAGES, dy.block_type.shape[0], _ROWS], dy.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_type.shape[0], _COLUMNS], x.layout)
    tensors = (w,)
    rings = (gl.allocate_shared_memory(w.dtype, [SLOTS, chunk[0], chunk[1]], w.layout),)
    if moments > 0:
        tensors = tensors + (m0,)
        rings = rings + (gl.allocate_shared_memory(m0.dtype, [SLOTS, chunk[0], chunk[1]], m0.layout),)
    if moments > 1:
        tensors = tensors + (m1,)
        rings = rings + (gl.allocate_shared_memory(m1.dtype, [SLOTS, chunk[0], chunk[1]], m1.layout),)
    if moments > 2:
        tensors = tensors + (m2,)
        rings = rings + (gl.allocate_shared_memory(m2.dtype, [SLOTS, chunk[0], chunk[1]], m2.layout),)
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
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (0, shared, TILE, SCALARS, FORMATS, STOCHASTIC)),
            (_consume, (1, shared, TILE, SCALARS, FORMATS, STOCHASTIC)),
            (_operands, (dy, x, dy_ring, x_ring, full, empty, down, across, steps, group)),
            (_stream, (tensors, rings, ready, done, down, across, group, moments + 1, BYTES, LAG)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )


# ---------------------------------------------------------------------------------------------------------------- host
@dataclass(frozen=True)
class Config:
    """How the kernel uses a multiprocessor's shared memory.

    Attributes:
        stages: Of the operand ring.
        slots: Chunks of weight and moments in flight.
        width: Columns of a chunk, 64 or 128.
        lag: Chunks that may still be on their way to memory when a slot is filled again.
        group: Height, in tiles, of the bands in which tiles are taken.
    """

    stages: int
    slots: int
    width: int
    lag: int
    group: int


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def available(device: torch.device) -> bool:
    """Whether `device` has Hopper's units."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def _tma(tensor: Tensor) -> bool:
    """Whether TMA can read and write this matrix: rows that start at multiples of 16 bytes."""
    item = tensor.element_size()
    return tensor.stride(1) == 1 and tensor.stride(0) * item % 16 == 0 and tensor.data_ptr() % 16 == 0


def supports(update: Update, dy: Tensor, x: Tensor) -> bool:
    """Whether the kernel takes these operands and this weight as they lie in memory."""
    moments = [update.state[storage.name] for storage in update.storage]
    coded = [value.dtype == torch.uint8 for value in moments]
    return (
        dy.dtype == x.dtype
        and dy.dtype in (torch.bfloat16, torch.float16)
        and len(x) > 0
        and (all(coded) or not any(coded))
        and all(_tma(tensor) for tensor in (dy, x, update.weight, *moments))
    )


def chunk_bytes(update: Update) -> int:
    """Bytes of weight and moments per element."""
    return update.weight.element_size() + sum(update.state[storage.name].element_size() for storage in update.storage)


@cache
def _layout(block: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON[dtype])


_GLUON = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.uint8: gl.uint8,
}


def _descriptor(tensor: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(block), _layout(block, tensor.dtype))


def apply_factors(update: Update, dy: Tensor, x: Tensor, config: Config) -> Any:
    """Take one step on dW = dYᵀ x; `supports` says for what. Returns the compiled kernel."""
    rows, columns = update.weight.shape
    chunk = (CHUNK_ROWS, config.width)
    call = blocks.arguments(update)
    w, values, scales, row, key, nonfinite = call.tensors
    moments = [_descriptor(value, chunk) for value in values] + [None] * (3 - len(values))
    coded = [f >= blocks.SIGNED for f in call.constants["FORMATS"]] + [False] * (3 - len(values))
    tile_count = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
    return weight_gradient_update[(min(tile_count, _multiprocessors(dy.device)),)](
        _descriptor(dy, (TOKENS, TILE_ROWS)),
        _descriptor(x, (TOKENS, TILE_COLUMNS)),
        _descriptor(w, chunk),
        *moments,
        *(scales[i] if coded[i] else None for i in range(3)),
        row,
        key,
        nonfinite,
        rows,
        columns,
        len(x),
        call.offset,
        config.group,
        **call.constants,
        STAGES=config.stages,
        SLOTS=config.slots,
        LAG=config.lag,
        BYTES=CHUNK_ROWS * config.width * chunk_bytes(update),
        num_warps=4,
    )
