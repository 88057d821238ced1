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

from lightning_memopt.kernels import codes, tiles
from lightning_memopt.rules.storage_8bit import BLOCK

# A tile of the weight, and a square chunk of it: what one step of the update works on. A block of codes is as wide.
TILE_ROWS, TILE_COLUMNS, CHUNK = 128, 128, BLOCK
ACROSS = TILE_COLUMNS // CHUNK
CHUNKS = TILE_ROWS // CHUNK * ACROSS
# How a tile and its upper and lower half lie in the registers, and its quarter, which is a chunk.
HALF = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_COLUMNS, 16])
QUARTER = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
_CHUNK, _ACROSS, _CHUNKS = gl.constexpr(CHUNK), gl.constexpr(ACROSS), gl.constexpr(CHUNKS)
_COLUMNS = gl.constexpr(TILE_COLUMNS)
_HALF, _QUARTER = gl.constexpr(HALF), gl.constexpr(QUARTER)
_SLOW, _SIGNED = gl.constexpr(codes.SLOW), gl.constexpr(codes.SIGNED)
_MEAN, _LIMIT = gl.constexpr(codes.MEAN), gl.constexpr(codes.LIMIT)


@gluon.jit
def _halves(x, axis: gl.constexpr, layout: gl.constexpr):
    """A tile cut in two along `axis`: only a renaming of registers, which the compiler is made to prove."""
    if axis == 1:
        a, b = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
    else:
        a, b = x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute([1, 2, 0]).split()
    return gl.convert_layout(a, layout, assert_trivial=True), gl.convert_layout(b, layout, assert_trivial=True)


@gluon.jit
def quarters(x):
    """The chunks of a tile, row by row."""
    upper, lower = _halves(x, 0, _HALF)
    x0, x1 = _halves(upper, 1, _QUARTER)
    x2, x3 = _halves(lower, 1, _QUARTER)
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
def _factors(factor, first, columns, layout: gl.constexpr, COUNT: gl.constexpr):
    """Factors of the columns of a tile or chunk, [1, COUNT]; 1 without any."""
    if factor is None:
        return gl.full([1, COUNT], 1.0, gl.float32, layout)
    else:
        at = first + gl.arange(0, COUNT, gl.SliceLayout(0, layout))
        return gl.load(factor + at, mask=at < columns, other=1.0)[None, :]


@gluon.jit
def _clipped(raw, factors, common):
    """A gradient that was multiplied by its columns' factors: scaled and clipped, and which of it can be used.

    Clipping comes before the factors, so these multiply the bounds. Moments that a block shares have rules with
    decoupled decay only, so the weight has no part in the gradient.
    """
    bound = common[1] * factors
    return gl.minimum(gl.maximum(raw * common[0], -bound), bound), gl.abs(raw) < _LIMIT * factors


@gluon.jit
def _left_out(acc, factors, common):
    """A tile's squared gradient where it is to be used, and where it is not."""
    g, keep = _clipped(acc, factors, common)
    return gl.where(keep, g * g, 0.0), gl.where(keep, 0.0, 1.0)


@gluon.jit
def _to_float(stored):
    return tiles.from_bf16(stored) if stored.dtype == gl.bfloat16 else stored.to(gl.float32)


