"""How a moment lies in memory, as kernels see it, and the 8-bit codes on a tile.

The codes are defined in `lightning_memopt.rules.storage_8bit` and `lightning_memopt.rules.gefen`, with their constants.
All functions are element-wise, with scales that broadcast against the codes, so they run in any layout, in Triton and
in Gluon. Decoding gives values in a unit that depends on the scale alone (see `kernels.tiles`). Per weight, signed
squares cost one square root, the curve two reciprocals, and v's code neither.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_memopt.kernels import tiles
from lightning_memopt.rules import gefen
from lightning_memopt.rules import storage_8bit as codec
from lightning_memopt.rules.base import Rule
from lightning_memopt.rules.storage import Dense, Storage

# Kinds of moments: float32 or bf16; the same, but rounded as the weight is where bf16; the two codes of AdamW8bit;
# Gefen's code, a curve whose bend follows the scalars of the rule's tile; one float32 that a block shares, which is a
# second moment in the second place.
DENSE, SLOW, SIGNED, POSITIVE, CURVE, MEAN = range(6)

_SIGNED, _POSITIVE = tl.constexpr(SIGNED), tl.constexpr(POSITIVE)
# The interpreter runs numpy, not PTX.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LEVELS = tl.constexpr(codec.SIGNED_LEVELS)
_OCTAVE_LEVELS = tl.constexpr(codec.OCTAVE_LEVELS)
_LEVEL_STEP, _LOWEST_LEVEL = tl.constexpr(codec.LEVEL_STEP), tl.constexpr(codec.LOWEST_LEVEL)
_LOWEST, _BELOW_ONE = tl.constexpr(codec.LOWEST), tl.constexpr(codec.BELOW_ONE)
_HALF_DITHER = tl.constexpr(codec.HALF_DITHER)
_TINY, _HUGE = tl.constexpr(codec.TINY), tl.constexpr(codec.HUGE)
LIMIT = gefen.GefenRule.limit
_LEAST, _LIMIT = tl.constexpr(gefen.LEAST), tl.constexpr(LIMIT)
# A gradient element is surely below the limit if it is below this after its column's factor, which is at least the
# root of 1/128 (`optim.gefen_columns`: the mean over a block of its inverse square is one).
SURE = LIMIT / 16


def kind(storage: Storage) -> int:
    """The kind of moment that `storage` keeps."""
    if isinstance(storage, codec.SignedCodes):
        return SIGNED
    if isinstance(storage, codec.PositiveCodes):
        return POSITIVE
    if isinstance(storage, gefen.LearnedCodes):
        return CURVE
    if isinstance(storage, gefen.BlockMean):
        return MEAN
    return SLOW if isinstance(storage, Dense) and storage.slow else DENSE


def tile_scalars(rule: Rule) -> tuple[str, ...]:
    """Names of the scalars that the rule's tile function takes; the bend, which only codes know, follows them."""
    return rule.scalar_names[:-1] if isinstance(rule, gefen.GefenRule) else rule.scalar_names


@triton.jit
def block_scale(largest):
    """A block's stored scale, from the largest magnitude in it: the next bf16, as float32."""
    bits = tl.minimum(tl.maximum(largest, _TINY), _HUGE).to(tl.uint32, bitcast=True)
    return ((bits + 0xFFFF) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _from_byte(code):
    """A two's complement byte as float32."""
    word = code.to(tl.int8, bitcast=True).to(tl.int32)
    if _INTERPRETED:
        return word.to(tl.float32)
    # One instruction that takes its byte from the middle of a word, too. Conversions are slow, but on a pipe that has
    # little else to do; three fast instructions cost more.
    return tl.inline_asm_elementwise("cvt.rn.f32.s32 $0, $1;", "=r,r", [word], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _to_byte(x):
    """The nearest whole number to x, |x| <= 127.5, as a two's complement byte."""
    # The sum, around 2^23, rounds to a whole number, whose two's complement fills the last bits.
    return (x + (8388608.0 + 4194304.0)).to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit
def _over(number: tl.constexpr, scale):
    """A number over scales in [TINY, HUGE]; quarters keep the reciprocal of the largest from being denormal."""
    return tiles.reciprocal(scale * 0.25) * (number * 0.25)


@triton.jit
def decode(code, bend, KIND: tl.constexpr):
    """The values of a uint8 tile of codes, in a unit of `unit`: q |q|, q / (127 (1 + bend) - bend |q|) or a level."""
    if KIND == _SIGNED:
        q = _from_byte(code)
        return q * tl.abs(q)
    elif KIND == _POSITIVE:
        return (code.to(tl.int32) * _LEVEL_STEP + _LOWEST_LEVEL).to(tl.float32, bitcast=True)
    else:
        q = _from_byte(code)
        return q * tiles.reciprocal(_LEVELS * (1.0 + bend) - bend * tl.abs(q))


@triton.jit
def unit(scale, KIND: tl.constexpr):
    """The unit of what `decode` returns for codes of these scales, in float32."""
    return scale.to(tl.float32) * (1.0 / (_LEVELS * _LEVELS)) if KIND == _SIGNED else scale.to(tl.float32)


@triton.jit
def encode_signed(x, scale):
    """The uint8 tile of x, |x| <= scale, to nearest."""
    root = tl.sqrt(tl.abs(x) * _over(_LEVELS * _LEVELS, scale)).to(tl.uint32, bitcast=True)
    return _to_byte((root | (x.to(tl.uint32, bitcast=True) & 0x80000000)).to(tl.float32, bitcast=True))


@triton.jit
def encode_curve(x, scale, bend):
    """The uint8 tile of x, |x| <= scale, to nearest on the scale of codes."""
    return _to_byte(x * (_LEVELS * (1.0 + bend)) * tiles.reciprocal(scale + bend * tl.abs(x)))


@triton.jit
def _low_bits_in_the_middle(random):
    """The low 16 bits of `random`, 8 places up, in one instruction."""
    if _INTERPRETED:
        return (random & 0xFFFF) << 8
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x4104;", "=r,r", [random], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def encode_positive(x, scale, random):
    """The uint8 tile of x, 0 <= x <= scale: up with probability equal to the distance.

    Args:
        random: 32 random bits, of which the low 16 are used.
    """
    # A subtraction and a maximum are one instruction; a constant in what follows would cost another.
    ratio = (x * _over(_BELOW_ONE, scale)).to(tl.int32, bitcast=True) - (_LOWEST - _HALF_DITHER)
    ratio = tl.maximum(ratio, _HALF_DITHER).to(tl.uint32, bitcast=True)
    # The distance from the lowest level in fixed point: twice that of `encode_positive` in the rules, so that the code
    # is the highest byte.
    return (ratio * (2 * _OCTAVE_LEVELS) + _low_bits_in_the_middle(random) >> 24).to(tl.uint8)


@triton.jit
def encode(x, scale, random, bend, KIND: tl.constexpr):
    """The uint8 tile of codes of x, |x| <= scale, that `decode` takes; `random` is for positive ones."""
    if KIND == _SIGNED:
        return encode_signed(x, scale)
    elif KIND == _POSITIVE:
        return encode_positive(x, scale, random)
    else:
        return encode_curve(x, scale, bend)


@triton.jit
def below_limit(g):
    """Which gradient elements a shared second moment can take: `finite`, and squares that do not overflow its sum."""
    return tl.abs(g) < _LIMIT


@triton.jit
def block_mean(total, count):
    """What a block adds to its second moment, from the sum over `count` weights; see `gefen_blocks.LEAST`."""
    return tl.maximum(total * (1.0 / tl.maximum(count, 1).to(tl.float32)), _LEAST)
