"""What code does to an optimizer between the beginning of a step and its update holds for that step, or is refused.

A plain optimizer reads its groups and states after the backward pass, a fused one before, unless it waits for a norm.
In between come `training_step` and hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, Module, assert_equal_runs, square_loss, vectors
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memopt.backward import keeper
from lightning_memopt.backward.updater import Updater
from lightning_memopt.errors import UpdateError

Change = Callable[[Any, Any], None]


class Net(nn.Module):
    """A linear layer, and two vectors of which one is used in every third step only, so that counts differ."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.seldom = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.linear(x) * self.scale
        return x if self.calls % 3 else x + self.seldom


def edit_options(net: Net, optimizer: Optimizer) -> None:
    optimizer.param_groups[0].update(lr=optimizer.param_groups[0]["lr"] * 0.5, weight_decay=0.3, betas=(0.8, 0.95))


def fill_beta(net: Net, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    if not isinstance(group["betas"][0], Tensor):
        group["betas"] = (torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.999, dtype=torch.float64))
    group["betas"][0].mul_(0.5)


def tag(net: Net, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["tag"] = torch.ones(3)


def fill_rate(net: Net, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    if not isinstance(group["lr"], Tensor):
        group["lr"] = torch.tensor(1e-3, dtype=torch.float64)
    group["lr"].mul_(2.0)


def new_group(net: Net, optimizer: Optimizer) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 1e-3}


def split_group(net: Net, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    if len(optimizer.param_groups) == 1:
        group["params"] = [param for param in group["params"] if param is not net.scale]
        optimizer.add_param_group({"params": [net.scale], "lr": 1e-4})


def take_out(net: Net, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    group["params"] = [param for param in group["params"] if param is not net.scale]


def take_out_group(net: Net, optimizer: Optimizer) -> None:
    split_group(net, optimizer)
    if optimizer.state[net.scale]["step"] > 5:
        del optimizer.param_groups[1:]


def clear(net: Net, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def clear_one(net: Net, optimizer: Optimizer) -> None:
    del optimizer.state[net.scale]


def clear_each(net: Net, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state.clear()


def replace_count(net: Net, optimizer: Optimizer) -> None:
    optimizer.state[net.scale]["step"] = optimizer.state[net.scale]["step"] + 5


def add_to_count(net: Net, optimizer: Optimizer) -> None:
    optimizer.state[net.scale]["step"].add_(5)


def exchange_states(net: Net, optimizer: Optimizer) -> None:
    state = optimizer.state
    state[net.scale], state[net.seldom] = state[net.seldom], state[net.scale]


def freeze(net: Net, optimizer: Optimizer) -> None:
    net.linear.requires_grad_(not net.linear.weight.requires_grad)


CHANGES: list[Change] = [
    edit_options,
    fill_beta,
    tag,
    fill_rate,
    new_group,
    split_group,
    take_out,
    take_out_group,
    clear,
    clear_one,
    clear_each,
    replace_count,
    add_to_count,
    exchange_states,
    freeze,
]
HOOKS = ["on_train_batch_start", "training_step", "on_before_zero_grad", "on_before_backward"]


class Changed(Module):
    """Makes the change in two steps, each at the same place."""

    def __init__(self, change: Change, hook: str, optimizer: str = "adam") -> None:
        super().__init__(Net, OPTIMIZERS[optimizer], square_loss)
        self.change, self.hook = change, hook

    def at(self, hook: str) -> None:
        if hook == self.hook and self.global_step in (4, 8):
            self.change(self.net, self.trainer.optimizers[0])

    def on_train_batch_start(self, *_: Any) -> None:
        self.at("on_train_batch_start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.at("on_before_zero_grad")

    def on_before_backward(self, *_: Any) -> None:
        self.at("on_before_backward")

    def on_after_backward(self) -> None:
        self.at("on_after_backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.at("on_before_optimizer_step")


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_before_the_backward_pass_is_followed(change: Change, hook: str, clip: float | None) -> None:
    options: dict[str, Any] = {"gradient_clip_val": clip, "precision": "64-true", "max_steps": 12}
    assert_equal_runs(partial(Changed, change, hook), 1e-11, vectors, **options)


@pytest.mark.parametrize("hook", HOOKS)
def test_moments_that_nothing_counts_begin_anew(hook: str) -> None:
    make = partial(Changed, clear_each, hook, "sgd_momentum")
    assert_equal_runs(make, 1e-11, vectors, precision="64-true", max_steps=12)


@pytest.mark.parametrize("change", [edit_options, clear, clear_each, add_to_count], ids=lambda change: change.__name__)
def test_a_change_after_the_backward_pass(change: Change) -> None:
    """Is followed where updates wait for the norm, and else refused: it comes too late."""
    make = partial(Changed, change, "on_after_backward")
    options: dict[str, Any] = {"precision": "64-true", "max_steps": 12}
    assert_equal_runs(make, 1e-11, vectors, gradient_clip_val=0.05, **options)
    with pytest.raises(UpdateError, match=r"has updated weights already\. Change them before its backward pass"):
        assert_equal_runs(make, 1e-11, vectors, **options)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("change", [edit_options, clear, clear_each, add_to_count], ids=lambda change: change.__name__)
def test_a_change_right_before_the_optimizer_s_step_comes_too_late(change: Change, clip: float | None) -> None:
    """Options or states of the optimizer changed between a step's backward pass and its end."""
    make = partial(Changed, change, "on_before_optimizer_step")
    with pytest.raises(UpdateError, match="has updated weights already"):
        assert_equal_runs(make, 1e-11, vectors, precision="64-true", max_steps=12, gradient_clip_val=clip)


def test_a_hook_after_the_optimizer_s_step_may_change_its_options() -> None:
    """For the next step, as under plain torch."""

    class Halves(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda optimizer, *_: edit_options(self.net, optimizer))
            return optimizer

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)
            optimizer.param_groups[0]["lr"] *= 1.5

    assert_equal_runs(partial(Halves, Net, OPTIMIZERS["adam"], square_loss), 1e-11, vectors, precision="64-true")


@pytest.mark.parametrize("small", [True, False])
def test_unfreezing_in_the_step(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(keeper, "SMALL", 0)

    class Unfreezes(Module):
        def __init__(self) -> None:
            super().__init__(Net, OPTIMIZERS["adam"], square_loss)
            self.net.linear.requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.net.linear.requires_grad_(batch_idx >= 3)
            return super().training_step(batch, batch_idx)

    _, fused = assert_equal_runs(Unfreezes, 1e-11, vectors, precision="64-true", max_steps=6)
    assert float(fused.optimizer.state[fused.module.net.linear.weight]["step"]) == 3


def test_a_hook_of_the_optimizer_sets_the_rate() -> None:
    class Halves(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(lambda optimizer, *_: edit_options(self.net, optimizer))
            return optimizer

    assert_equal_runs(partial(Halves, Net, OPTIMIZERS["adam"], square_loss), 1e-11, vectors, precision="64-true")


def test_a_parameter_that_was_taken_out_is_plain() -> None:
    class TakesOut(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                take_out(pl_module.net, trainer.optimizers[0])
                self.before = pl_module.net.scale.detach().clone()

    callbacks: list[TakesOut] = []
    make = partial(Module, Net, OPTIMIZERS["adam"], square_loss)
    _, fused = assert_equal_runs(make, 1e-6, vectors, lambda: [callbacks.append(c := TakesOut()) or c], max_steps=4)
    assert torch.equal(fused.module.net.scale, callbacks[-1].before)
    assert fused.module.net.scale.grad is not None


def test_a_change_after_a_first_update_is_refused() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    updater = Updater("nearest", "auto", "raise", "param", 0)
    updater.attach(net, [optimizer])
    with pytest.raises(UpdateError, match="has updated weights already"), updater.armed(optimizer, 0):
        for param in (net.scale, net.seldom):
            loss = param.sum()
            with updater.backward(loss, queue=False):
                loss.backward()
            optimizer.param_groups[0]["lr"] = 0.5


def test_a_step_that_closes_reads_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading groups and states takes the host time, and the next step begins with it."""
    net, reads, facts = Net(), list[int](), Updater._facts
    monkeypatch.setattr(Updater, "_facts", lambda self, optimizer: reads.append(1) or facts(optimizer))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    updater = Updater("nearest", "auto", "raise", "param", 0)
    updater.attach(net, [optimizer])
    with updater.armed(optimizer, 0):
        loss = net(torch.ones(2, 8)).sum()
        with updater.backward(loss, queue=False):
            loss.backward()
        updater.finish()
        before = len(reads)
    assert before == len(reads) > 0
