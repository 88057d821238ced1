"""Small parameters are updated together at the end of a backward pass: which, when, and from what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, Module, assert_equal_runs, square_loss, vectors
from torch import Tensor, nn

from lightning_memopt.backward import keeper
from lightning_memopt.backward.updater import Updater
from lightning_memopt.errors import UpdateError


def updater_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> Updater:
    updater = Updater("nearest", "auto", "raise", "param", 0)
    updater.attach(module, [optimizer])
    return updater


def test_the_smallest_wait_as_far_as_the_budget_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "SMALL", 100)
    monkeypatch.setattr(keeper, "LEAST_BUDGET", 150)
    monkeypatch.setattr(keeper, "SHARE", 0.0)
    module = nn.ParameterList([torch.zeros(size) for size in (90, 101, 20, 60, 70, 8)])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    updater = updater_of(module, optimizer)
    waiting = [slot.param.numel() for slot in updater.slots.values() if slot.small]
    assert sorted(waiting) == [8, 20, 60], "with 70 there would be 158"
    # The engine is asked about the others only.
    assert all((slot.handle is None) == slot.small for slot in updater.slots.values())


def test_a_share_of_a_large_model_waits() -> None:
    sizes = [keeper.SMALL] * 9 + [keeper.SMALL + 1, 1 << 27]
    module = nn.ParameterList([torch.zeros(1, 1).expand(size, 1) for size in sizes])
    updater = Updater("nearest", "auto", "raise", "param", 0)
    for param in module:
        updater.slots[param] = Mock(param=param, entire=True)
    updater._choose_small()
    small = [slot.small for slot in updater.slots.values()]
    assert small == [True] * 8 + [False] * 3
    assert 8 * keeper.SMALL <= sum(sizes) * keeper.SHARE < 9 * keeper.SMALL


class Scales(nn.Module):
    """Two vectors; a loss may use either."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))


def test_only_what_a_pass_reached_is_used_at_its_end() -> None:
    module = Scales()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    updater = updater_of(module, optimizer)
    module.b.grad = torch.full((8,), 0.25)  # from an earlier pass, outside of the step
    with updater.armed(optimizer, 0):
        for param, waits in ((module.a, True), (module.b, False)):
            loss = param.sum() * 0.5
            with updater.backward(loss, queue=False):
                loss.backward()
                assert module.a.grad is None, "used when backward returns"
            assert (module.b.grad is not None) == waits
    assert torch.equal(module.a, torch.full((8,), 0.5)) and torch.equal(module.b, torch.full((8,), 0.25))


def test_a_second_pass_is_refused() -> None:
    module = Scales()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    updater = updater_of(module, optimizer)
    with pytest.raises(UpdateError, match="another gradient"), updater.armed(optimizer, 0):
        for _ in range(2):
            loss = module.a.sum()
            with updater.backward(loss, queue=False):
                loss.backward()


def test_sparse_gradients_are_refused() -> None:
    module = Scales()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    updater = updater_of(module, optimizer)
    with pytest.raises(UpdateError, match="sparse"), updater.armed(optimizer, 0):
        module.a.grad = torch.ones(8).to_sparse()


# ---------------------------------------------------------------- what may change while updates stand


def edit_lr(module: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def couple_decay(module: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.2


def move_weights(module: Any, optimizer: Any) -> None:
    for param in module.net.parameters():
        param.data = param.data.clone()


def transpose_weights(module: Any, optimizer: Any) -> None:
    for param in module.net.parameters():
        if param.dim() == 2 and param.shape[0] == param.shape[1]:
            param.data = param.data.t()


def replace_moments(module: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def move_moments(module: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone() * 0.25


def reset_state(module: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def load_state(module: Any, optimizer: Any) -> None:
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["step"] = entry["step"] + 3
    optimizer.load_state_dict(saved)


def freeze(module: Any, optimizer: Any) -> None:
    module.net.norm.requires_grad_(not module.net.norm.weight.requires_grad)


CHANGES: list[Callable[[Any, Any], None]] = [
    edit_lr,
    couple_decay,
    move_weights,
    transpose_weights,
    replace_moments,
    move_moments,
    reset_state,
    load_state,
    freeze,
]


class Changes(pl.Callback):
    """Makes a change between steps, twice, or before the gradients of a step are zeroed."""

    def __init__(self, change: Callable[[Any, Any], None], within: bool) -> None:
        self.change, self.within = change, within

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if not self.within and trainer.global_step in (3, 6):
            self.change(module, trainer.optimizers[0])

    def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if self.within and trainer.global_step in (3, 6):
            self.change(module, trainer.optimizers[0])


class Square(nn.Module):
    """A linear layer, a norm, and a matrix that no layer of ours uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.own = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) @ self.own


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_steps_is_followed(change: Any, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(change, small, False, monkeypatch)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("change", [move_weights, replace_moments, move_moments], ids=lambda change: change.__name__)
def test_a_change_within_a_step_is_followed(change: Any, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(change, small, True, monkeypatch)


def check(change: Any, small: bool, within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(keeper, "SMALL", 0)

    def make() -> Module:
        return Module(Square, OPTIMIZERS["adam"], square_loss)

    assert_equal_runs(make, data=vectors, callbacks=lambda: [Changes(change, within)], max_steps=9)
