# mypy: ignore-errors
# Device code, whose types are Triton's.
"""The update of a tile of dW that lies in the registers of a group of four warps, for `kernels.fused_hopper`.

Weight and moments come and go through shared memory a chunk at a time; scales of coded moments are read and written
directly, as they are few.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lightning_memopt.kernels import codes, tiles
from lightning_memopt.rules.storage_8bit import BLOCK

# A tile of the weight, and a square chunk of it: what one step of the update works on. A block of codes is as wide.
TILE_ROWS, TILE_COLUMNS, CHUNK = 128, 128, BLOCK
ACROSS = TILE_COLUMNS // CHUNK
CHUNKS = TILE_ROWS // CHUNK * ACROSS
# How a tile's half and quarter, which is a chunk, lie in the registers.
HALF = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_COLUMNS, 16])
QUARTER = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
_CHUNK, _ACROSS, _CHUNKS = gl.constexpr(CHUNK), gl.constexpr(ACROSS), gl.constexpr(CHUNKS)
_HALF, _QUARTER = gl.constexpr(HALF), gl.constexpr(QUARTER)
_SLOW, _SIGNED = gl.constexpr(codes.SLOW), gl.constexpr(codes.SIGNED)


@gluon.jit
def _halves(x, axis: gl.constexpr, layout: gl.constexpr):
    """A tile cut in two along `axis`: only a renaming of registers, which the compiler is made to prove."""
    if axis == 1:
        a, b = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
    else:
        a, b = x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute([1, 2, 0]).split()
    return gl.convert_layout(a, layout, assert_trivial=True), gl.convert_layout(b, layout, assert_trivial=True)


@gluon.jit
def _load(part, scale, KIND: gl.constexpr):
    stored = part.load(_QUARTER)
    if KIND == _SIGNED:
        return codes.decode_signed(stored, scale.to(gl.float32)[:, None])
    elif KIND > _SIGNED:
        return codes.decode_positive(stored, scale.to(gl.float32)[:, None])
    else:
        return stored.to(gl.float32)


@gluon.jit
def _store(part, x, random, scale_ptr, mask, KIND: gl.constexpr, STOCHASTIC: gl.constexpr):
    """Write a moment back; where it is coded, a row of the chunk is a block, whose new scale is written too."""
    if KIND >= _SIGNED:
        scale = codes.block_scale(gl.max(gl.abs(x), 1))
        gl.store(scale_ptr, scale.to(scale_ptr.dtype.element_ty), mask=mask)
        if KIND == _SIGNED:
            part.store(codes.encode_signed(x, scale[:, None]))
        else:
            part.store(codes.encode_positive(x, scale[:, None], tiles.low_bits(random), STOCHASTIC))
    elif KIND == _SLOW and STOCHASTIC and part.dtype == gl.bfloat16:
        part.store(tiles.round_bf16(x, tiles.low_bits(random)))
    else:
        part.store(x.to(part.dtype))


@gluon.jit
def _update_chunk(
    raw, slot, scales, scale_ptrs, mask, start, rings, common, own,
    TILE: gl.constexpr, KINDS: gl.constexpr, STOCHASTIC: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """One step on a chunk of weight and moments, in place in shared memory.

    Args:
        raw: The chunk of dW.
        scales, scale_ptrs: Of each moment, every row's scale and where it lies; looked at where the moment is coded.
        mask: Which rows exist.
        start: What a row contributes to the random bits.
        PLAIN: The gradient is finite and neither clipped by value nor coupled to the weight, as is nearly always so.
    """
    moments: gl.constexpr = len(KINDS)
    old = rings[0].index(slot).load(_QUARTER).to(gl.float32)
    # The moments a rule does not have are never looked at; the gradient stands in for them.
    old0 = _load(rings[1].index(slot), scales[0], KINDS[0]) if moments > 0 else raw
    old1 = _load(rings[2].index(slot), scales[1], KINDS[1]) if moments > 1 else raw
    old2 = _load(rings[3].index(slot), scales[2], KINDS[2]) if moments > 2 else raw
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
    in_row = gl.arange(0, _CHUNK, gl.SliceLayout(0, _QUARTER))
    random = tiles.mix(start[:, None] + tiles.spread(in_row)[None, :])
    if STOCHASTIC and rings[0].dtype == gl.bfloat16:
        rings[0].index(slot).store(tiles.round_bf16(w, tiles.high_bits(random)))
    else:
        rings[0].index(slot).store(w.to(rings[0].dtype))
    if moments > 0:
        _store(rings[1].index(slot), m0, random, scale_ptrs[0], mask, KINDS[0], STOCHASTIC)
    if moments > 1:
        _store(rings[2].index(slot), m1, random, scale_ptrs[1], mask, KINDS[1], STOCHASTIC)
    if moments > 2:
        _store(rings[3].index(slot), m2, random, scale_ptrs[2], mask, KINDS[2], STOCHASTIC)


@gluon.jit
def scale_pointers(scale_ptrs, at, KINDS: gl.constexpr):
    """Of each moment, pointers to a chunk's scales; `at` stands in for those of a moment that has none."""
    pointers = ()
    for i in gl.static_range(len(KINDS)):
        pointers = pointers + ((scale_ptrs[i] + at) if KINDS[i] >= _SIGNED else at,)
    return pointers


@gluon.jit
def read_scales(pointers, mask, KINDS: gl.constexpr):
    """Of each moment, a chunk's scales."""
    scales = ()
    for i in gl.static_range(len(KINDS)):
        if KINDS[i] >= _SIGNED:
            scales = scales + (gl.load(pointers[i], mask=mask, other=1.0),)
        else:
            scales = scales + (pointers[i],)
    return scales


@gluon.jit
def update_tile(
    acc, scales, e, starts, existing, scale_at, scale_row, columns, row, column, ready, done, next_turn, rings,
    scale_ptrs, common, own,
    TILE: gl.constexpr, KINDS: gl.constexpr, STOCHASTIC: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """One step on the chunks `e`, `e` + 1, ... that make up the tile at `row` and `column`.

    Rolled by hand, as code for all chunks at once would not fit into the instruction cache: registers cannot be
    indexed, so what is left of dW moves up a place instead.
    """
    slots: gl.constexpr = rings[0].type.shape[0]
    upper, lower = _halves(acc, 0, _HALF)
    x0, x1 = _halves(upper, 1, _QUARTER)
    x2, x3 = _halves(lower, 1, _QUARTER)
    s0, s1, s2, s3 = scales
    for c in range(_CHUNKS):
        slot = e % slots
        mbarrier.wait(ready.index(slot), (e // slots) & 1)
        if c == _CHUNKS - 1:
            mbarrier.arrive(next_turn, count=1)
        r, k = c // _ACROSS * _CHUNK, c % _ACROSS * _CHUNK
        start = starts + tiles.spread((row + r) * columns + column + k)
        pointers = scale_pointers(scale_ptrs, scale_at + (r * scale_row + k // _CHUNK), KINDS)
        mask = (existing > r) & (column + k < columns)
        _update_chunk(x0, slot, s0, pointers, mask, start, rings, common, own, TILE, KINDS, STOCHASTIC, PLAIN)
        fence_async_shared()
        mbarrier.arrive(done.index(slot), count=1)
        x0, x1, x2 = x1, x2, x3
        s0, s1, s2 = s1, s2, s3
        e += 1
