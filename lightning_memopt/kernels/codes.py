"""How a moment lies in memory, as kernels see it, and the 8-bit codes on a tile.

The codes are defined in `lightning_memopt.rules.storage_8bit` and `lightning_memopt.rules.gefen`, with their constants.
All functions are element-wise, with scales that broadcast against the codes, so they run in any layout, in Triton and
in Gluon. Per weight, signed squares cost one square root, the curve two reciprocals, and v's code neither.
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

_LEVELS = tl.constexpr(codec.SIGNED_LEVELS)
_OCTAVE_LEVELS = tl.constexpr(codec.OCTAVE_LEVELS)
_LEVEL_STEP, _LOWEST_LEVEL = tl.constexpr(codec.LEVEL_STEP), tl.constexpr(codec.LOWEST_LEVEL)
_LOWEST, _BELOW_ONE = tl.constexpr(codec.LOWEST), tl.constexpr(codec.BELOW_ONE)
_NEAREST, _DITHER = tl.constexpr(codec.NEAREST), tl.constexpr(codec.DITHER)
_TINY, _HUGE = tl.constexpr(codec.TINY), tl.constexpr(codec.HUGE)
LIMIT = gefen.GefenRule.limit
_LEAST, _LIMIT = tl.constexpr(gefen.LEAST), tl.constexpr(LIMIT)


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
    # The byte becomes the last bits of a float32 around 2^23: conversion instructions run at a quarter of the speed.
    return (code.to(tl.uint32) ^ 0x4B000080).to(tl.float32, bitcast=True) - (8388608.0 + 128.0)


@triton.jit
def _to_byte(x):
    """The nearest whole number to x, |x| <= 127.5, as a two's complement byte."""
    # As in `_from_byte`: the sum rounds to a whole number, whose two's complement fills the last bits.
    return (x + (8388608.0 + 4194304.0)).to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit
def decode_signed(code, scale):
    """Return scale q |q| / 127² of a uint8 tile."""
    q = _from_byte(code)
    return q * tl.abs(q) * (scale * (1.0 / (_LEVELS * _LEVELS)))


@triton.jit
def encode_signed(x, scale):
    """The uint8 tile of x, |x| <= scale, to nearest."""
    root = tl.sqrt(tl.abs(x) * ((_LEVELS * _LEVELS * 1.0) / scale)).to(tl.uint32, bitcast=True)
    return _to_byte((root | (x.to(tl.uint32, bitcast=True) & 0x80000000)).to(tl.float32, bitcast=True))


@triton.jit
def decode_curve(code, scale, bend):
    """Return scale q / (127 (1 + bend) - bend |q|) of a uint8 tile."""
    q = _from_byte(code)
    return q * scale * tiles.reciprocal(_LEVELS * (1.0 + bend) - bend * tl.abs(q))


@triton.jit
def encode_curve(x, scale, bend):
    """The uint8 tile of x, |x| <= scale, to nearest on the scale of codes."""
    return _to_byte(x * (_LEVELS * (1.0 + bend)) * tiles.reciprocal(scale + bend * tl.abs(x)))


@triton.jit
def decode_positive(code, scale):
    """Return scale times the code's level, of a uint8 tile."""
    return (code.to(tl.int32) * _LEVEL_STEP + _LOWEST_LEVEL).to(tl.float32, bitcast=True) * scale


@triton.jit
def encode_positive(x, scale, random16, STOCHASTIC: tl.constexpr):
    """The uint8 tile of x, 0 <= x <= scale: to nearest, or up with probability equal to the distance."""
    ratio = (x * (_BELOW_ONE / scale)).to(tl.int32, bitcast=True)
    fixed = (tl.maximum(ratio, _LOWEST) - _LOWEST) * _OCTAVE_LEVELS
    if STOCHASTIC:
        fixed += (random16.to(tl.int32) << 7) + _DITHER
    else:
        fixed += _NEAREST
    return (fixed >> 23).to(tl.uint8)


@triton.jit
def below_limit(g):
    """Which gradient elements a shared second moment can take: `finite`, and squares that do not overflow its sum."""
    return tl.abs(g) < _LIMIT


@triton.jit
def block_mean(total, count):
    """What a block adds to its second moment, from the sum over `count` weights; see `gefen_blocks.LEAST`."""
    return tl.maximum(total / tl.maximum(count, 1).to(tl.float32), _LEAST)
