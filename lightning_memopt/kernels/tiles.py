"""The rules' arithmetic on a tile, written once for every kernel: Triton, its interpreter, and Gluon.

A tile function takes float32 tiles of any shape and layout and returns the updated ones:

    w, m0, m1, m2 = tile(w, g, g2, m0, m1, m2, units, s)

with the weight after decay, the gradient after `prepare`, the squared gradient (or its mean over a block), the rule's
moments in the order of `Rule.moments` (moments a rule does not have are passed through), and `s`, the rule's own
scalars in the order of `Rule.scalar_names`. Each is the formula of the rule of that name in `lightning_memopt.rules`.
A kernel calls, in this order: `scalars` once, then per tile `is_plain` and `small_enough`, and where these fail
`finite` and `prepare`, the tile function, `random_bits` and `round_bf16`.

What goes in may come in `units`: the gradient is units[0] * g, its square units[1] * g2, moment i units[2 + i] * mi;
what comes out is in none. A tile function multiplies units by its scalars before either meets a tile, so a unit that is
one number, or one per block, costs nothing per weight: the gradient's scale, the scale of a block of codes. A unit of
1.0 is no multiplication at all.

Gluon kernels call these functions as they are: Triton compiles a called function in the caller's dialect.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from lightning_memopt.kernels.rounding import FACTOR, FACTOR_STEP, GOLDEN, MUL1, SHARED
from lightning_memopt.rules.base import COMMON_SCALARS

# Constants of `kernels.rounding.rounding_bits`.
_GOLDEN, _MUL1 = tl.constexpr(GOLDEN), tl.constexpr(MUL1)
_FACTOR, _FACTOR_STEP = tl.constexpr(FACTOR), tl.constexpr(FACTOR_STEP)
_SHARED, _NOT_SHARED = tl.constexpr(SHARED), tl.constexpr(~SHARED & 0xFFFFFFFF)
# Rows whose first index is a multiple of this have every element's shared hash begin in them.
ALIGNED = 64
_COMMON = tl.constexpr(len(COMMON_SCALARS))
# Scales of the gradient whose square a float32 holds, and sums of squares that leave room for more, of elements below
# the limit of any rule (`Rule.limit`).
_LEAST_SCALE, _MOST_SQUARES = tl.constexpr(2.0**-40), tl.constexpr(2.0**100)
# A step size that moves nothing, yet far from what a float32 cannot divide by.
NO_STEP = 2.0**-100
_NO_STEP = tl.constexpr(NO_STEP)
# The interpreter runs numpy, not PTX.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# ------------------------------------------------------------------------------------------------ shared by all rules
@triton.jit
def scalars(row, COUNT: tl.constexpr):
    """The parameter's row of device scalars as two tuples: the four common ones, and the rule's own `COUNT`."""
    common = ()
    for i in tl.static_range(_COMMON):
        common = common + (tl.load(row + i),)  # type: ignore[assignment]
    own = ()
    for i in tl.static_range(COUNT):
        own = own + (tl.load(row + _COMMON + i),)  # type: ignore[assignment]
    return common, own


@triton.jit
def next_scalar(row, COUNT: tl.constexpr):
    """The scalar that follows those of `scalars`."""
    return tl.load(row + _COMMON + COUNT)


@triton.jit
def finite(g):
    """Which gradient elements are neither NaN nor infinite; the others must leave weight and state as they are."""
    return tl.abs(g) < float("inf")


@triton.jit
def prepare(w, g, common):
    """Scale, clip and couple the raw gradient, decay the weight; returns both (see `lightning_memopt.rules.base`)."""
    scale, clip, l2, decay = common
    g = g * scale
    # A branch that all threads share: most runs use neither, and then it costs nothing per element.
    if (clip < float("inf")) | (l2 != 0.0):
        g = tl.minimum(tl.maximum(g, -clip), clip) + l2 * w
    return w * decay, g


@triton.jit
def is_plain(common):
    """Whether all that `prepare` does to the gradient is a scale that its square bears as well, so that it is a unit.

    Neither value clipping nor coupled decay is on; and as the scale is at most 1, what is lost where an unscaled square
    is too small for a float32 would be lost where it is scaled. See `small_enough` for large ones.
    """
    scale, clip, l2, decay = common
    size = tl.abs(scale)
    return (clip == float("inf")) & (l2 == 0.0) & (size <= 1.0) & (size >= _LEAST_SCALE)


@triton.jit
def small_enough(squares):
    """Whether a sum of squared gradient elements shows that none of them is too large, infinite, or NaN."""
    return squares < _MOST_SQUARES


@triton.jit
def random_bits(key, index):
    """`kernels.rounding.rounding_bits`: 32 bits per element; only the low 32 bits of `index` matter."""
    return _hash(_spread(index) + key.to(tl.uint32)) * _own_factor(index)


@triton.jit
def random_bits_of_rows(key, start, column, aligned):
    """`random_bits` of rows of a tile; where hashes can be shared, as nearly always, they are.

    Args:
        key: As in `random_bits`.
        start: Integers [N], the first index of each row.
        column: [1, WIDTH], what is added to it.
        aligned: Whether all of `start` are multiples of `ALIGNED`, known to the compiler or not. It then sees which
            columns share a hash, and that a thread's factors are constants.
    """
    if aligned:
        random = _of_rows(key, start, _spread(column), _own_factor(column))
    else:
        random = random_bits(key, start[:, None] + column)
    return random


@triton.jit
def random_bits_of_runs(key, start, aligned, WIDTH: tl.constexpr):
    """`random_bits_of_rows` of rows [N, WIDTH] of which a thread holds neighbours.

    Their columns are put together from those bits that share a hash and those that share a factor, as the compiler does
    not see otherwise which of a thread's are alike.
    """
    if aligned:
        tl.static_assert(_SHARED & 0b1111 == 0b1001)
        parts: tl.constexpr = (WIDTH // 16, 2, 4, 2)
        sixteen = tl.arange(0, WIDTH // 16)[:, None, None, None] * 16
        hashed = sixteen + tl.arange(0, 4)[None, None, :, None] * 2
        own = sixteen + tl.arange(0, 2)[None, :, None, None] * 8 + tl.arange(0, 2)[None, None, None, :]
        spread = tl.reshape(tl.broadcast_to(_spread(hashed), parts), (1, WIDTH))
        random = _of_rows(key, start, spread, tl.reshape(tl.broadcast_to(_own_factor(own), parts), (1, WIDTH)))
    else:
        random = random_bits(key, start[:, None] + tl.arange(0, WIDTH)[None, :])
    return random


@triton.jit
def _of_rows(key, start, spread, factor):
    first = start.to(tl.uint32) * _GOLDEN + key.to(tl.uint32)
    return _hash(first[:, None] + spread) * factor


@triton.jit
def _spread(index):
    return (index.to(tl.uint32) & _NOT_SHARED) * _GOLDEN


@triton.jit
def _hash(x):
    x = (x ^ (x >> 15)) * _MUL1
    return x ^ (x >> 13)


@triton.jit
def _own_factor(index):
    x = (index.to(tl.uint32) & _SHARED) * _FACTOR_STEP + _FACTOR
    return x ^ (x >> 16) | 1


@triton.jit
def high_bits(random):
    """The 16 bits that round a weight."""
    return random >> 16


@triton.jit
def low_bits(random):
    """The 16 bits that round a slow moment."""
    return random & 0xFFFF


@triton.jit
def round_bf16(x, random16):
    """float32 to bf16, up with probability equal to the distance: `kernels.rounding.round_stochastic`."""
    bits = x.to(tl.uint32, bitcast=True) + random16
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def from_bf16(x):
    """bf16 pairs as they come from memory to float32, in one instruction each; a conversion takes three for two."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def reciprocal(x):
    """1 / x in one instruction, to the last place but one; a full division would be a fifth of the whole update."""
    if _INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _lerp(m, m_unit, g, g_unit, weight):
    """Move m towards g by a share of the way."""
    return m * (m_unit * (1.0 - weight)) + g * (g_unit * weight)


