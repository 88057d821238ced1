"""What is frozen or written between steps, or in them, holds, whatever of the weights is gathered just then."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Module
from lightning.pytorch.callbacks import BaseFinetuning
from sharded import Deep, Ranks, data, furthest, train, train_plain

import lightning_memopt as memopt
from lightning_memopt.compat import CASES


class Validates(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(self.net, batch)

    def val_dataloader(self) -> Any:
        return data(int(os.environ.get("WORLD_SIZE", 1)), 2)


class Halves(pl.Callback):
    """Writes weights right after a validation."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(0.5)


class Swaps(Halves):
    """Validates with other weights, as those do that average."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = [param.detach().clone() for param in module.parameters()]
        super().on_validation_end(trainer, module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            for param, kept in zip(module.parameters(), self.kept, strict=True):
                param.copy_(kept)


class Unfreezes(BaseFinetuning):
    """Lightning's own: adds the bottleneck to the optimizer after an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.bottleneck)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.bottleneck, optimizer, lr=1e-3)


class Calls(pl.Callback):
    """Calls the module between steps, then writes its weights."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            module(batch[0])
            for param in module.parameters():
                param.mul_(0.9)


def trained(net: Any) -> list[Any]:
    return [param for param in net.parameters() if param.requires_grad]


class Skips(Module):
    """Has no loss in its first step, which leaves gathered what its forward pass used."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx else None


class WritesOnce(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(0.5)


def test_a_step_without_loss_leaves_nothing_gathered(one: Ranks) -> None:
    """Lightning knows such steps on one device only."""
    make = partial(Skips, net=Deep)
    plain = train_with(train_plain, make, WritesOnce)
    sharded = one(train_with, train, make, WritesOnce)
    assert furthest(plain, sharded[0]) <= 1e-5


AFTER: dict[str, tuple[type[pl.Callback], dict[str, Any]]] = {
    "writes": (Halves, {"val_check_interval": 2}),
    "swaps": (Swaps, {"val_check_interval": 2}),
    "unfreezes": (Unfreezes, {"limit_train_batches": 3}),
    "calls": (Calls, {}),
}


def train_with(run: Any, make: Any, callback: type[pl.Callback], **options: Any) -> Any:
    return run(make, callbacks=[callback()], num_sanity_val_steps=0, max_steps=6, **options)


@pytest.mark.parametrize("case", AFTER)
def test_callbacks_see_shards(two: Ranks, case: str) -> None:
    """After a validation, or a call of the module, as after a step."""
    callback, options = AFTER[case]
    make = partial(Validates, net=Deep, groups=trained)
    plain = train_with(train_plain, make, callback, **options)
    sharded = two(train_with, train, make, callback, **options)
    assert furthest(sharded[0], sharded[1]) == 0 and furthest(plain, sharded[0]) <= 1e-5


class BeginsLate(Module):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net.bottleneck.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            self.net.bottleneck.requires_grad_(True)
            self.net.head.requires_grad_(False)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}])
def test_frozen_in_the_step_for_good(two: Ranks, options: dict[str, Any]) -> None:
    """Once is enough, and what was frozen from the beginning is trained from there on."""
    make = partial(BeginsLate, net=Deep)
    plain, sharded = train_plain(make, max_steps=5, **options), two(train, make, max_steps=5, **options)
    assert furthest(sharded[0], sharded[1]) == 0 and furthest(plain, sharded[0]) <= 1e-5


class Toggles(Module):
    """As Lightning's own example of two optimizers; or the critic, which is not the first optimizer's, comes first."""

    def __init__(self, critic_first: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization, self.critic_first = False, critic_first
        blocks = (torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Tanh()) for _ in range(2))
        self.generator = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Sequential(*blocks))
        self.critic = torch.nn.Linear(7, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].float() / 5
        phases = list(zip(self.optimizers(), (True, False), strict=True))
        for optimizer, trains in reversed(phases) if self.critic_first else phases:
            self.toggle_optimizer(optimizer)
            y = self.generator(x)
            with memopt.fused_step(optimizer):
                self.manual_backward(self.critic(y if trains else y.detach()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.generator, self.critic)]


class TogglesItsOwn(Toggles):
    """Sharded by FSDP2's defaults, which leave roots gathered."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for net in (self.generator, self.critic):
            fully_shard(net, mesh=self.device_mesh["data_parallel"])


def net_of_nothing() -> torch.nn.Module:
    return torch.nn.Identity()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("critic_first", [False, True])
def test_toggled_optimizers(two: Ranks, critic_first: bool, reshard: bool) -> None:
    make = partial(Toggles, critic_first, net=net_of_nothing)
    plain, sharded = train_plain(make, max_steps=8), two(train, make, {"reshard_after_forward": reshard}, max_steps=8)
    assert furthest(plain, sharded[0]) <= 1e-5


def test_toggled_optimizers_of_a_module_that_shards_itself(two: Ranks) -> None:
    """Exact, unless a network is trained that a pass of the same step left gathered while it was frozen."""
    exact, wrong = (partial(TogglesItsOwn, critic_first, net=net_of_nothing) for critic_first in (False, True))
    plain, sharded = train_plain(partial(Toggles, net=net_of_nothing), max_steps=8), two(train, exact, max_steps=8)
    assert furthest(plain, sharded[0]) <= 1e-5
    (message,) = (case.message for case in CASES if case.feature == "shards toggled while their weights are gathered")
    for error in two.attempt(train, wrong, max_steps=8):
        assert isinstance(error, memopt.UnsupportedError) and "generator." in str(error) and message in str(error)
