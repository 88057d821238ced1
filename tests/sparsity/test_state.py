"""Cohorts and moments over topology updates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_memopt.rules.storage import Dense
from lightning_memopt.rules.storage_8bit import PositiveCodes, SignedCodes
from lightning_memopt.sparsity import state as states
from lightning_memopt.sparsity.bits import pack, unpack
from lightning_memopt.sparsity.state import BIRTHS, COHORT, INDEX, MASK, STEPS

TOTAL = 1000


def bits_of(mask: Tensor) -> Tensor:
    return pack(len(mask), lambda a, b: mask[a:b], mask.device)


def next_mask(mask: Tensor, k: int) -> Tensor:
    """Another mask with as many weights."""
    new = mask.clone()
    new[mask.nonzero().view(-1)[torch.randperm(int(mask.sum()))[:k]]] = False
    new[(~mask).nonzero().view(-1)[torch.randperm(int((~mask).sum()))[:k]]] = True
    return new


def test_ages_are_exact_while_a_byte_is_enough() -> None:
    """Against a dense count of updates per weight, over 150 events."""
    torch.manual_seed(0)
    mask = torch.rand(TOTAL) < 0.4
    state, ages = states.fresh(bits_of(mask), TOTAL), torch.zeros(TOTAL, dtype=torch.long)
    for event in range(150):
        for _ in range(3):
            state[STEPS] += 1
            ages[mask] += 1
        new = next_mask(mask, 5)
        states.change_mask(state, (), bits_of(new), TOTAL, torch.float32)
        ages[~(mask & new)] = 0
        mask = new
        assert torch.equal(unpack(state[MASK], 0, TOTAL), mask), event
        assert torch.equal(torch.tensor(states.ages(state))[state[COHORT].int()], ages[mask]), event
        assert int(state[INDEX][-1]) == int(mask.sum()) == len(state[COHORT])


def test_more_cohorts_than_a_byte_tells_apart() -> None:
    """The oldest become one: young weights keep their ages, old ones are off by little."""
    torch.manual_seed(1)
    total = 4000
    mask = torch.rand(total) < 0.5
    state, ages = states.fresh(bits_of(mask), total), torch.zeros(total, dtype=torch.long)
    for _ in range(600):
        state[STEPS] += 2
        ages[mask] += 2
        new = next_mask(mask, 2)
        states.change_mask(state, (), bits_of(new), total, torch.float32)
        ages[~(mask & new)] = 0
        mask = new
    assert len(state[BIRTHS]) == states.COHORTS
    shown, true = torch.tensor(states.ages(state))[state[COHORT].int()], ages[mask]
    assert (shown >= true).all() and torch.equal(shown[true < 100], true[true < 100])
    assert ((shown - true) / true.clamp(min=1)).max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_moments_move_with_their_weights(dtype: torch.dtype) -> None:
    """New weights start at the storage's initial value."""
    torch.manual_seed(2)
    mask, whole = torch.rand(TOTAL) < 0.5, torch.randn(TOTAL).to(dtype)
    storage = (Dense("exp_avg", dtype), Dense("sum", dtype, init=0.5))
    state = states.fresh(bits_of(mask), TOTAL)
    state |= {moment.name: whole[mask][None].clone() for moment in storage}
    new = next_mask(mask, 100)
    states.change_mask(state, storage, bits_of(new), TOTAL, torch.float64 if dtype == torch.float64 else torch.float32)
    for moment in storage:
        expected = torch.where(mask, whole, torch.tensor(moment.init, dtype=dtype))[new]
        assert torch.equal(state[moment.name][0], expected)


def test_codes_are_encoded_anew() -> None:
    """To their own resolution; a grown weight's first moment is exactly zero."""
    torch.manual_seed(3)
    mask = torch.rand(TOTAL) < 0.5
    like = states.compact_like(torch.empty(1, TOTAL), int(mask.sum()))
    storage = (SignedCodes("exp_avg"), PositiveCodes("exp_avg_sq"))
    state = states.fresh(bits_of(mask), TOTAL)
    values = (torch.randn(like.shape), torch.rand(like.shape) + 0.1)
    for moment, value in zip(storage, values, strict=True):
        state |= moment.create(like)
        moment.save(state, value, None)
    before = [moment.load(state, torch.float32).clone() for moment in storage]
    new = next_mask(mask, 100)
    states.change_mask(state, storage, bits_of(new), TOTAL, torch.float32)
    m, v = (moment.load(state, torch.float32)[0] for moment in storage)
    fresh = ~mask[new]
    assert not m[fresh].any() and (v[fresh] < 1e-5).all()
    for after, old, error in ((m, before[0], 0.05), (v, before[1], 0.06)):
        kept = old[0][new[mask]]
        assert ((after[~fresh] - kept).abs() <= error * old.abs().max()).all()
