"""Modules that do something unusual with their step, and still train as plainly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import OPTIMIZERS, Module, assert_equal_runs, fit, square_loss, tokens, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


def two_layers(size: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size))


class BackwardOfAnotherTensor(Module):
    """The tensor that `backward` is called on is not the loss that `training_step` returned."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.own = square_loss(self.net, batch)
        return self.own * 1.0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.own.backward()


class BackwardInThread(Module):
    """The backward pass runs in a thread of the user's."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()


class TwoLosses(Module):
    """An overridden `backward` runs two passes that share no weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.second = self.net[2](batch[0]).square().mean()
        return self.net[0](batch[0]).square().mean()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        self.second.backward()


class RetainsGraph(Module):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


class LateLayer(Module):
    """A layer that joins module and optimizer after set-up."""

    def on_train_start(self) -> None:
        torch.manual_seed(5)
        self.late = nn.Linear(8, 8)
        self.trainer.optimizers[0].add_param_group({"params": self.late.parameters()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.late(self.net(batch[0])).square().mean()


class SwapsData(Module):
    """Weights whose storage is replaced when training starts."""

    def on_train_start(self) -> None:
        self.net[0].weight.data = torch.full((8, 8), 0.1)


class Lazy(Module):
    """Layers that learn their size from the first input."""

    def __init__(self, *_: Any, **options: Any) -> None:
        super().__init__(lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4)), **options)
        torch.manual_seed(0)
        self.net(torch.ones(2, 8))


class Alternates(Module):
    """Every other step uses the second layer only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net[2](batch[0] if batch_idx % 2 else self.net[0](batch[0])).square().mean()


class SwitchesModes(Module):
    """Dropout, with an evaluation pass inside the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net.eval()
        with torch.inference_mode():
            target = float(self.net(batch[0]).mean())
        self.net.train()
        torch.manual_seed(batch_idx)
        return (nn.functional.dropout(self.net(batch[0]), 0.5) - target).square().mean()


MODULES: list[type[Module]] = [
    BackwardOfAnotherTensor,
    BackwardInThread,
    TwoLosses,
    RetainsGraph,
    LateLayer,
    SwapsData,
    Lazy,
    Alternates,
    SwitchesModes,
]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}], ids=str)
@pytest.mark.parametrize("module", MODULES)
def test_modules(module: Callable[..., pl.LightningModule], options: dict[str, Any]) -> None:
    """Same weights after six steps, also with accumulation and norm clipping."""
    plain = fit(module(two_layers, loss=square_loss), "auto", vectors(), max_steps=6, **options)
    fused = fit(module(two_layers, loss=square_loss), "forge", vectors(), max_steps=6, **options)
    torch.testing.assert_close(fused.weights, plain.weights, rtol=0, atol=1e-6)
    start = module(two_layers, loss=square_loss).state_dict()
    assert not torch.equal(start["net.2.weight"], fused.weights["net.2.weight"])


# ---------------------------------------------------------------- embeddings

EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "plain": partial(nn.Embedding, 11, 8),
    "padding": partial(nn.Embedding, 11, 8, padding_idx=3),
    "scale_by_frequency": partial(nn.Embedding, 11, 8, scale_grad_by_freq=True),
    "max_norm": partial(nn.Embedding, 11, 8, max_norm=1.0),
    "bag": partial(nn.EmbeddingBag, 11, 8),
    "unused_rows": partial(nn.Embedding, 500, 8),
}


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.05}], ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd_nesterov", "adagrad"])
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_embeddings(embedding: str, optimizer: str, options: dict[str, Any]) -> None:
    """Every kind of table, rows that no token used included: they decay and their moments fade as in torch."""

    def loss(net: Any, batch: list[Tensor]) -> Tensor:
        return (net(batch[0]) - 0.1).square().mean()

    def net() -> nn.Module:
        table = EMBEDDINGS[embedding]()
        nn.init.normal_(table.weight, std=0.3)  # type: ignore[arg-type]
        return nn.Sequential(table, nn.Linear(8, 3))

    assert_equal_runs(partial(Module, net, OPTIMIZERS[optimizer], loss), data=tokens, max_steps=6, **options)


# ---------------------------------------------------------------- queued micro-batches


def wide_data() -> DataLoader[Any]:
    """Few tokens for wide layers, so that factors of earlier micro-batches are queued rather than summed."""
    return vectors(64, batch_size=2)


