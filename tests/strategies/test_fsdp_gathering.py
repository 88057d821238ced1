"""Units that are gathered out of other ranks' memory: what is left alone, and what is given up."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Module
from sharded import Deep, Ranks, Straight, furthest, train
from torch import Tensor, nn

from lightning_memopt import UpdateError
from lightning_memopt.strategies import sharding

COPIES, COLLECTIVES = {"peer_memory": True}, {"peer_memory": False}


class Precise(nn.Module):
    """A block with frozen parameters in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7).double().requires_grad_(False)
        self.up = nn.Linear(7, 17)
        self.down = nn.Linear(17, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x.double()).float())))


class Mixed(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Precise() for _ in range(2))


def saved_and_copied(trainer: Any) -> tuple[int, list[bool]]:
    """Shards that can be saved as they are, and which units are gathered by copies."""
    file, module = io.BytesIO(), trainer.lightning_module
    torch.save({name: param.to_local() for name, param in module.named_parameters()}, file)
    file.seek(0)
    return len(torch.load(file)), trainer.copied


class Copied(pl.Callback):
    """Notes which units are gathered by copies."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        groups = sharding.groups(trainer.lightning_module)  # type: ignore[arg-type]
        trainer.copied = ["unshard" in vars(group) for group in groups]  # type: ignore[attr-defined]


def test_precisions_in_one_unit(two: Ranks) -> None:
    """Such a unit is left to FSDP2, as what lies in one memory cannot be saved in two precisions."""
    options: dict[str, Any] = {"callbacks": [Copied()], "inspect": saved_and_copied}
    copies, collectives = (two(train, partial(Module, net=Mixed), way, **options)[0] for way in (COPIES, COLLECTIVES))
    assert copies["said"] == (len(copies["weights"]), [True, False, False])
    assert furthest(copies, collectives) == 0


class FrozenBelow(Straight):
    """The last frozen block is gathered in backward for nothing."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embedding, self.blocks[0]):
            part.requires_grad_(False)


class Gathered(pl.Callback):
    """Counts bytes of gathered parameters that nothing uses any more, after each step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        unused = [param for group in sharding.groups(module) if group.is_sharded for param in group.fsdp_params]
        self.bytes.append(sum(whole.untyped_storage().size() for param in unused for whole in param.all_gather_outputs))


def left(way: dict[str, Any]) -> dict[str, Any]:
    gathered = Gathered()
    return train(partial(Module, net=FrozenBelow), way, callbacks=[gathered], inspect=lambda _: gathered.bytes)


@pytest.mark.parametrize("way", [COPIES, COLLECTIVES])
def test_nothing_stays_gathered(two: Ranks, way: dict[str, Any]) -> None:
    """What was gathered ahead in vain is freed with the backward pass."""
    assert two(left, way)[0]["said"] == [0] * 12


def fall(dy: Tensor) -> None:
    raise ArithmeticError("the sky fell")


class Stumbles(Straight):
    """Fails once, in the third pass, between two blocks."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.passes = where, 0

    def forward(self, ids: Tensor) -> Tensor:
        self.passes += 1
        x = self.blocks[0](self.embedding(ids))
        if self.passes == 3:
            if self.where == "forward":
                fall(x)
            x.register_hook(fall)
        return self.head(self.blocks[1](x))


def train_again(where: str, strategy: dict[str, Any]) -> dict[str, Any]:
    """Train a module whose first run broke off."""
    module = Module(net=partial(Stumbles, where))
    with pytest.raises((ArithmeticError, UpdateError), match="the sky fell"):
        train(lambda: module, strategy, max_steps=6)
    assert module.net.passes == 3
    return train(lambda: module, strategy, max_steps=4)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_a_module_whose_run_broke_off_can_be_trained_again(two: Ranks, where: str, options: dict[str, Any]) -> None:
    copies, collectives = (two(train_again, where, way | options)[0] for way in (COPIES, COLLECTIVES))
    assert copies["step"] == 4 and furthest(copies, collectives) == 0
