"""Stochastic rounding of float32 to bf16 by a counter-based hash: reference and the definition kernels follow.

The random bits of element i of a parameter at a step are ``rounding_bits(key, i)``, where `key` hashes (seed, step,
parameter name) and i is the element's index in the full, unsharded parameter. They depend on nothing else: not on
launch geometry, device, rank or world size.

A hash takes seven dependent instructions, as many as the step of some rules. So sixteen elements share one, those whose
indices differ in the bits of `SHARED` only: they lie in one row, and a kernel for Hopper has them in one thread. Each
multiplies the hash by an odd number of its own. That permutes the 2^32 words, so each element's bits are as even as the
hash, and the numbers are chosen so that no two elements' bits are correlated (`tests/kernels/test_rounding.py`).

Rounding takes 16 bits: a weight the high ones, its second moment the low ones, which are independent of each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
# Constants of the "lowbias32" integer mixer (C. Wellons, hash-prospector), and 2^32 / golden ratio.
GOLDEN, MUL1, MUL2 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
# Bits of the index in which elements that share a hash differ: neighbours, and every eighth of 64.
SHARED = 0b111001
# Of `own_factor`; among random numbers, a pair that puts each pair of factors far apart by the spectral test.
FACTOR, FACTOR_STEP = 0xAD8581EA, 0x91922D21


def _mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * MUL1) & _MASK
    x = ((x ^ (x >> 15)) * MUL2) & _MASK
    return x ^ (x >> 16)


def rounding_key(seed: int, step: int, name: str) -> int:
    """32-bit key of one parameter's rounding at one step."""
    return _mix(step_key(seed, step) ^ zlib.crc32(name.encode()))


def step_key(seed: int, step: int) -> int:
    """The part of `rounding_key` that all parameters share."""
    return _mix((seed * GOLDEN + step) & _MASK)


def parameter_keys(step_key: int, names: Tensor) -> Tensor:
    """`rounding_key` of many parameters, int64, from the `step_key` and the `name_hashes` of their names."""
    # int64 products wrap, which leaves the low 32 bits right: all that is kept.
    x = names ^ step_key
    x = ((x ^ (x >> 16)) * MUL1) & _MASK
    x = ((x ^ (x >> 15)) * MUL2) & _MASK
    return x ^ (x >> 16)


def name_hashes(names: Sequence[str]) -> Tensor:
    """What `rounding_key` depends on of each name, int64."""
    return torch.tensor([zlib.crc32(name.encode()) for name in names], dtype=torch.int64, device="cpu")


def _hash(key: int, index: Tensor) -> Tensor:
    # int64 products wrap, which leaves the low 32 bits right: all that is kept.
    x = (index * GOLDEN + key) & _MASK
    x = ((x ^ (x >> 15)) * MUL1) & _MASK
    return x ^ (x >> 13)


def bits(key: int, index: Tensor) -> Tensor:
    """32 pseudo-random bits for each element index, as int64 in [0, 2^32).

    Args:
        key: `rounding_key` of parameter and step.
        index: int64, any shape; only its low 32 bits matter.
    """
    return _hash(key, index) * MUL2 & _MASK


def own_factor(index: Tensor) -> Tensor:
    """The odd number by which each element multiplies the hash that it shares with fifteen others."""
    x = ((index & SHARED) * FACTOR_STEP + FACTOR) & _MASK
    return x ^ (x >> 16) | 1


def rounding_bits(key: int, index: Tensor) -> Tensor:
    """The 32 random bits that round each element, as int64 in [0, 2^32).

    Args:
        key, index: As in `bits`.
    """
    return _hash(key, index & ~SHARED) * own_factor(index) & _MASK


def round_stochastic(x: Tensor, key: int, offset: int | Tensor = 0, *, low: bool = False) -> Tensor:
    """Round float32 to bf16 up or down with probability equal to the distance: unbiased, at most one bf16 step away.

    Args:
        x: float32 tensor, the elements numbered in row-major order from `offset`.
        key: `rounding_key` of parameter and step.
        offset: Index of the first element in the full parameter, or, int64 [x.numel()], of each.
        low: Use the low 16 of the 32 random bits (second moments) instead of the high 16 (weights), so that a weight
            and its moment round independently.
    """
    index = offset if isinstance(offset, Tensor) else torch.arange(offset, offset + x.numel(), device=x.device)
    random = rounding_bits(key, index).view(x.shape)
    random = random & 0xFFFF if low else random >> 16
    # Adding 16 random bits below bf16's last place carries with exactly the right probability; then truncate.
    rounded = (x.contiguous().view(torch.int32) + random.to(torch.int32)) & -0x10000
    return rounded.view(torch.float32).to(torch.bfloat16)
