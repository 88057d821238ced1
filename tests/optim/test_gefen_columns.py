"""Gefen's factors of columns: that they even out a block, what they never do, and how they are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gefen_cases import equal, through_a_file, weight
from torch import Tensor, nn

import lightning_memopt as memopt
from lightning_memopt.optim.gefen_columns import FIRST, LEARNED, LEAST_SHARE, MIN_ROWS, SCALE
from lightning_memopt.rules.gefen import BlockMean, LearnedCodes

SHAPE = (96, 300)


def uneven(columns: int = SHAPE[1]) -> Tensor:
    """Sizes of columns over nearly a decade."""
    return 8 ** torch.rand(columns, generator=torch.Generator().manual_seed(5))


def train(param: nn.Parameter, optimizer: memopt.Gefen, grad: Callable[[int], Tensor], steps: range) -> None:
    for step in steps:
        param.grad = grad(step).to(param.dtype)
        optimizer.step()


def noise(step: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def test_columns_of_a_block_take_steps_of_one_size() -> None:
    def sizes(rows: int) -> Tensor:
        shape = (rows, 300)
        param = weight(shape)
        optimizer = memopt.Gefen([param], lr=1e-3, weight_decay=0.0, block=128)
        train(param, optimizer, lambda step: noise(step, shape) * uneven(), range(64))
        start = param.detach().clone()
        train(param, optimizer, lambda step: noise(step, shape) * uneven(), range(64, 96))
        return (param.detach() - start).square().mean(0).sqrt()

    with_factors, without = sizes(96), sizes(MIN_ROWS - 1)
    assert without.max() / without.min() > 5
    assert with_factors.max() / with_factors.min() < 1.8


def test_factors_are_learned_when_the_number_of_steps_has_doubled() -> None:
    param = weight(SHAPE)
    optimizer = memopt.Gefen([param])
    state, changed = optimizer.state[param], []
    for step in range(40):
        before = state[SCALE].clone() if SCALE in state else torch.ones(300)
        train(param, optimizer, lambda step: noise(step) * uneven(), range(step, step + 1))
        if not torch.equal(state[SCALE], before):
            changed.append(step)
            assert state[LEARNED] == step
    assert changed == [FIRST, 8, 16, 32]


def test_learning_changes_units_and_nothing_else() -> None:
    param = weight(SHAPE)
    optimizer = memopt.Gefen([param], lr=0.0)
    state = optimizer.state[param]
    train(param, optimizer, lambda step: noise(step) * uneven(), range(8))
    mean = BlockMean("exp_avg_sq", 128, 64, 300)

    def moments() -> tuple[Tensor, Tensor]:
        m, v = LearnedCodes("exp_avg").load(state, torch.float32), mean.load(state, torch.float32)
        return m / state[SCALE], v / state[SCALE] ** 2

    from lightning_memopt.optim.gefen_columns import learn
    from lightning_memopt.rules.gefen import GefenRule

    m, v = moments()
    r = state[SCALE].clone()
    assert int(state["step"]) == 8
    learn(optimizer, GefenRule())
    assert not torch.equal(state[SCALE], r)
    new_m, new_v = moments()
    assert (new_m - m).norm() < 0.01 * m.norm()
    # Second moments of single weights change, as that is what was learned, but not all of them together.
    assert (new_v.log() - v.log()).mean().abs() < 0.1


def test_tensors_are_written_in_place_once_the_code_is_learned() -> None:
    param = weight(SHAPE)
    optimizer = memopt.Gefen([param])
    train(param, optimizer, noise, range(2))
    state = optimizer.state[param]
    before = {key: (id(value), value.data_ptr()) for key, value in state.items()}
    train(param, optimizer, lambda step: noise(step) * uneven(), range(2, 20))
    assert before == {key: (id(value), value.data_ptr()) for key, value in state.items()}
    assert (state[SCALE] != 1).any()


# ------------------------------------------------------------------------------------------------------------- safety
def test_dead_columns_keep_their_factor_and_never_move() -> None:
    live = torch.ones(300)
    live[::7] = live[128:256] = 0
    param = weight(SHAPE, torch.bfloat16)
    start = param.detach().clone()
    optimizer = memopt.Gefen([param], weight_decay=0.0)
    train(param, optimizer, lambda step: noise(step) * uneven() * live, range(100))
    assert torch.equal(param[:, live == 0], start[:, live == 0])
    assert (param[:, live == 1] != start[:, live == 1]).any(0).all()
    r = optimizer.state[param][SCALE]
    assert torch.isfinite(r).all() and (r > 0).all()
    assert torch.allclose(r[128:256], torch.ones(128))


@pytest.mark.parametrize("quiet", [0.0, 1e-6, 1e-2])
def test_a_column_that_wakes_up_takes_no_leap(quiet: float) -> None:
    size = torch.ones(300)
    size[10] = quiet
    param = weight(SHAPE)
    optimizer = memopt.Gefen([param], lr=1e-3, weight_decay=0.0)
    train(param, optimizer, lambda step: noise(step) * size, range(70))
    assert optimizer.state[param][SCALE][10] <= LEAST_SHARE**-0.5
    start = param.detach().clone()
    train(param, optimizer, noise, range(70, 90))
    moved = (param.detach() - start).abs().amax(0)
    assert moved[10] < 8 * moved[11:].max()


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-20, 1e10, 3e16])
def test_tiny_and_huge_gradients(size: float) -> None:
    param = weight(SHAPE)
    start = param.detach().clone()
    optimizer = memopt.Gefen([param], lr=1e-3, eps=0.0, weight_decay=0.0)
    train(param, optimizer, lambda step: (noise(step) * uneven() / 8).clamp(-1, 1) * size, range(20))
    state = optimizer.state[param]
    assert torch.isfinite(param).all() and (param - start).abs().max() < 20 * 12 * 1e-3
    assert all(torch.isfinite(state[key]).all() for key in ("exp_avg_scale", "exp_avg_sq", SCALE))
    assert (state["exp_avg_sq"] > 0).all() and (state[SCALE] > 0).all() and state[SCALE].max() <= 8 * (1 + 1e-6)


# --------------------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("shape", [SHAPE, (64, 16, 3, 3), (5000, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 3, 4, 5, 8])
def test_resuming_is_exact(steps: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def grad(step: int) -> Tensor:
        return noise(step, shape) * uneven(shape[1])[None, :].view(1, -1, *[1] * (len(shape) - 2))

    param = weight(shape, dtype)
    optimizer = memopt.Gefen([param], lr=1e-2)
    train(param, optimizer, grad, range(steps))
    saved, at = through_a_file(optimizer.state_dict()), param.detach().clone()
    train(param, optimizer, grad, range(steps, 12))
    other = nn.Parameter(at)
    resumed = memopt.Gefen([other], lr=1e-2)
    resumed.load_state_dict(saved)
    train(other, resumed, grad, range(steps, 12))
    assert torch.equal(param, other) and equal(optimizer.state_dict(), resumed.state_dict())


def test_a_state_without_factors_gets_them() -> None:
    param = weight(SHAPE)
    optimizer = memopt.Gefen([param])
    train(param, optimizer, noise, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for key in (SCALE, LEARNED):
        del saved["state"][0][key]
    again = memopt.Gefen([param])
    again.load_state_dict(saved)
    assert torch.equal(again.state[param][SCALE], torch.ones(300))
    train(param, again, lambda step: noise(step) * uneven(), range(3, 6))
    assert (again.state[param][SCALE] != 1).any()


def test_factors_come_with_the_first_step_after_an_adamw_checkpoint() -> None:
    twin, param = weight(SHAPE), weight(SHAPE)
    adamw = torch.optim.AdamW([twin], lr=1e-3)
    for step in range(50):
        twin.grad = noise(step) * uneven()
        adamw.step()
    ours = memopt.Gefen([param])
    ours.load_from_adamw(adamw.state_dict())
    with torch.no_grad():
        param.copy_(twin)
    start = param.detach().clone()
    for p in (param, twin):
        p.grad = noise(50) * uneven()
    ours.step()
    adamw.step()
    cosine = torch.nn.functional.cosine_similarity
    assert cosine((param - start).flatten(), (twin - start).flatten(), dim=0) > 0.97


def test_which_weights_have_factors() -> None:
    def keys(shape: tuple[int, ...], **options: Any) -> bool:
        param = weight(shape)
        optimizer = memopt.Gefen([param], **options)
        param.grad = torch.ones(shape)
        optimizer.step()
        return SCALE in optimizer.state[param]

    assert keys((64, 64)) and keys((64, 16, 3, 3)) and keys((5000, 1)) and keys((64, 64), codebook="table", block=16)
    assert not keys((63, 128)) and not keys((5000,)) and not keys((64, 8)) and not keys((8, 64, 64))
