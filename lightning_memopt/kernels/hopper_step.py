# mypy: ignore-errors
# Device code, whose types are Triton's.
"""One step on a chunk of weight and moments that lies in registers, for both Hopper kernels.

A chunk is [CHUNK, CHUNK], in any layout: its rows are blocks of codes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightning_memopt.kernels import codes, tiles
from lightning_memopt.rules.storage_8bit import BLOCK

CHUNK = BLOCK
_CHUNK = gl.constexpr(CHUNK)
_SLOW, _SIGNED = gl.constexpr(codes.SLOW), gl.constexpr(codes.SIGNED)
_MEAN, _LIMIT = gl.constexpr(codes.MEAN), gl.constexpr(codes.LIMIT)


@gluon.jit
def clipped(raw, factors, common):
    """A gradient that was multiplied by its columns' factors: scaled and clipped, and which of it can be used.

    Clipping comes before the factors, so these multiply the bounds. Moments that a block shares have rules with
    decoupled decay only, so the weight has no part in the gradient.
    """
    bound = common[1] * factors
    return gl.minimum(gl.maximum(raw * common[0], -bound), bound), gl.abs(raw) < _LIMIT * factors


@gluon.jit
def _to_float(stored):
    return tiles.from_bf16(stored) if stored.dtype == gl.bfloat16 else stored.to(gl.float32)


@gluon.jit
def _moment(stored, scale, bend, KIND: gl.constexpr):
    """A moment, and its unit."""
    if KIND == _MEAN:
        return scale[:, None], 1.0
    elif KIND >= _SIGNED:
        return codes.decode(stored, bend, KIND), codes.unit(scale, KIND)[:, None]
    else:
        return _to_float(stored), 1.0


@gluon.jit
def step(
    raw, held, scales, mean, count, start, key, factors, common, own, bend,
    TILE: gl.constexpr, KINDS: gl.constexpr, STOCHASTIC: gl.constexpr, ALIGNED: gl.constexpr, PLAIN: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The weight, as it is to be stored, the moments, and the random bits that round them.

    Args:
        raw: The chunk of dW, times its columns' factors.
        held: Weight and moments as they are stored; what stands in for a moment that blocks share is not looked at.
        scales: Of each moment, every row's scale, or the moment that it shares; looked at where it is coded or shared.
        mean: The square of each row's gradient, averaged over the blocks that share a second moment.
        count: How many weights it is the mean of.
        start, key: Of the random bits: each row's first index in the full parameter, modulo 2^32, and the key.
        factors: Of the chunk's columns, or 1.
        ALIGNED: Rows start at multiples of `tiles.ALIGNED`.
        PLAIN: The gradient is finite and neither clipped by value nor coupled to the weight, as is nearly always so.
        layout: Of the chunk in registers.
    """
    moments: gl.constexpr = len(KINDS)
    SHARED: gl.constexpr = moments > 1 and KINDS[1] == _MEAN
    old = _to_float(held[0])
    # The moments a rule does not have are never looked at; the gradient stands in for them.
    old0, old1, old2 = raw, raw, raw
    unit, unit2, unit_m0, unit_m1, unit_m2 = 1.0, 1.0, 1.0, 1.0, 1.0
    if moments > 0:
        old0, unit_m0 = _moment(held[1], scales[0], bend, KINDS[0])
    if moments > 1:
        old1, unit_m1 = _moment(held[2], scales[1], bend, KINDS[1])
    if moments > 2:
        old2, unit_m2 = _moment(held[3], scales[2], bend, KINDS[2])
    if PLAIN:
        w, g, unit, unit2 = old * common[3], raw, common[0], common[0] * common[0]
    elif SHARED:
        w = old * common[3]
        g, keep = clipped(raw, factors, common)
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
    column = gl.arange(0, _CHUNK, gl.SliceLayout(0, layout))[None, :]
    random = tiles.random_bits_of_rows(key, start, column, ALIGNED)
    dtype: gl.constexpr = held[0].dtype
    w = tiles.round_bf16(w, tiles.high_bits(random)) if STOCHASTIC and dtype == gl.bfloat16 else w.to(dtype)
    return w, (m0, m1, m2), random


@gluon.jit
def stored(x, random, bend, dtype: gl.constexpr, KIND: gl.constexpr, STOCHASTIC: gl.constexpr):
    """A moment that blocks do not share as it is to be stored, and its rows' scales where it is coded."""
    if KIND >= _SIGNED:
        scale = codes.block_scale(gl.max(gl.abs(x), 1))
        return codes.encode(x, scale[:, None], random, bend, KIND), scale
    elif KIND == _SLOW and STOCHASTIC and dtype == gl.bfloat16:
        return tiles.round_bf16(x, tiles.low_bits(random)), x
    else:
        return x.to(dtype), x