# ------------------------------------------------------------------------------------------------------ rule by rule
@triton.jit
def adam(w, g, g2, m0, m1, m2, units, s):
    """Adam and AdamW: exp_avg, exp_avg_sq."""
    one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_bias2, eps = s
    # step m / (sqrt(v) c + eps) with the step in the denominator, which leaves two operations less per element; where
    # there is none, the denominator is infinite.
    some = step_size > _NO_STEP
    slope, least = tl.where(some, inv_sqrt_bias2 / step_size, 1.0), tl.where(some, eps / step_size, float("inf"))
    return adam_by_slope(w, g, g2, m0, m1, m2, units, (one_minus_beta1, beta2, one_minus_beta2, slope, least))


@triton.jit
def adam_by_slope(w, g, g2, m0, m1, m2, units, s):
    """`adam` with inv_sqrt_bias2 / step_size and eps / step_size in place of the last three scalars."""
    one_minus_beta1, beta2, one_minus_beta2, slope, least = s
    m0 = _lerp(m0, units[2], g, units[0], one_minus_beta1)
    m1 = m1 * (units[3] * beta2) + g2 * (units[1] * one_minus_beta2)
    w -= m0 * reciprocal(tl.sqrt(m1) * slope + least)
    return w, m0, m1, m2


@triton.jit
def nadam(w, g, g2, m0, m1, m2, units, s):
    """NAdam: exp_avg, exp_avg_sq."""
    one_minus_beta1, beta2, one_minus_beta2, g_step, m_step, inv_sqrt_bias2, eps = s
    m0 = _lerp(m0, units[2], g, units[0], one_minus_beta1)
    m1 = m1 * (units[3] * beta2) + g2 * (units[1] * one_minus_beta2)
    w -= (g * (units[0] * g_step) + m0 * m_step) * reciprocal(tl.sqrt(m1) * inv_sqrt_bias2 + eps)
    return w, m0, m1, m2


