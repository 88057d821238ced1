"""Moments in one byte per weight: block-wise 8-bit codes that are computed, not looked up.

A block is up to `BLOCK` consecutive weights of one row (the weight viewed as [shape[0], numel / shape[0]]; the last
block of a row may be shorter), scaled by the largest magnitude in it. Rows are the unit of sharding and blocks never
cross one, so a row-sharded state reshards exactly. Decoding a table entry costs a kernel more than the arithmetic here.

Rms error of the update m / sqrt(v) caused by storing one of the two moments, in a simulation of 2560 coordinates over
2000 steps of Adam (betas 0.9 and 0.999) whose gradient scales drift by a decade and differ within a block by 0 or 0.5
decades (standard deviation); "dynamic" is the 256-entry map of bitsandbytes (signed for m, unsigned for v):

    scales within a block differ by                       0      0.5 decades
    m   signed squares, nearest (this module)             0.018  0.055
    m   signed squares, stochastic                        0.025  0.078
    m   dynamic, nearest                                  0.027  0.053
    v   12 levels per octave, stochastic (this module)    0.095  0.10
    v   12 levels per octave, nearest                     0.29   0.33
    v   dynamic, nearest                                  0.14   9.7     live values stored as zero

m changes by a tenth of itself in a step, so rounding to nearest follows it and adds the least noise. v changes by a
thousandth, and its levels are 6 % apart: to nearest all decay is rounded away and only large gradients change a code,
upwards. With gradients that stay alike v is twice too large after 1000 steps and four times after 4000; if they fall to
a tenth, 15 and 32 times 2000 and 3000 steps later. So v's code is rounded stochastically, whatever weights are, and its
mean stays within 2 % of float32's. The bits are a hash: that, too, is reproducible.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memopt.optim.shards import by_rows
from lightning_memopt.rules.storage import Rounder, Storage
from lightning_memopt.sparsity.spans import where

# A block is short enough that a GPU's group of warps holds 64 rows of it while it also holds a tile of dW; 16-bit
# scales keep it at 1.03 bytes per weight and moment.
BLOCK = 64
# A block of zeros keeps this scale, so that no scale is zero and no decoded value is denormal (GPUs flush those).
TINY = 2.0**-100
# The largest bf16.
HUGE = (2 - 2.0**-7) * 2.0**127

# Signed code: m = scale * q |q| / 127², q in [-127, 127] as a two's complement byte.
SIGNED_LEVELS = 127

# Positive code: v = scale * (c-th of 256 values from 2^-21.25 to 1, twelve to an octave, evenly spaced within one).
# That is a line in the bit pattern of a float32, whose steps of 1 are 2^-23 of an octave.
OCTAVE_LEVELS = 12
ONE = 0x3F800000  # bit pattern of 1.0
LEVEL_STEP = -(-(1 << 23) // OCTAVE_LEVELS)
LOWEST_LEVEL = ONE - 255 * LEVEL_STEP
LOWEST = ONE - 255 * (1 << 23) // OCTAVE_LEVELS
# A value a hair below its scale cannot round up to code 256.
BELOW_ONE = 1 - 2.0**-22
# Added before the last 23 bits are cut off: a half, to nearest. With random bits above the last seven, half of what
# these can hold, as steps of the bit pattern: 60 for 64, which is 2^-21 of a level away.
NEAREST, HALF_DITHER = 1 << 22, round((1 << 6) / OCTAVE_LEVELS)


def rows_of(param: Tensor) -> tuple[int, int]:
    """Rows and row length of a parameter: its first dimension, and the others together."""
    rows = param.shape[0] if param.dim() else 1
    return rows, param.numel() // max(rows, 1)


def blocks_of(param: Tensor) -> tuple[int, int]:
    """Shape of a parameter's scales: rows, and blocks in a row."""
    rows, columns = rows_of(param)
    return rows, -(-columns // BLOCK)


def block_scale(largest: Tensor) -> Tensor:
    """A block's stored scale: the next bf16 at or above the largest magnitude in it, so that no ratio exceeds 1."""
    bits = largest.float().clamp(TINY, HUGE).view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32).to(torch.bfloat16)


def encode_signed(x: Tensor, scale: Tensor) -> Tensor:
    """Bytes of float32 `x`, |x| <= scale: sign and nearest square root of 127² |x| / scale. Zero stays zero."""
    root = (x.abs() * (SIGNED_LEVELS**2 / scale)).sqrt()
    return root.round().copysign(x).to(torch.int8).view(torch.uint8)


