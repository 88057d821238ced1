"""Invariants of the 8-bit codes, over every code and many magnitudes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_memopt.kernels.rounding import round_stochastic
from lightning_memopt.rules.storage_8bit import (
    BLOCK,
    TINY,
    PositiveCodes,
    SignedCodes,
    decode_positive,
    decode_signed,
    encode_positive,
    encode_signed,
)

CODES = torch.arange(256, dtype=torch.uint8)
# A two's complement byte has one more negative value than the code uses.
SIGNED_CODES = CODES[CODES != 0x80]
SCALES = [TINY, 3.7e-20, 1e-8, 1.0, 0.1234, 3e30]


@pytest.mark.parametrize("scale", SCALES)
def test_every_code_survives_decoding_and_encoding(scale) -> None:
    full = torch.tensor(scale)
    assert torch.equal(encode_positive(decode_positive(CODES, full), full), CODES)
    assert torch.equal(encode_signed(decode_signed(SIGNED_CODES, full), full), SIGNED_CODES)


@pytest.mark.parametrize("scale", SCALES)
def test_codes_are_ordered_and_span_the_scale(scale) -> None:
    positive = decode_positive(CODES, torch.tensor(scale))
    assert (positive.diff() > 0).all() and positive[-1] == torch.tensor(scale)
    signed = decode_signed(SIGNED_CODES, torch.tensor(scale))[SIGNED_CODES.view(torch.int8).argsort()]
    assert (signed.diff() > 0).all() and torch.equal(signed, -signed.flip(0))
    torch.testing.assert_close(signed[-1], torch.tensor(scale))


@pytest.mark.parametrize("scale", SCALES)
def test_a_live_second_moment_is_never_zero(scale) -> None:
    # Normal numbers, as GPUs flush the others to zero.
    assert decode_positive(CODES, torch.tensor(scale)).min() >= torch.finfo(torch.float32).tiny


def test_zero_is_a_level_of_the_first_moment() -> None:
    assert encode_signed(torch.zeros(3), torch.ones(3)).tolist() == [0, 0, 0]
    assert decode_signed(torch.zeros(3, dtype=torch.uint8), torch.ones(3)).tolist() == [0, 0, 0]


def test_errors_are_those_of_half_a_step() -> None:
    x = torch.logspace(-6, 0, 100_001)
    one = torch.tensor(1.0)
    positive = decode_positive(encode_positive(x, one), one)
    assert ((positive / x - 1).abs() <= 1 / 24 + 1e-5).all()
    signed = decode_signed(encode_signed(-x, one), one)
    assert ((signed.abs().sqrt() - x.sqrt()).abs() <= 0.5 / 127 + 1e-6).all()


def test_rounding_to_a_code_is_unbiased() -> None:
    values = torch.tensor([5e-7, 1.3e-4, 0.0103, 0.499, 0.501, 0.97])
    x = values[:, None].expand(-1, 200_000)
    rounder = partial(round_stochastic, key=12345, low=True)
    decoded = decode_positive(encode_positive(x.contiguous(), torch.tensor(1.0), rounder), torch.tensor(1.0))
    mean, spread = decoded.double().mean(1), decoded.double().std(1)
    assert ((mean - values).abs() <= 4 * spread / 200_000**0.5 + 1e-5 * values).all()
    # At most the two levels around the value.
    assert ((decoded / x - 1).abs() <= 1 / 12 + 1e-5).all()


@pytest.mark.parametrize("cls", [SignedCodes, PositiveCodes])
@pytest.mark.parametrize("shape", [(4, 2 * BLOCK), (3, 300), (5, 7, 3, 3), (2, 1), (700,)])
def test_blocks_stay_in_their_row(cls, shape) -> None:
    torch.manual_seed(0)
    storage = cls("m")
    moment = torch.rand(shape)
    state = storage.create(torch.empty(shape))
    assert not storage.load(state, torch.float32).any()
    storage.save(state, moment, None)
    rows, columns = shape[0], moment[0].numel()
    assert state["m_scale"].shape == (rows, -(-columns // BLOCK))
    blocks = [row.split(BLOCK) for row in moment.reshape(rows, columns)]
    wanted = torch.tensor([[block.max() for block in row] for row in blocks])
    # The next bf16: never below the largest value, so that no ratio exceeds 1.
    scale = state["m_scale"].float()
    assert (scale >= wanted).all() and (scale <= wanted * (1 + 2**-7)).all()
    assert (storage.load(state, torch.float64) - moment).abs().max() < 0.05
    if rows > 1:
        part = storage.rows(state, 1, 2)
        assert torch.equal(storage.load(part, torch.float32), storage.load(state, torch.float32)[1:2])


def test_a_row_sharded_state_is_the_rows_of_the_whole() -> None:
    torch.manual_seed(1)
    storage, moment = PositiveCodes("v"), torch.rand(6, 200)
    whole, part = storage.create(moment), storage.create(moment[2:4])
    storage.save(whole, moment, partial(round_stochastic, key=7, low=True))
    storage.save(part, moment[2:4], partial(round_stochastic, key=7, low=True, offset=400))
    assert all(torch.equal(part[key], whole[key][2:4]) for key in storage.entries())