@triton.jit
def radam(w, g, g2, m0, m1, m2, units, s):
    """RAdam: exp_avg, exp_avg_sq."""
    one_minus_beta1, beta2, one_minus_beta2, plain_step, rectified_step, eps = s
    m0 = _lerp(m0, units[2], g, units[0], one_minus_beta1)
    m1 = m1 * (units[3] * beta2) + g2 * (units[1] * one_minus_beta2)
    w -= m0 * (plain_step + rectified_step * reciprocal(tl.sqrt(m1) + eps))
    return w, m0, m1, m2


@triton.jit
def sgd(w, g, g2, m0, m1, m2, units, s):
    """SGD without momentum: no moments."""
    lr, momentum, nesterov = s
    return w - g * (units[0] * lr), m0, m1, m2


@triton.jit
def sgd_momentum(w, g, g2, m0, m1, m2, units, s):
    """SGD with momentum, Nesterov's or the plain one: momentum_buffer."""
    lr, momentum, nesterov = s
    g = g * units[0]
    m0 = m0 * (units[2] * momentum) + g
    # nesterov is 0 or 1, so this is m0 or g + momentum m0, exactly.
    w -= lr * tl.where(nesterov != 0.0, g + momentum * m0, m0)
    return w, m0, m1, m2


@triton.jit
def rmsprop(w, g, g2, m0, m1, m2, units, s):
    """RMSprop: square_avg."""
    lr, alpha, one_minus_alpha, momentum, eps, centered = s
    m0 = m0 * (units[2] * alpha) + g2 * (units[1] * one_minus_alpha)
    w -= g * (units[0] * lr) * reciprocal(tl.sqrt(m0) + eps)
    return w, m0, m1, m2


@triton.jit
def rmsprop_momentum(w, g, g2, m0, m1, m2, units, s):
    """RMSprop with momentum: square_avg, momentum_buffer."""
    lr, alpha, one_minus_alpha, momentum, eps, centered = s
    m0 = m0 * (units[2] * alpha) + g2 * (units[1] * one_minus_alpha)
    m1 = m1 * (units[3] * momentum) + g * units[0] * reciprocal(tl.sqrt(m0) + eps)
    return w - lr * m1, m0, m1, m2


@triton.jit
def _deviation(square, mean):
    # Rounding can leave the variance of a steady gradient below zero.
    return tl.sqrt(tl.maximum(square - mean * mean, 0.0))


@triton.jit
def rmsprop_centered(w, g, g2, m0, m1, m2, units, s):
    """Centred RMSprop: square_avg, grad_avg."""
    lr, alpha, one_minus_alpha, momentum, eps, centered = s
    m0 = m0 * (units[2] * alpha) + g2 * (units[1] * one_minus_alpha)
    m1 = _lerp(m1, units[3], g, units[0], one_minus_alpha)
    w -= g * (units[0] * lr) * reciprocal(_deviation(m0, m1) + eps)
    return w, m0, m1, m2


@triton.jit
def rmsprop_momentum_centered(w, g, g2, m0, m1, m2, units, s):
    """Centred RMSprop with momentum: square_avg, momentum_buffer, grad_avg."""
    lr, alpha, one_minus_alpha, momentum, eps, centered = s
    m0 = m0 * (units[2] * alpha) + g2 * (units[1] * one_minus_alpha)
    m2 = _lerp(m2, units[4], g, units[0], one_minus_alpha)
    m1 = m1 * (units[3] * momentum) + g * units[0] * reciprocal(_deviation(m0, m2) + eps)
    return w - lr * m1, m0, m1, m2


@triton.jit
def adagrad(w, g, g2, m0, m1, m2, units, s):
    """Adagrad: sum."""
    step_size, eps = s
    m0 = m0 * units[2] + g2 * units[1]
    w -= g * (units[0] * step_size) * reciprocal(tl.sqrt(m0) + eps)
    return w, m0, m1, m2


@triton.jit
def lion(w, g, g2, m0, m1, m2, units, s):
    """Lion: exp_avg."""
    lr, one_minus_beta1, one_minus_beta2 = s
    direction = _lerp(m0, units[2], g, units[0], one_minus_beta1)
    sign = direction.to(tl.uint32, bitcast=True) & 0x80000000
    w -= tl.where(direction == 0.0, 0.0, (sign | lr.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True))
    return w, _lerp(m0, units[2], g, units[0], one_minus_beta2), m1, m2


# What `Rule.tile` names.
TILES: dict[str, JITFunction] = {
    function.__name__: function
    for function in (
        adam,
        nadam,
        radam,
        sgd,
        sgd_momentum,
        rmsprop,
        rmsprop_momentum,
        rmsprop_centered,
        rmsprop_momentum_centered,
        adagrad,
        lion,
    )
}