def decode_signed(code: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_signed` up to rounding."""
    q = code.view(torch.int8).float()
    return q * q.abs() * (scale * (1 / SIGNED_LEVELS**2))


def encode_positive(x: Tensor, scale: Tensor, rounder: Rounder = None) -> Tensor:
    """Bytes of float32 `x`, 0 <= x <= scale: nearest level, or one of the two around x with x as their mean.

    Zero takes the lowest level, which is not zero: a live value is never stored as zero, and the moment of a weight
    that has none divides a zero.
    """
    ratio = (x * (BELOW_ONE / scale)).view(torch.int32)
    above = ratio.clamp(min=LOWEST) - LOWEST
    # Fixed point: the code in the high 9 bits, a fraction of a level in the low 23.
    if rounder is None:
        return ((above * OCTAVE_LEVELS + NEAREST) >> 23).to(torch.uint8)
    # The rounder adds 16 random bits to a bit pattern and keeps its upper half; here that half is the code.
    pattern = ((above + HALF_DITHER) * OCTAVE_LEVELS >> 7).view(torch.float32)
    return rounder(pattern).view(torch.int16).to(torch.uint8)


def decode_positive(code: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_positive` up to rounding."""
    return (code.int() * LEVEL_STEP + LOWEST_LEVEL).view(torch.float32) * scale


@dataclass(frozen=True)
class Codes(Storage):
    """Base: one byte per weight under the moment's name, one bf16 scale per block under ``<name>_scale``."""

    @property
    def scale_name(self) -> str:
        """Key of the scales, a tensor of shape `blocks_of`."""
        return f"{self.name}_scale"

    def entries(self) -> tuple[str, ...]:
        """Codes and scales."""
        return (self.name, self.scale_name)

    def create(self, param: Tensor) -> dict[str, Tensor]:
        """Zero everywhere, as all scales are zero."""
        return {
            self.name: by_rows(param, param.shape, torch.uint8),
            self.scale_name: by_rows(param, blocks_of(param), torch.bfloat16),
        }

    def shapes(self, param: Tensor) -> dict[str, Sequence[int]]:
        """Of codes and scales."""
        return {self.name: param.shape, self.scale_name: blocks_of(param)}

    def per_block(self) -> dict[str, int]:
        """Scales."""
        return {self.scale_name: BLOCK}

    def rows(self, state: MutableMapping[str, Any], start: int, stop: int) -> dict[str, Tensor]:
        """Rows of codes and scales."""
        return {key: state[key][start:stop] for key in self.entries()}

    def load(self, state: MutableMapping[str, Any], dtype: torch.dtype) -> Tensor:
        """Decode in float32."""
        code = state[self.name]
        return self._decode(code, _spread(state, state[self.scale_name], code)).to(dtype)

    def save(self, state: MutableMapping[str, Any], moment: Tensor, rounder: Rounder) -> None:
        """New scales, then new codes."""
        code, scale = state[self.name], state[self.scale_name]
        scale.copy_(block_scale(_largest(state, scale, moment.float())))
        code.copy_(self._encode(moment.float(), _spread(state, scale, code), rounder))

    def _decode(self, code: Tensor, scale: Tensor) -> Tensor:
        raise NotImplementedError

    def _encode(self, x: Tensor, scale: Tensor, rounder: Rounder) -> Tensor:
        raise NotImplementedError


def _largest(state: Mapping[str, Any], scale: Tensor, x: Tensor) -> Tensor:
    """Largest magnitude of each block, shaped like `scale`."""
    active = where(state)
    if active is not None:
        return active.blocks(scale).largest(x)
    rows, columns = rows_of(x)
    padded = F.pad(x.reshape(rows, columns), (0, scale.shape[1] * BLOCK - columns))
    return padded.abs().unflatten(1, (scale.shape[1], BLOCK)).amax(2)


def _spread(state: Mapping[str, Any], scale: Tensor, code: Tensor) -> Tensor:
    """Each weight's scale, shaped like the weight."""
    active = where(state)
    if active is not None:
        return active.blocks(scale).spread(scale.float())
    columns = rows_of(code)[1]
    return scale.float().repeat_interleave(BLOCK, 1)[:, :columns].reshape(code.shape)


@dataclass(frozen=True)
class SignedCodes(Codes):
    """A first moment: 255 values scale * q |q| / 127², finer near zero; zero is one of them."""

    def _decode(self, code: Tensor, scale: Tensor) -> Tensor:
        return decode_signed(code, scale)

    def _encode(self, x: Tensor, scale: Tensor, rounder: Rounder) -> Tensor:
        return encode_signed(x, scale)


@dataclass(frozen=True)
class PositiveCodes(Codes):
    """A second moment: 256 values over 6.4 decades, 4 to 8 % apart; none is zero once a step was taken."""

    dithered: ClassVar[bool] = True

    def _decode(self, code: Tensor, scale: Tensor) -> Tensor:
        return decode_positive(code, scale)

    def _encode(self, x: Tensor, scale: Tensor, rounder: Rounder) -> Tensor:
        return encode_positive(x, scale, rounder)
