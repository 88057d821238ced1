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

# Passes over the tiles of a run, see `step`.
WHOLE, SUMS, LARGEST, WRITE = range(4)

_COHORTS = tl.constexpr(COHORTS)
_WHOLE, _SUMS, _LARGEST, _WRITE = (tl.constexpr(number) for number in range(4))
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
    """The sum over each span of a run, or the largest element: [N, SPANS]; `part` is each lane's place in its run."""
    if SPANS == 1:
        return (tl.max(x, 1) if LARGEST else tl.sum(x, 1))[:, None]
    else:
        number = tl.arange(0, SPANS)[None, :]
        result = tl.zeros((x.shape[0], SPANS), x.dtype)
        for i in tl.static_range(SPANS):
            mine = tl.where(part // LENGTH == i, x, tl.zeros_like(x))
            one = tl.max(mine, 1) if LARGEST else tl.sum(mine, 1)
            result = tl.where(number == i, one[:, None], result)
        return result


@triton.jit
def spread(values, part, LENGTH: tl.constexpr):
    """Each lane's own of the values per span."""
    SPANS: tl.constexpr = values.shape[1]
    if SPANS == 1:
        return values + tl.zeros(part.shape, values.dtype)
    else:
        number = tl.arange(0, SPANS)[None, :]
        result = tl.zeros(part.shape, values.dtype)
        for i in tl.static_range(SPANS):
            one = tl.sum(tl.where(number == i, values, tl.zeros_like(values)), 1)
            result = tl.where(part // LENGTH == i, one[:, None], result)
        return result


@triton.jit
def _block(place, columns, LENGTH: tl.constexpr):
    """Number of the span that each lane is in."""
    line, column = place
    return line * tl.cdiv(columns, LENGTH) + column // LENGTH


@triton.jit
def _load(
    values, scales, entry, place, columns, active, bend,
    KIND: tl.constexpr, LENGTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A moment, and its unit."""
    unit = 1.0
    if KIND <= _SLOW:
        x = gather(values, entry, active, 0.0, MASKED).to(tl.float32)
    elif KIND == _MEAN:
        x = gather(values, _block(place, columns, LENGTH), active, 0.0, MASKED)
    else:
        x = codes.decode(gather(values, entry, active, 0, MASKED), bend, KIND)
        unit = codes.unit(gather(scales, _block(place, columns, LENGTH), active, 0.0, MASKED), KIND)
    return x, unit


@triton.jit
def _store(
    x, values, scales, entry, place, columns, part, active, keep, random, bend, largest,
    KIND: tl.constexpr, LENGTH: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write a moment; lanes of one block write what it shares alike."""
    if KIND <= _SLOW:
        if KIND == _SLOW and STOCHASTIC and values.dtype.element_ty == tl.bfloat16:
            scatter(values, entry, tiles.round_bf16(x, tiles.low_bits(random)), active & keep)
        else:
            scatter(values, entry, x.to(values.dtype.element_ty), active & keep)
    elif KIND == _MEAN:
        scatter(values, _block(place, columns, LENGTH), x, active)
    else:
        scale = spread(codes.block_scale(largest), part, LENGTH)
        if KIND == _SIGNED:
            code = codes.encode_signed(x, scale)
        elif KIND == _POSITIVE:
            code = codes.encode_positive(x, scale, random, STOCHASTIC)
        else:
            code = codes.encode_curve(x, scale, bend)
        scatter(values, entry, code, active)
        scatter(scales, _block(place, columns, LENGTH), scale.to(scales.dtype.element_ty), active)


@triton.jit
def none(N: tl.constexpr, KINDS: tl.constexpr, LENGTHS: tl.constexpr, WIDTH: tl.constexpr):
    """What `step` has found of no lanes at all."""
    S0: tl.constexpr = WIDTH // LENGTHS[0] if len(KINDS) > 0 and KINDS[0] >= _SIGNED else 1
    S1: tl.constexpr = WIDTH // LENGTHS[1] if len(KINDS) > 1 and KINDS[1] >= _SIGNED else 1
    zeros0, zeros1 = tl.zeros((N, S0), tl.float32), tl.zeros((N, S1), tl.float32)
    return zeros1, tl.zeros((N, S1), tl.int32), zeros0, zeros1


@triton.jit
def step(
    raw, at, entry, active, place, columns, found, given, update,
    TILE: tl.constexpr, AGED: tl.constexpr, KINDS: tl.constexpr, LENGTHS: tl.constexpr, WIDTH: tl.constexpr,
    STOCHASTIC: tl.constexpr, MASKED: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """Take one step of rule `TILE` on a tile of weights, in place.

    A non-finite gradient of an active weight is left out, with what the weight's moments were, and reported; it does
    not count in a second moment that its block shares, which stays as it is where no other is left.

    Args:
        raw: float32 [N, LANES] gradient; of lanes that are not active, any.
        at: Number of each lane's weight, int32.
        entry: Its number among the active ones, int32.
        active: Which lanes take a step.
        place: Line and column of each lane's weight; used where moments have blocks only.
        columns: Length of a row.
        found: Where tiles hold parts of runs, what earlier passes have found of the whole.
        given: See `shared`.
        update: The weight, float32 or bf16; tuples of pointers to the rule's moments, which have one entry per active
            weight or one value per block, and to their scales (any pointer where none); `Active.cohort`;
            `Update.nonfinite`; the low 32 bits of `Update.offset`; and `Ages.table`.
        TILE: The rule's tile function.
        AGED: For each of its scalars the column in `Ages.table`, or 0 where it is the same for all weights.
        KINDS: The kind of each moment, see `kernels.codes`.
        LENGTHS: Weights in each moment's spans, divisors of WIDTH; anything for one without.
        STOCHASTIC: Whether a bf16 weight, bf16 slow moments and positive codes are rounded stochastically.
        MASKED: Whether places of lanes that are not active must not be read.
        PASS: `WHOLE` where the tile holds whole runs, or moments have no blocks; else one of `SUMS`, `LARGEST`, which
            write nothing, and `WRITE`.

    Returns:
        Per span the sum of squared gradients and of their number, and the largest of the first and second moment.
    """
    common, plain, bend, key, warming = given
    w_ptr, values, scales, cohort, nonfinite_ptr, offset, ages = update
    total, number, largest0, largest1 = found
    SHARED: tl.constexpr = len(KINDS) > 1 and KINDS[1] == _MEAN
    part = place[1] % WIDTH
    old = gather(w_ptr, at, active, 0.0, MASKED).to(tl.float32)
    decayed, g = tiles.prepare(old, raw, common)
    g2 = g * g
    keep = codes.below_limit(raw) if SHARED else tiles.finite(raw)
    if SHARED and PASS <= _SUMS:
        counts = active & keep
        total = over_spans(tl.where(counts, g2, 0.0), part, False, total.shape[1], LENGTHS[1])
        number = over_spans(counts.to(tl.int32), part, False, total.shape[1], LENGTHS[1])
    if PASS != _SUMS:
        age = gather(cohort, entry, active, 0, MASKED).to(tl.int32)
        old0, old1, old2 = raw, raw, raw
        unit0, unit1, unit2 = 1.0, 1.0, 1.0
        if len(KINDS) > 0:
            old0, unit0 = _load(values[0], scales[0], entry, place, columns, active, bend, KINDS[0], LENGTHS[0], MASKED)
        if len(KINDS) > 1:
            old1, unit1 = _load(values[1], scales[1], entry, place, columns, active, bend, KINDS[1], LENGTHS[1], MASKED)
        if len(KINDS) > 2:
            old2, unit2 = _load(values[2], scales[2], entry, place, columns, active, bend, KINDS[2], LENGTHS[2], MASKED)
        own = ()
        for i in tl.static_range(len(AGED)):
            if AGED[i] > 0:
                own = own + (gather(ages + AGED[i] * _COHORTS, age, active, 1.0, MASKED),)  # type: ignore[assignment]
            else:
                own = own + (plain[i],)  # type: ignore[assignment]
        if SHARED:
            g2 = spread(codes.block_mean(total, number), part, LENGTHS[1])
        w, m0, m1, m2 = TILE(decayed, g, g2, old0, old1, old2, (1.0, 1.0, unit0, unit1, unit2), own)
        # Moments without blocks are not written; all of a block's codes are, under its new scale.
        if SHARED:
            m1 = tl.where(spread(number, part, LENGTHS[1]) > 0, m1, old1)
        if len(KINDS) > 0 and KINDS[0] >= _SIGNED:
            m0 = tl.where(keep, m0, old0 * unit0)
            if PASS != _WRITE:
                largest0 = over_spans(tl.where(active, tl.abs(m0), 0.0), part, True, largest0.shape[1], LENGTHS[0])
        if len(KINDS) > 1 and KINDS[1] == _POSITIVE:
            m1 = tl.where(keep, m1, old1 * unit1)
            if PASS != _WRITE:
                largest1 = over_spans(tl.where(active, m1, 0.0), part, True, largest1.shape[1], LENGTHS[1])
        if PASS == _WHOLE or PASS == _WRITE:  # noqa: SIM109
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
                    m0, values[0], scales[0], entry, place, columns, part, active, keep, random, bend, largest0,
                    KINDS[0], LENGTHS[0], STOCHASTIC,
                )  # fmt: skip
            if len(KINDS) > 1:
                _store(
                    m1, values[1], scales[1], entry, place, columns, part, active, keep, random, bend, largest1,
                    KINDS[1], LENGTHS[1], STOCHASTIC,
                )  # fmt: skip
            if len(KINDS) > 2:
                _store(
                    m2, values[2], scales[2], entry, place, columns, part, active, keep, random, bend, largest1,
                    KINDS[2], LENGTHS[2], STOCHASTIC,
                )  # fmt: skip
    return total, number, largest0, largest1
