"""Stochastic rounding of float32 to bf16: unbiased, within one step, reproducible, independent of chunking."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lightning_memopt.kernels.rounding import (
    SHARED,
    bits,
    name_hashes,
    own_factor,
    parameter_keys,
    round_stochastic,
    rounding_bits,
    rounding_key,
    step_key,
)

ALL = torch.arange(1 << 16, dtype=torch.int64)  # the low 16 bits of a float32, which bf16 drops


def floats(high: int, low: Tensor = ALL) -> Tensor:
    """float32 numbers with these high 16 bits and low 16 bits."""
    pattern = (high << 16 | low).to(torch.int32) if high < 1 << 15 else ((high - (1 << 16)) << 16 | low).to(torch.int32)
    return pattern.view(torch.float32)


def pattern(x: Tensor) -> Tensor:
    """The 16 bits of bf16 numbers as integers."""
    return x.view(torch.int16).to(torch.int64) & 0xFFFF


# Sign, every exponent of a finite number, and a few mantissas with the first and the last.
HIGHS = [
    sign << 15 | exponent << 7 | mantissa
    for sign, exponent, mantissa in itertools.product((0, 1), range(255), (0, 1, 77, 126, 127))
    if (exponent, mantissa) != (254, 127)
]


def test_all_offsets_and_exponents_stay_within_one_step() -> None:
    """For every exponent and sign, each of the 2^16 offsets between two bf16 numbers rounds to one of these two.

    The share that goes up is the mean offset, 1/2, to within five standard deviations of 2^16 draws.
    """
    spread = 5 * math.sqrt(1 / 6 / (1 << 16))  # variance of a draw with p uniform: E[p (1 - p)] = 1/6
    for i, high in enumerate(HIGHS):
        rounded = pattern(round_stochastic(floats(high), rounding_key(0, i, "w")))
        up = rounded - high
        assert bool(((up == 0) | (up == 1)).all()), hex(high)
        assert up[0] == 0, "a bf16 number must round to itself"
        assert abs(float(up.double().mean()) - 0.5) < spread, hex(high)


def test_numbers_that_bf16_holds_do_not_change() -> None:
    """All finite bf16 numbers, zeros and subnormals included, round to themselves under many keys."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[torch.isfinite(every)]
    for key in range(8):
        assert torch.equal(pattern(round_stochastic(finite.float(), rounding_key(key, key, "w"))), pattern(finite))


def test_special_values_are_kept() -> None:
    """Infinities stay infinite with their sign, NaN stays NaN."""
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), -float("nan")])
    for step in range(64):
        rounded = round_stochastic(special, rounding_key(1, step, "w")).float()
        assert rounded[0] == float("inf") and rounded[1] == -float("inf") and torch.isnan(rounded[2:]).all()


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 77, 1 << 12, 1 << 15, (1 << 16) - 1])
def test_probability_is_the_distance(offset: int, low: bool) -> None:
    """A number that lies offset / 2^16 of a step above a bf16 number rounds up with just that probability."""
    count = 1 << 18
    x = floats(0x3F80, torch.full((count,), offset))
    up = pattern(round_stochastic(x, rounding_key(3, 5, "w"), low=low)) - 0x3F80
    p = offset / (1 << 16)
    assert abs(float(up.double().mean()) - p) <= 5 * math.sqrt(p * (1 - p) / count)


