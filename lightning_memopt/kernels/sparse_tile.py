"""One step on active weights, wherever they lie: what both kernels of sparse weights do once they have gradients.

A tile is [N, LANES], each row of it weights of one run: consecutive weights, at most `WIDTH`, that begin at a multiple
of `WIDTH` in a row of the layer where moments have blocks. Blocks are the active weights in a span of a run
(`lightning_memopt.sparsity.spans`); what is summed over one is summed over all lanes that are in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_memopt.kernels import codes, tiles

# Columns of the table of ages are so far apart: as many cohorts as there may be.
COHORTS = 256

_COHORTS = tl.constexpr(COHORTS)
_SLOW, _SIGNED, _POSITIVE = tl.constexpr(codes.SLOW), tl.constexpr(codes.SIGNED), tl.constexpr(codes.POSITIVE)
_CURVE, _MEAN = tl.constexpr(codes.CURVE), tl.constexpr(codes.MEAN)


@triton.jit
def shared(row_ptr, key_ptr, ages, SCALARS: tl.constexpr, COLUMNS: tl.constexpr, KINDS: tl.constexpr):
    """What all tiles of a program have in common: scalars, bend, rounding key, and whether any weight warms up."""
    common, own = tiles.scalars(row_ptr, SCALARS)
    bend = 0.0
    if len(KINDS) > 0 and KINDS[0] == _CURVE:
        bend = tiles.next_scalar(row_ptr, SCALARS)
    return common, own, bend, tl.load(key_ptr), tl.load(ages + COLUMNS * _COHORTS) != 0.0


@triton.jit
def gather(pointer, at, active, other, MASKED: tl.constexpr):
    """Elements at any places; those of lanes that are not active are anything unless `MASKED`."""
    if MASKED:
        # That neighbouring lanes read neighbouring elements decides which threads take them; it need not be true of
        # all, as a mask that is not constant keeps loads from being joined.
        return tl.load(tl.max_contiguous(pointer + at, [1, 2]), mask=active, other=other)
    else:
        return tl.load(pointer + at)


@triton.jit
def scatter(pointer, at, values, active):
    """Write the elements of active lanes."""
    tl.store(tl.max_contiguous(pointer + at, [1, 2]), values, mask=active)


@triton.jit
def over_spans(x, part, LARGEST: tl.constexpr, SPANS: tl.constexpr, LENGTH: tl.constexpr):
    """For each span of a run the sum over its lanes, or the largest of magnitudes, in a tuple: [N, 1] each.

    Args:
        part: Each lane's place in its run.
    """
    result = ()
    for i in tl.static_range(SPANS):
        mine = x if SPANS == 1 else tl.where(part // LENGTH == i, x, tl.zeros_like(x))
        if LARGEST:  # noqa: SIM108
            # Magnitudes are in the order of their bits, and integers are compared across a warp in one instruction.
            one = tl.max(mine.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
        else:
            one = tl.sum(mine, 1)
        result = result + (one[:, None],)  # type: ignore[assignment]
    return result


@triton.jit
def spread(values, part, LENGTH: tl.constexpr):
    """Each lane's own of the values per span; the one there is, if so."""
    if len(values) == 1:
        return values[0]
    else:
        result = values[0] + tl.zeros(part.shape, values[0].dtype)
        for i in tl.static_range(1, len(values)):
            result = tl.where(part // LENGTH == i, values[i], result)
        return result


@triton.jit
def added(a, b):
    """Sums of what two tiles have of the same spans."""
    result = ()
    for i in tl.static_range(len(a)):
        result = result + (a[i] + b[i],)  # type: ignore[assignment]
    return result


@triton.jit
def larger(a, b):
    """The larger of what two tiles have of the same spans."""
    result = ()
    for i in tl.static_range(len(a)):
        result = result + (tl.maximum(a[i], b[i]),)  # type: ignore[assignment]
    return result


@triton.jit
def nothing(N: tl.constexpr, KINDS: tl.constexpr, LENGTHS: tl.constexpr, WIDTH: tl.constexpr):
    """What `sums` and `compute` find of no weights."""
    total, number, largest0, largest1 = (), (), (), ()
    for _ in tl.static_range(WIDTH // LENGTHS[1]):
        if KINDS[1] == _MEAN:
            total = total + (tl.zeros((N, 1), tl.float32),)  # type: ignore[assignment]
            number = number + (tl.zeros((N, 1), tl.int32),)  # type: ignore[assignment]
        else:
            largest1 = largest1 + (tl.zeros((N, 1), tl.float32),)  # type: ignore[assignment]
    for _ in tl.static_range(WIDTH // LENGTHS[0]):
        largest0 = largest0 + (tl.zeros((N, 1), tl.float32),)  # type: ignore[assignment]
    return total, number, largest0, largest1


@triton.jit
def _means(total, number):
    result = ()
    for i in tl.static_range(len(total)):
        result = result + (codes.block_mean(total[i], number[i]),)  # type: ignore[assignment]
    return result


@triton.jit
def _block(place, columns, i: tl.constexpr, LENGTH: tl.constexpr):
    """Number of the `i`-th span of each run, and whether there is one."""
    line, column, there, part = place
    return line * tl.cdiv(columns, LENGTH) + column // LENGTH + i, there & (column + i * LENGTH < columns)


@triton.jit
def _of_blocks(values, place, columns, SPANS: tl.constexpr, LENGTH: tl.constexpr):
    """What blocks have one of, as `over_spans`."""
    result = ()
    for i in tl.static_range(SPANS):
        block, exists = _block(place, columns, i, LENGTH)
        result = result + (tl.load(values + block, mask=exists, other=0.0),)  # type: ignore[assignment]
    return result


@triton.jit
def _load(
    values, scales, entry, place, columns, active, bend,
    KIND: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A moment, and its unit; [N, 1] where a run has one value."""
    SPANS: tl.constexpr = WIDTH // LENGTH
    unit = 1.0
    if KIND <= _SLOW:
        x = gather(values, entry, active, 0.0, MASKED).to(tl.float32)
    elif KIND == _MEAN:
        x = spread(_of_blocks(values, place, columns, SPANS, LENGTH), place[3], LENGTH)
    else:
        x = codes.decode(gather(values, entry, active, 0, MASKED), bend, KIND)
        unit = codes.unit(spread(_of_blocks(scales, place, columns, SPANS, LENGTH), place[3], LENGTH), KIND)
    return x, unit


@triton.jit
def _store(
    x, values, entry, place, active, keep, random, bend, largest,
    KIND: tl.constexpr, LENGTH: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write what a moment has per weight."""
    if KIND <= _SLOW:
        if KIND == _SLOW and STOCHASTIC and values.dtype.element_ty == tl.bfloat16:
            scatter(values, entry, tiles.round_bf16(x, tiles.low_bits(random)), active & keep)
        else:
            scatter(values, entry, x.to(values.dtype.element_ty), active & keep)
    elif KIND != _MEAN:
        scale = ()
        for i in tl.static_range(len(largest)):
            scale = scale + (codes.block_scale(largest[i]),)  # type: ignore[assignment]
        scale = spread(scale, place[3], LENGTH)
        scatter(values, entry, codes.encode(x, scale, random, bend, KIND), active)


@triton.jit
def _store_blocks(
    x, values, scales, active, place, columns, largest,
    KIND: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write what a moment has per block."""
    if KIND == _MEAN:
        block, exists = _block(place, columns, 0, LENGTH)
        if WIDTH == LENGTH:
            tl.store(values + block, x, mask=exists)
        else:
            # All lanes of a block write alike.
            scatter(values, block + place[3] // LENGTH, x, active)
    elif KIND >= _SIGNED:
        for i in tl.static_range(WIDTH // LENGTH):
            block, exists = _block(place, columns, i, LENGTH)
            tl.store(scales + block, codes.block_scale(largest[i]).to(scales.dtype.element_ty), mask=exists)


@triton.jit
def read(
    raw, at, entry, active, place, columns, given, update,
    AGED: tl.constexpr, KINDS: tl.constexpr, LENGTHS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile: the weights of `entry` with their gradient, and all that an update of them needs.

    Args:
        raw: float32 [N, LANES] gradient; of lanes that are not active, any.
        at: Number of each lane's weight, int32.
        entry: Its number among the active ones, int32.
        active: Which lanes take a step.
        place: Line and column that each run begins at, and whether it exists, [N, 1]; and each lane's place in its run.
            Used where moments have blocks only.
        columns: Length of a row.
        given: See `shared`.
        update: The weight, float32 or bf16; tuples of pointers to the rule's moments, which have one entry per active
            weight or one value per block, and to their scales (any pointer where none); `Active.cohort`;
            `Update.nonfinite`; the low 32 bits of `Update.offset`; and `Ages.table`.
        AGED: For each scalar of the rule's tile function the column in `Ages.table`, or 0 where it is the same for all
            weights.
        KINDS: The kind of each moment, see `kernels.codes`.
        LENGTHS: Weights in each moment's spans, divisors of WIDTH; anything for one without.
        MASKED: Whether places of lanes that are not active must not be read.
    """
    common, plain, bend, key, warming = given
    w_ptr, values, scales, cohort, nonfinite_ptr, offset, ages = update
    old = gather(w_ptr, at, active, 0.0, MASKED).to(tl.float32)
    age = gather(cohort, entry, active, 0, MASKED).to(tl.int32)
    # The gradient stands in for moments that the rule does not have and never looks at.
    old0, old1, old2 = raw, raw, raw
    unit0, unit1, unit2 = 1.0, 1.0, 1.0
    if len(KINDS) > 0:
        old0, unit0 = _load(
            values[0], scales[0], entry, place, columns, active, bend, KINDS[0], LENGTHS[0], WIDTH, MASKED
        )
    if len(KINDS) > 1:
        old1, unit1 = _load(
            values[1], scales[1], entry, place, columns, active, bend, KINDS[1], LENGTHS[1], WIDTH, MASKED
        )
    if len(KINDS) > 2:
        old2, unit2 = _load(
            values[2], scales[2], entry, place, columns, active, bend, KINDS[2], LENGTHS[2], WIDTH, MASKED
        )
    own = ()
    for i in tl.static_range(len(AGED)):
        if AGED[i] > 0:  # noqa: SIM108
            own = own + (gather(ages + AGED[i] * _COHORTS, age, active, 1.0, MASKED),)  # type: ignore[assignment]
        else:
            own = own + (plain[i],)  # type: ignore[assignment]
    decayed, g = tiles.prepare(old, raw, common)
    SHARED: tl.constexpr = len(KINDS) > 1 and KINDS[1] == _MEAN
    keep = codes.below_limit(raw) if SHARED else tiles.finite(raw)
    return (at, entry, active, keep, place, age), decayed, g, (old0, old1, old2), (unit0, unit1, unit2), own


@triton.jit
def sums(tile, KINDS: tl.constexpr, LENGTHS: tl.constexpr, WIDTH: tl.constexpr):
    """What a tile adds to the means that spans share: squared gradients, and how many; anything where none do."""
    where, decayed, g, old, units, own = tile
    at, entry, active, keep, place, age = where
    if len(KINDS) > 1 and KINDS[1] == _MEAN:
        counts, part = active & keep, place[3]
        SPANS: tl.constexpr = WIDTH // LENGTHS[1]
        total = over_spans(tl.where(counts, g * g, 0.0), part, False, SPANS, LENGTHS[1])
        number = over_spans(counts.to(tl.int32), part, False, SPANS, LENGTHS[1])
    else:
        total, number = (), ()
    return total, number


@triton.jit
def compute(
    tile, total, number,
    TILE: tl.constexpr, KINDS: tl.constexpr, LENGTHS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Take one step of rule `TILE` on a tile.

    A weight whose gradient is not finite keeps its codes' values, and does not count in a second moment that its block
    shares, which stays as it is where no other is left.

    Args:
        total, number: The sums of whole spans.

    Returns:
        Weight and moments; and the largest of the first and of the second moment in each span, where they are codes.
    """
    where, decayed, g, old, units, own = tile
    at, entry, active, keep, place, age = where
    old0, old1, old2 = old
    part, g2 = place[3], g * g
    if len(KINDS) > 1 and KINDS[1] == _MEAN:
        g2 = spread(_means(total, number), part, LENGTHS[1])
    w, m0, m1, m2 = TILE(decayed, g, g2, old0, old1, old2, (1.0, 1.0, units[0], units[1], units[2]), own)
    largest0, largest1 = (), ()
    if len(KINDS) > 1 and KINDS[1] == _MEAN:
        m1 = tl.where(spread(number, part, LENGTHS[1]) > 0, m1, old1)
    if len(KINDS) > 0 and KINDS[0] >= _SIGNED:
        m0 = tl.where(keep, m0, old0 * units[0])
        largest0 = over_spans(tl.where(active, tl.abs(m0), 0.0), part, True, WIDTH // LENGTHS[0], LENGTHS[0])
    if len(KINDS) > 1 and KINDS[1] == _POSITIVE:
        m1 = tl.where(keep, m1, old1 * units[1])
        largest1 = over_spans(tl.where(active, m1, 0.0), part, True, WIDTH // LENGTHS[1], LENGTHS[1])
    return (w, m0, m1, m2), largest0, largest1


@triton.jit
def write(
    tile, new, largest0, largest1, given, update,
    KINDS: tl.constexpr, LENGTHS: tl.constexpr, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write what `compute` returned of a tile, per weight; what is not finite is left out, and reported.

    Args:
        largest0, largest1: Of whole spans.
        STOCHASTIC: Whether bf16 weights and bf16 slow moments are rounded stochastically, as positive codes always are.
    """
    where, decayed, g, old, units, own = tile
    at, entry, active, keep, place, age = where
    common, plain, bend, key, warming = given
    w_ptr, values, scales, cohort, nonfinite_ptr, offset, ages = update
    w, m0, m1, m2 = new
    tl.store(nonfinite_ptr + at * 0, 1, mask=active & (keep == 0))
    if warming:
        ramp = gather(ages, age, active, 1.0, MASKED)
        w = tl.where(ramp == 1.0, w, decayed + (w - decayed) * ramp)
    random = tiles.random_bits(key, at + offset)
    if STOCHASTIC and w_ptr.dtype.element_ty == tl.bfloat16:
        scatter(w_ptr, at, tiles.round_bf16(w, tiles.high_bits(random)), active & keep)
    else:
        scatter(w_ptr, at, w.to(w_ptr.dtype.element_ty), active & keep)
    if len(KINDS) > 0:
        _store(
            m0, values[0], entry, place, active, keep, random, bend, largest0, KINDS[0], LENGTHS[0], STOCHASTIC
        )  # fmt: skip
    if len(KINDS) > 1:
        _store(
            m1, values[1], entry, place, active, keep, random, bend, largest1, KINDS[1], LENGTHS[1], STOCHASTIC
        )  # fmt: skip
    if len(KINDS) > 2:
        _store(m2, values[2], entry, place, active, keep, random, bend, (), KINDS[2], LENGTHS[2], STOCHASTIC)


@triton.jit
def write_blocks(
    tile, new, largest0, largest1, columns, update,
    KINDS: tl.constexpr, LENGTHS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write what blocks have one of, when all tiles of their runs have been read; `tile` is any of these."""
    where, decayed, g, old, units, own = tile
    at, entry, active, keep, place, age = where
    w_ptr, values, scales, cohort, nonfinite_ptr, offset, ages = update
    w, m0, m1, m2 = new
    if len(KINDS) > 0:
        _store_blocks(
            m0, values[0], scales[0], active, place, columns, largest0, KINDS[0], LENGTHS[0], WIDTH
        )  # fmt: skip
    if len(KINDS) > 1:
        _store_blocks(
            m1, values[1], scales[1], active, place, columns, largest1, KINDS[1], LENGTHS[1], WIDTH
        )  # fmt: skip


@triton.jit
def step(
    tile, columns, given, update,
    TILE: tl.constexpr, KINDS: tl.constexpr, LENGTHS: tl.constexpr, WIDTH: tl.constexpr,
    STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take one step on a tile that holds whole runs, or whose moments have no blocks."""
    total, number = sums(tile, KINDS, LENGTHS, WIDTH)
    new, largest0, largest1 = compute(tile, total, number, TILE, KINDS, LENGTHS, WIDTH)
    write(tile, new, largest0, largest1, given, update, KINDS, LENGTHS, STOCHASTIC, MASKED)
    write_blocks(tile, new, largest0, largest1, columns, update, KINDS, LENGTHS, WIDTH)