def test_validation_between_micro_batches() -> None:
    """Other passes between the micro-batches of a window leave the queue alone."""

    class Validates(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", square_loss(self.net, batch))

        def val_dataloader(self) -> DataLoader[Any]:
            return wide_data()

    make = partial(Validates, partial(two_layers, 64), loss=square_loss)
    options = {"accumulate_grad_batches": 4, "val_check_interval": 3, "limit_val_batches": 1}
    assert_equal_runs(make, data=wide_data, max_steps=5, **options)


def test_gradient_penalty_in_micro_batches() -> None:
    """Second derivatives in every micro-batch of a window."""

    def loss(net: Any, batch: list[Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (dx,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
        return dx.square().mean() + square_loss(net, batch)

    make = partial(Module, partial(two_layers, 64), loss=loss)
    assert_equal_runs(make, data=wide_data, max_steps=5, accumulate_grad_batches=3)


class Shifted(nn.Module):
    """A parameter that is added to a layer's output through a view, so that its gradient is a view of the layer's."""

    def __init__(self, lookup: bool) -> None:
        super().__init__()
        self.lookup, self.shift = lookup, nn.Parameter(torch.zeros(2, 64))
        self.first, self.last = (nn.Embedding(9, 64) if lookup else nn.Linear(64, 64)), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :2].abs().mul(2).long().clamp(max=8) if self.lookup else x.view(1, 2, 64)
        return self.last(torch.tanh(self.first(x) + self.shift[None]))


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}], ids=["plain", "clipped"])
@pytest.mark.parametrize("lookup", [False, True], ids=["linear", "embedding"])
def test_a_gradient_that_is_a_view_of_a_queued_one(lookup: bool, options: dict[str, Any]) -> None:
    """Autograd adds later micro-batches to it in place, which must not reach what is queued."""
    data = partial(vectors, 64, batch_size=1) if lookup else wide_data
    make = partial(Module, partial(Shifted, lookup), partial(torch.optim.SGD, lr=0.5), square_loss)
    assert_equal_runs(make, data=data, max_steps=4, accumulate_grad_batches=4, **options)


class ShiftedTwice(nn.Module):
    """The same in two segments of reentrant checkpointing, each with a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.shift = nn.Linear(64, 64), nn.Linear(64, 64), nn.Parameter(torch.zeros(128))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in (self.first, self.last):
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x) + self.shift.view(2, 64)), x, use_reentrant=True)
        return x


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_a_gradient_that_is_a_view_in_two_segments(options: dict[str, Any]) -> None:
    make = partial(Module, ShiftedTwice, partial(torch.optim.SGD, lr=0.5), square_loss)
    assert_equal_runs(make, data=wide_data, max_steps=4, **options)


class ZeroesInHook(Module):
    """Drops what a window has gathered so far, after its second micro-batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 2:
            self.optimizers().zero_grad()


def test_zeroed_in_the_middle_of_a_window() -> None:
    """Gradients that a hook zeroes between micro-batches are gone, queued ones too."""
    make = partial(ZeroesInHook, partial(two_layers, 64), loss=square_loss)
    assert_equal_runs(make, data=wide_data, max_steps=4, accumulate_grad_batches=4)


class ReusesMemory(Module):
    """Each batch is written into the same memory, as loaders with a ring buffer of one do."""

    def __init__(self, seen_by_torch: bool) -> None:
        super().__init__(partial(two_layers, 64), loss=square_loss)
        self.memory = np.zeros((2, 64), dtype=np.float32)
        self.batch, self.seen_by_torch = torch.from_numpy(self.memory), seen_by_torch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.seen_by_torch:
            self.batch.copy_(batch[0])
        else:
            self.memory[:] = batch[0].numpy()
        return square_loss(self.net, [self.batch])


@pytest.mark.parametrize(("seen_by_torch", "accumulate"), [(True, 1), (True, 3), (False, 1), (False, 3)])
def test_reused_input_memory(seen_by_torch: bool, accumulate: int) -> None:
    """A batch that is overwritten after its backward pass, seen by torch or not."""
    make = partial(ReusesMemory, seen_by_torch)
    assert_equal_runs(make, data=wide_data, max_steps=4, accumulate_grad_batches=accumulate)