def test_mean_over_steps_is_unbiased() -> None:
    """For one element, the draws of successive steps are as unbiased as those of neighbours."""
    x = floats(0x4049, torch.full((4,), 20000))
    draws = torch.stack([pattern(round_stochastic(x, rounding_key(0, step, "layer.weight"))) for step in range(4000)])
    p = 20000 / (1 << 16)
    mean = (draws - 0x4049).double().mean(0)
    assert bool(((mean - p).abs() < 5 * math.sqrt(p * (1 - p) / 4000)).all())


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_independent_of_chunks(chunk: int, low: bool) -> None:
    """Rounding in pieces, each told its offset, gives the bits of rounding at once."""
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    whole = round_stochastic(x, 12345, low=low)
    parts = [round_stochastic(x[i : i + chunk], 12345, i, low=low) for i in range(0, 2000, chunk)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(round_stochastic(x.view(40, 50), 12345, low=low).flatten(), whole)


def test_layout_does_not_matter() -> None:
    """Elements are numbered in row-major order whatever the strides, and zero-dimensional and empty tensors work."""
    x = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(round_stochastic(strided, 7), round_stochastic(x, 7))
    assert round_stochastic(torch.tensor(1.5), 7) == 1.5
    assert round_stochastic(torch.empty(0, 3), 7).shape == (0, 3)


def test_offsets_past_32_bits() -> None:
    """Indices of very large parameters wrap instead of failing."""
    x = torch.full((100,), 1.001)
    assert torch.equal(round_stochastic(x, 7, (1 << 32) + 5), round_stochastic(x, 7, 5))


def test_keys_differ() -> None:
    """Seed, step and name each change the key; the same three give the same key again."""
    names = ["a.weight", "b.weight", "a.bias"]
    keys = {rounding_key(seed, step, name) for seed in range(20) for step in range(200) for name in names}
    assert len(keys) >= 20 * 200 * 3 - 3  # a collision or two of 12,000 in 2^32 is chance (expected: 0.02)
    assert rounding_key(3, 4, "w") == rounding_key(3, 4, "w")
    assert all(0 <= key < 1 << 32 for key in keys)


@pytest.mark.parametrize(
    ("first", "second"),
    [((0, 0, "w"), (0, 1, "w")), ((0, 0, "w"), (0, 0, "v")), ((0, 0, "w"), (1, 0, "w"))],
    ids=["step", "name", "seed"],
)
def test_draws_of_different_keys_are_independent(first: tuple[int, int, str], second: tuple[int, int, str]) -> None:
    """The bits under two keys agree in half of all places, also shifted against each other by a few elements."""
    index = torch.arange(1 << 15)
    a, b = (rounding_bits(rounding_key(*key), index) for key in (first, second))
    for shift in (0, 1, 2, 8):
        same = ~(a ^ b.roll(shift))
        for place in (0, 15, 16, 31):
            share = float((same >> place & 1).double().mean())
            assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(1 << 15)


def test_bits_are_even() -> None:
    """Each of the 32 bits is set half the time, and a weight's bits tell nothing of its moment's."""
    words = rounding_bits(rounding_key(0, 0, "w"), torch.arange(1 << 16))
    spread = 5 * 0.5 / 256
    for place in range(32):
        assert abs(float((words >> place & 1).double().mean()) - 0.5) < spread, place
    for place in range(16):
        agree = ~(words ^ (words >> 16)) >> place & 1
        assert abs(float(agree.double().mean()) - 0.5) < spread, place


# Of sixteen elements that share a hash, their places among 64.
PLACES = [place for place in range(64) if place | SHARED == SHARED]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("place", [0, 1, 8, 25, 57])
def test_whoever_shares_a_hash_rounds_without_bias(place: int, low: bool) -> None:
    """Elements at each place round up with the probability that the distance gives."""
    count = 1 << 22
    for offset in (1 << 8, 1 << 13, 1 << 15, 54321):
        x = floats(0x3F80, torch.full((count,), offset))
        up = pattern(round_stochastic(x, rounding_key(7, offset, "w"), low=low))[place::64] - 0x3F80
        p = offset / (1 << 16)
        assert abs(float(up.double().mean()) - p) <= 5 * math.sqrt(p * (1 - p) / (count / 64))


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("apart", [1, 2, 8, 9, 16, 24, 32, 48])
def test_neighbours_round_independently(apart: int, low: bool) -> None:
    """Of two elements so far apart, both go up as often as chance has it, whatever their distances are."""
    count = 1 << 18
    second = torch.arange(count) // apart % 2 == 1
    for first, other in itertools.product((1 << 13, 1 << 15, 54321), repeat=2):
        distances = torch.where(second, other, first)
        up = pattern(round_stochastic(floats(0x3F80, distances), rounding_key(first, other, "w"), low=low)) - 0x3F80
        both = first * other / (1 << 32)
        for pairs in (~second, second):  # with a hash of their own and shared, or the other way round
            pairs = pairs & (torch.arange(count) < count - apart)
            share = float((up * up.roll(-apart))[pairs].double().mean())
            assert abs(share - both) <= 5 * math.sqrt(both * (1 - both) / (count / 2))


def shortest(a: int, b: int, modulus: int) -> float:
    """Length of the shortest (s, t) with s a + t b = 0 modulo a power of two, both odd: the spectral test of a pair."""
    u, v = (modulus, 0), (-b * pow(a, -1, modulus) % modulus, 1)
    while True:
        if math.hypot(*u) < math.hypot(*v):
            u, v = v, u
        times = round((u[0] * v[0] + u[1] * v[1]) / (v[0] ** 2 + v[1] ** 2))
        u = (u[0] - times * v[0], u[1] - times * v[1])
        if math.hypot(*u) >= math.hypot(*v):
            return math.hypot(*v)


def test_factors_are_odd_and_far_apart() -> None:
    """A hash times either of two factors is a lattice of points, as fine in 32 bits and in the low 16 as said here.

    The closest two of sixteen random odd numbers come to 5000 and 20, a perfect pair to 70000 and 275.
    """
    factors = own_factor(torch.tensor(PLACES)).tolist()
    assert len(PLACES) == 16 and all(factor % 2 for factor in factors)
    for a, b in itertools.combinations(factors, 2):
        assert shortest(a, b, 1 << 32) > 12_000
        assert shortest(a, b, 1 << 16) > 75


def test_a_weight_and_its_moment_round_independently() -> None:
    """An element's high and low bits decide as two coins do, for even and odd elements."""
    count, half = 1 << 18, torch.full((1 << 18,), 1 << 15)
    key = rounding_key(9, 9, "w")
    weight, moment = (pattern(round_stochastic(floats(0x3F80, half), key, low=low)) - 0x3F80 for low in (False, True))
    for parity in (0, 1):
        share = float((weight * moment)[parity::2].double().mean())
        assert abs(share - 0.25) <= 5 * math.sqrt(0.25 * 0.75 / (count / 2))


def test_sixteen_elements_share_a_hash() -> None:
    """Their words, times the inverses of their factors, are the same; those of others are not."""
    key, index = rounding_key(1, 2, "w"), torch.arange(4096)
    inverse = torch.tensor([pow(factor, -1, 1 << 32) for factor in own_factor(index).tolist()])
    # Products of 32-bit numbers do not fit int64, but wrap.
    hashes = (rounding_bits(key, index) * inverse & 0xFFFFFFFF).view(-1, 64)
    for first in (0, 2, 4, 6):
        assert (hashes[:, [first + place for place in PLACES]] == hashes[:, first : first + 1]).all()
    assert len(hashes.unique()) == 4 * len(hashes)


FROZEN_KEY = 3127133132
FROZEN_BITS = [365679853, 844493179, 856835956]
FROZEN_ROUNDING_BITS = [1110701993, 2289209515, 3066050404]


def test_definition_is_frozen() -> None:
    """Resuming an old run must draw the same bits: the numbers that the definition gives."""
    assert rounding_key(0, 0, "weight") == FROZEN_KEY
    assert bits(FROZEN_KEY, torch.arange(3)).tolist() == FROZEN_BITS
    assert rounding_bits(FROZEN_KEY, torch.arange(3)).tolist() == FROZEN_ROUNDING_BITS


def test_keys_of_many_parameters_are_those_of_each() -> None:
    names = ["a", "net.layers.3.weight", "net.layers.3.bias", ""]
    for seed, step in [(0, 0), (7, 123_456), (2**31, 2**40)]:
        keys = parameter_keys(step_key(seed, step), name_hashes(names))
        assert keys.tolist() == [rounding_key(seed, step, name) for name in names]
