"""Cohorts and moments over topology updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memopt.rules.gefen import BlockMean
from lightning_memopt.rules.storage import Dense, Storage
from lightning_memopt.rules.storage_8bit import PositiveCodes, SignedCodes
from lightning_memopt.sparsity import state as states
from lightning_memopt.sparsity.bits import pack, unpack
from lightning_memopt.sparsity.spans import WHERE, Where, span, spans
from lightning_memopt.sparsity.state import BIRTHS, COHORT, INDEX, MASK, STEPS

SHAPE = (10, 100)
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
        states.change_mask(state, (), bits_of(new), SHAPE, torch.float32)
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
        states.change_mask(state, (), bits_of(new), (10, 400), torch.float32)
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
    states.change_mask(state, storage, bits_of(new), SHAPE, torch.float64 if dtype == torch.float64 else torch.float32)
    for moment in storage:
        expected = torch.where(mask, whole, torch.tensor(moment.init, dtype=dtype))[new]
        assert torch.equal(state[moment.name][0], expected)


def coded(storage: tuple[Storage, ...], mask: Tensor, values: tuple[Tensor, ...]) -> dict[str, Any]:
    """The state of a sparse weight whose moments are `values`, one per active weight."""
    state = states.fresh(bits_of(mask), TOTAL)
    state |= states.moments(storage, SHAPE, int(mask.sum()), 0.5, torch.empty(()))
    view = {**state, WHERE: Where.of(state[MASK], TOTAL, SHAPE[1])}
    for moment, value in zip(storage, values, strict=True):
        moment.take(view, value[None])
    return state


def decoded(storage: tuple[Storage, ...], state: dict[str, Any]) -> list[Tensor]:
    view = {**state, WHERE: Where.of(state[MASK], TOTAL, SHAPE[1])}
    return [moment.load(view, torch.float32)[0].clone() for moment in storage]


def test_codes_are_encoded_anew() -> None:
    """To their own resolution; a grown weight's first moment is exactly zero."""
    torch.manual_seed(3)
    mask = torch.rand(TOTAL) < 0.5
    count = int(mask.sum())
    storage = (SignedCodes("exp_avg"), PositiveCodes("exp_avg_sq"))
    state = coded(storage, mask, (torch.randn(count), torch.rand(count) + 0.1))
    before = decoded(storage, state)
    new = next_mask(mask, 100)
    states.change_mask(state, storage, bits_of(new), SHAPE, torch.float32)
    m, v = decoded(storage, state)
    fresh = ~mask[new]
    assert not m[fresh].any() and (v[fresh] < 1e-5).all()
    for after, old, error in ((m, before[0], 0.05), (v, before[1], 0.06)):
        kept = old[new[mask]]
        assert ((after[~fresh] - kept).abs() <= error * old.abs().max()).all()


def test_shared_second_moments_stay_with_their_blocks() -> None:
    """Weights join the block they are grown in; one without weights has the mean over all."""
    torch.manual_seed(4)
    mask = torch.rand(TOTAL) < 0.5
    mask.view(SHAPE)[3, :64] = False  # an empty block: spans have 64 weights
    storage = (SignedCodes("exp_avg"), BlockMean("exp_avg_sq", 32, 32))
    count = int(mask.sum())
    state = coded(storage, mask, (torch.randn(count), torch.rand(count) + 0.1))
    means = state["exp_avg_sq"].clone()
    number = Where.of(state[MASK], TOTAL, SHAPE[1]).blocks(means)
    values = decoded(storage, state)[1]
    new = mask.clone()
    new.view(SHAPE)[3, 5] = True
    new[mask.nonzero()[0]] = False
    states.change_mask(state, storage, bits_of(new), SHAPE, torch.float32)
    assert number.sizes()[3, 0] == 0 and (number.sizes() == 0).sum() == 1
    means[3, 0] = values.double().mean()
    assert torch.equal(state["exp_avg_sq"], means)
    fresh = ~mask[new]
    assert torch.equal(decoded(storage, state)[1][fresh], means[3, :1])


@pytest.mark.parametrize(("columns", "density", "width"), [(100, 0.5, 128), (1000, 0.26, 256), (130, 1.0, 64)])
def test_blocks_are_spans_of_a_row(columns: int, density: float, width: int) -> None:
    """Against a loop over rows and spans."""
    torch.manual_seed(5)
    mask = torch.rand(5, columns) < density
    mask[2] = False
    shape = spans((5, columns), 64, density)
    assert span(64, density) == width and shape == (5, -(-columns // width))
    x, values = torch.randn(int(mask.sum())), torch.randn(shape)
    blocks = Where.of(bits_of(mask.view(-1)), mask.numel(), columns).blocks(values)
    whole = torch.zeros(mask.shape)
    whole[mask] = x
    for row in range(5):
        for i in range(shape[1]):
            place = slice(i * width, (i + 1) * width)
            part = whole[row, place][mask[row, place]]
            assert blocks.sizes()[row, i] == len(part)
            expected = part.abs().amax() if len(part) else 0
            assert blocks.largest(x)[row, i] == expected
            torch.testing.assert_close(blocks.mean(x)[row, i], part.mean() if len(part) else torch.zeros(()))
            spread = torch.zeros(mask.shape)
            spread[mask] = blocks.spread(values)[0]
            assert (spread[row, place][mask[row, place]] == values[row, i]).all()