@gluon.jit
def _random_bits(sums):
    """One hash for two neighbours, of which `sums` has the sum of spreads and the key; see `kernels.rounding`."""
    even, odd = sums.reshape([_CHUNK, _CHUNK // 2, 2]).split()
    random = tiles.mix(even)
    both = gl.join(random, tiles.turned(random)).reshape([_CHUNK, _CHUNK])
    return gl.convert_layout(both, _QUARTER, assert_trivial=True)


@gluon.jit
def _load(part, scale, bend, KIND: gl.constexpr):
    """A chunk of a moment, and its unit."""
    stored = part.load(_QUARTER)
    if KIND >= _SIGNED:
        return codes.decode(stored, bend, KIND), codes.unit(scale, KIND)[:, None]
    else:
        return _to_float(stored), 1.0


@gluon.jit
def _store(part, x, random, bend, scale_ptr, mask, KIND: gl.constexpr, STOCHASTIC: gl.constexpr):
    """Write a moment back; where it is coded, a row of the chunk is a block, whose new scale is written too."""
    if KIND >= _SIGNED:
        scale = codes.block_scale(gl.max(gl.abs(x), 1))
        gl.store(scale_ptr, scale.to(scale_ptr.dtype.element_ty), mask=mask)
        part.store(codes.encode(x, scale[:, None], random, bend, KIND, STOCHASTIC))
    elif KIND == _SLOW and STOCHASTIC and part.dtype == gl.bfloat16:
        part.store(tiles.round_bf16(x, tiles.low_bits(random)))
    else:
        part.store(x.to(part.dtype))


@gluon.jit
def _update_chunk(
    raw, slot, scales, mean, count, scale_ptrs, mask, first_mask, start, factors, rings, common, own, bend,
    TILE: gl.constexpr, KINDS: gl.constexpr, STOCHASTIC: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """One step on a chunk of weight and moments, in place in shared memory.

    Args:
        raw: The chunk of dW, times its columns' factors.
        scales, scale_ptrs: Of each moment, every row's scale, or the moment that it shares, and where it lies; looked
            at where the moment is coded or shared.
        mean: The square of each row's gradient, averaged over the blocks that share a second moment.
        count: How many weights it is the mean of.
        mask: Which rows exist.
        first_mask: Those of them in which a block begins that shares a second moment.
        start: What a row contributes to the random bits.
        factors: Of the chunk's columns, or 1.
        PLAIN: The gradient is finite and neither clipped by value nor coupled to the weight, as is nearly always so.
    """
    moments: gl.constexpr = len(KINDS)
    SHARED: gl.constexpr = moments > 1 and KINDS[1] == _MEAN
    old = _to_float(rings[0].index(slot).load(_QUARTER))
    # The moments a rule does not have are never looked at; the gradient stands in for them.
    old0, old1, old2 = raw, raw, raw
    unit, unit2, unit_m0, unit_m1, unit_m2 = 1.0, 1.0, 1.0, 1.0, 1.0
    if moments > 0:
        old0, unit_m0 = _load(rings[1].index(slot), scales[0], bend, KINDS[0])
    if SHARED:
        old1 = scales[1][:, None]
    elif moments > 1:
        old1, unit_m1 = _load(rings[2].index(slot), scales[1], bend, KINDS[1])
    if moments > 2:
        old2, unit_m2 = _load(rings[3].index(slot), scales[2], bend, KINDS[2])
    if PLAIN:
        w, g, unit, unit2 = old * common[3], raw, common[0], common[0] * common[0]
    elif SHARED:
        w = old * common[3]
        g, keep = _clipped(raw, factors, common)
    else:
        w, g = tiles.prepare(old, raw, common)
        keep = tiles.finite(raw)
    g2 = g * g
    if SHARED:
        g2, unit2 = mean[:, None], 1.0
    w, m0, m1, m2 = TILE(w, g, g2, old0, old1, old2, (unit, unit2, unit_m0, unit_m1, unit_m2), own)
    if not PLAIN:
        # What was bf16 before rounds to itself, so undoing the step in float32 is enough.
        w = gl.where(keep, w, old)
        m0 = gl.where(keep, m0, old0 * unit_m0)
        m1 = gl.where((count > 0)[:, None], m1, old1) if SHARED else gl.where(keep, m1, old1 * unit_m1)
        m2 = gl.where(keep, m2, old2 * unit_m2)
    in_row = gl.arange(0, _CHUNK, gl.SliceLayout(0, _QUARTER))
    random = _random_bits(start[:, None] + tiles.spread(in_row)[None, :])
    if STOCHASTIC and rings[0].dtype == gl.bfloat16:
        rings[0].index(slot).store(tiles.round_bf16(w, tiles.high_bits(random)))
    else:
        rings[0].index(slot).store(w.to(rings[0].dtype))
    if moments > 0:
        _store(rings[1].index(slot), m0, random, bend, scale_ptrs[0], mask, KINDS[0], STOCHASTIC)
    if SHARED:
        # A row's only element; stored as a column, it would be stored once per register that holds a copy.
        gl.store(scale_ptrs[1], gl.max(m1, 1), mask=first_mask)
    elif moments > 1:
        _store(rings[2].index(slot), m1, random, bend, scale_ptrs[1], mask, KINDS[1], STOCHASTIC)
    if moments > 2:
        _store(rings[3].index(slot), m2, random, bend, scale_ptrs[2], mask, KINDS[2], STOCHASTIC)


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
def update_tile(
    acc, scales, sums, e, starts, existing, scale_at, shared_at, columns, row, column, ready, done, next_turn, rings,
    scale_ptrs, factor, nonfinite_ptr, common, own, bend,
    TILE: gl.constexpr, KINDS: gl.constexpr, WIDTH: gl.constexpr, STOCHASTIC: gl.constexpr, PLAIN: gl.constexpr,
):  # fmt: skip
    """One step on the chunks `e`, `e` + 1, ... that make up the tile at `row` and `column`.

    Rolled by hand, as code for all chunks at once would not fit into the instruction cache: registers cannot be
    indexed, so what is left of dW moves up a place instead.

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
    scale_row, shared_row = gl.cdiv(columns, _CHUNK), gl.cdiv(columns, WIDTH)
    counts = (existing, existing, existing, existing)
    if SHARED:
        if PLAIN:
            sums = _block_sums(sums, WIDTH)
        else:
            factors = _factors(factor, column, columns, _HALF, _COLUMNS)
            squares, bad = _left_out(acc, factors, common)
            counts = row_sums(bad)
            if gl.sum(counts[0] + counts[1] + (counts[2] + counts[3]), 0) > 0:
                gl.store(nonfinite_ptr, 1)
            sums, counts = _block_sums(row_sums(squares), WIDTH), _block_sums(counts, WIDTH)
    x0, x1, x2, x3 = quarters(acc)
    s0, s1, s2, s3 = scales
    t0, t1, t2, t3 = sums
    n0, n1, n2, n3 = counts
    for c in range(_CHUNKS):
        slot = e % slots
        mbarrier.wait(ready.index(slot), (e // slots) & 1)
        if c == _CHUNKS - 1:
            mbarrier.arrive(next_turn, count=1)
        r, k = c // _ACROSS * _CHUNK, c % _ACROSS * _CHUNK
        start = starts + tiles.spread((row + r) * columns + column + k)
        at, shared = scale_at + (r * scale_row + k // _CHUNK), shared_at + (r * shared_row + k // WIDTH)
        pointers = scale_pointers(scale_ptrs, at, shared, KINDS)
        mask = (existing > r) & (column + k < columns)
        mean, count, own_factors = t0, n0, 1.0
        if SHARED:
            size = gl.minimum(columns - column - k // WIDTH * WIDTH, WIDTH)
            if PLAIN:
                mean = codes.block_mean(t0 * common[0] * common[0], size)
            else:
                count = size - n0
                mean = codes.block_mean(t0, count)
                own_factors = _factors(factor, column + k, columns, _QUARTER, _CHUNK)
        _update_chunk(
            x0, slot, s0, mean, count, pointers, mask, mask & (k % WIDTH == 0), start, own_factors, rings,
            common, own, bend,
            TILE, KINDS, STOCHASTIC, PLAIN,
        )  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(done.index(slot), count=1)
        x0, x1, x2 = x1, x2, x3
        s0, s1, s2 = s1, s2, s3
        t0, t1, t2 = t1, t2, t3
        n0, n1, n2 = n1, n2, n3
        e += 1
