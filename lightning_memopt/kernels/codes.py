"""How a moment lies in memory, as kernels see it, and the 8-bit codes on a tile.

The codes are defined in `lightning_memopt.rules.storage_8bit`, with their constants. All functions are element-wise,
with scales that broadcast against the codes, so they run in any layout, in Triton and in Gluon. Per weight, m costs one
square root and v none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_memopt.rules import storage_8bit as codec
from lightning_memopt.rules.storage import Dense, Storage

# Kinds of moments: float32 or bf16; the same, but rounded as the weight is where bf16; the two codes.
DENSE, SLOW, SIGNED, POSITIVE = range(4)

_LEVELS = tl.constexpr(codec.SIGNED_LEVELS)
_OCTAVE_LEVELS = tl.constexpr(codec.OCTAVE_LEVELS)
_LEVEL_STEP, _LOWEST_LEVEL = tl.constexpr(codec.LEVEL_STEP), tl.constexpr(codec.LOWEST_LEVEL)
_LOWEST, _BELOW_ONE = tl.constexpr(codec.LOWEST), tl.constexpr(codec.BELOW_ONE)
_NEAREST, _DITHER = tl.constexpr(codec.NEAREST), tl.constexpr(codec.DITHER)
_TINY, _HUGE = tl.constexpr(codec.TINY), tl.constexpr(codec.HUGE)


def kind(storage: Storage) -> int:
    """The kind of moment that `storage` keeps."""
    if isinstance(storage, codec.SignedCodes):
        return SIGNED
    if isinstance(storage, codec.PositiveCodes):
        return POSITIVE
    return SLOW if isinstance(storage, Dense) and storage.slow else DENSE


@triton.jit
def block_scale(largest):
    """A block's stored scale, from the largest magnitude in it: the next bf16, as float32."""
    bits = tl.minimum(tl.maximum(largest, _TINY), _HUGE).to(tl.uint32, bitcast=True)
    return ((bits + 0xFFFF) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def decode_signed(code, scale):
    """Return scale q |q| / 127² of a uint8 tile."""
    # The byte becomes the last bits of a float32 around 2^23: conversion instructions run at a quarter of the speed.
    q = (code.to(tl.uint32) ^ 0x4B000080).to(tl.float32, bitcast=True) - (8388608.0 + 128.0)
    return q * tl.abs(q) * (scale * (1.0 / (_LEVELS * _LEVELS)))


@triton.jit
def encode_signed(x, scale):
    """The uint8 tile of x, |x| <= scale, to nearest."""
    root = tl.sqrt(tl.abs(x) * ((_LEVELS * _LEVELS * 1.0) / scale)).to(tl.uint32, bitcast=True)
    signed = (root | (x.to(tl.uint32, bitcast=True) & 0x80000000)).to(tl.float32, bitcast=True)
    # As in `decode_signed`: the sum rounds to a whole number, whose two's complement fills the last bits.
    return (signed + (8388608.0 + 4194304.0)).to(tl.uint32, bitcast=True).to(tl.uint8)


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
