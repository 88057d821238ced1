"""What goes wrong on one rank ends all of them, with one message and without a hang."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import Module
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from sharded import Deep, Ranks, Straight, furthest, train, train_told
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import lightning_memopt as memopt
from lightning_memopt.compat import CASES

DEEP = partial(Module, net=Deep)


def rank() -> int:
    return torch.distributed.get_rank()


class BadBatch(Module):
    """Not-a-number in batch 3, on rank 1 only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 3 and rank() == 1 else loss


def skipped(trainer: Any) -> tuple[float, set[float]]:
    count = float(trainer.callback_metrics["skipped_updates"])
    return count, {float(state["step"]) for state in trainer.optimizers[0].state.values()}


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}])
@pytest.mark.parametrize("route", ["exchange", "reduce"])
def test_nonfinite_is_skipped_by_all(two: Ranks, route: str, options: dict[str, Any]) -> None:
    """One rank's bad batch: no rank updates anything at that step, and all count the same."""
    strategy = {"nonfinite": "skip", "route": route}
    before = two(train, partial(BadBatch, net=Deep), strategy, max_steps=3, **options)
    after = two(train, partial(BadBatch, net=Deep), strategy, max_steps=4, inspect=skipped, **options)
    assert furthest(before[0], after[0]) == 0
    assert after[0]["said"] == after[1]["said"]
    count, steps = after[0]["said"]
    assert count == len(after[0]["weights"]) and steps == {3.0}


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}])
def test_nonfinite_is_raised_by_all(two: Ranks, options: dict[str, Any]) -> None:
    """The same error on the rank that had the bad batch and on the other."""
    errors = two.attempt(train, partial(BadBatch, net=Deep), **options)
    assert all(isinstance(error, memopt.NonFiniteError) for error in errors)
    assert str(errors[0]) == str(errors[1]) and "step 3" in str(errors[0])


class BadColumn(torch.autograd.Function):
    """The identity; its backward pass makes the last column's gradient not-a-number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dy = dy.clone()
        dy[..., -1] = float("nan")
        return dy


class BadRow(Module):
    """In batch 3 the last row of the head, which the last rank holds, has a bad gradient; nothing else has one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.net.embedding(batch[0])
        y = self.net.head(x.detach())
        y = BadColumn.apply(y) if batch_idx == 3 else y
        return y.square().mean() + (0.0 if batch_idx == 3 else x.square().mean())


def heads(strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The head and its step count on this rank, on the CPU."""

    def head(trainer: Any) -> tuple[Tensor, float]:
        weight = trainer.lightning_module.net.head.weight
        return weight.to_local().detach().cpu().clone(), float(trainer.optimizers[0].state[weight]["step"])

    weight, step = train(partial(BadRow, net=Straight), strategy, inspect=head, **options)["said"]
    return {"weight": weight, "step": step}


GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=GPUS)])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "max_epochs": 1}])
@pytest.mark.parametrize("route", ["exchange", "reduce"])
def test_a_bad_row_is_left_out_by_the_ranks_that_do_not_hold_it(
    two: Ranks, route: str, options: dict[str, Any], accelerator: str
) -> None:
    """In plain torch, on any device, an update is left out as a whole."""
    strategy = {"nonfinite": "skip", "route": route, "kernel": "reference"}
    steps = 2 if options else 4
    for now, before in zip(
        two(heads, strategy, max_steps=steps, accelerator=accelerator, **options),
        two(heads, strategy, max_steps=steps - 1, accelerator=accelerator, **options),
        strict=True,
    ):
        assert torch.equal(now["weight"], before["weight"]) and now["step"] == before["step"] == steps - 1


class Raises(torch.autograd.Function):
    """Fails in backward, on rank 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        if rank() == 1:
            raise ArithmeticError("the sky fell")
        return dy


class FailsInBackward(Straight):
    """Between two layers of one block, where the other rank waits for the next announcement."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(Raises.apply(x))


class OtherPath(nn.Module):
    """Rank 0 skips a layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.a, self.b = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
        self.head = nn.Linear(7, 11)

    def forward(self, ids: Tensor) -> Tensor:
        layer = self.a if rank() else self.b
        return self.head(layer(self.embedding(ids)))


@pytest.mark.parametrize(
    ("net", "words", "route"),
    [
        (FailsInBackward, "rank 1 failed: ArithmeticError: the sky fell", "exchange"),
        (OtherPath, "rank 0 has net.b.weight, rank 1 has net.a.weight", "exchange"),
        (OtherPath, "rank 0 has net.b.weight, rank 1 has net.a.weight", "reduce"),
    ],
)
@pytest.mark.parametrize("peer_memory", [False, True])
def test_all_ranks_end(net: type[nn.Module], words: str, route: str, peer_memory: bool) -> None:
    """An error in the middle of one rank's backward pass, or another path through the model."""
    assert any(case.feature == "ranks that run different layers" for case in CASES)
    doomed = Ranks(2)
    try:
        strategy = {"route": route, "peer_memory": peer_memory, "timeout_seconds": 8}
        errors = doomed.attempt(train, partial(Module, net=net), strategy)
    finally:
        doomed.stop()
    assert isinstance(errors[0], memopt.UpdateError) and words in str(errors[0])
    assert isinstance(errors[1], (ArithmeticError, memopt.UpdateError)) and str(errors[1]) in str(errors[0])


class OtherNorm(nn.Module):
    """Ranks use the same layers but other norms, or one of them uses none."""

    def __init__(self, none: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 7), nn.Linear(7, 11)
        self.a, self.b, self.none = nn.LayerNorm(7), nn.LayerNorm(7), none

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if rank():
            return self.head(self.a(x))
        return self.head(x if self.none else self.b(x))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("none", [False, True])
def test_ranks_with_other_norms_end(two: Ranks, none: bool, later: bool) -> None:
    """Before gradients of one are added to those of the other, also where kernels tell later what they left out."""
    make = partial(Module, net=partial(OtherNorm, none), optimizer=partial(SGD, lr=0.1))
    errors = two.attempt(train_told, later, make, max_steps=3)
    assert all(isinstance(error, memopt.UpdateError) for error in errors)
    assert "no gradient of net.a.weight" in str(errors[0]) and str(errors[0]) == str(errors[1])


class Shared(nn.Module):
    """A weight in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
        self.blocks[0][0].weight = self.blocks[1][0].weight


class SharedWithRoot(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(7, 7)
        self.head.weight = self.blocks[1][0].weight


class With(nn.Module):
    """A layer and a parameter of this shape; contrastive models, say, have a scalar."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.head, self.own = nn.Linear(7, 7), nn.Parameter(torch.ones(shape))


class OwnParameter(Module):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(1))


class Offloads(Module):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"], offload_policy=CPUOffloadPolicy(pin_memory=False))


class Stranger(Module):
    def configure_optimizers(self) -> Any:
        return AdamW([nn.Parameter(torch.ones(4, 4))])


# feature -> (module, strategy, Trainer options)
REFUSED: dict[str, tuple[Any, dict[str, Any] | str, dict[str, Any]]] = {
    "weight shared between sharded blocks": (partial(Module, net=SharedWithRoot), {}, {}),
    "scalar parameters, sharded": (partial(Module, net=With), {}, {}),
    "parameters without elements, sharded": (partial(Module, net=partial(With, 0, 7)), {}, {}),
    "precision 64-true, sharded": (DEEP, "forge_fsdp", {"precision": "64-true"}),
    "precision 16-true": (DEEP, {}, {"precision": "16-true"}),
    "weight averaging callbacks, sharded": (DEEP, {}, {"callbacks": [WeightAveraging()]}),
    "CPU offload": (partial(Offloads, net=Deep), {}, {}),
    "parameters of the LightningModule itself in manual optimization": (partial(OwnParameter, net=Deep), {}, {}),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_refused(two: Ranks, feature: str) -> None:
    """All ranks say what the table says."""
    make, strategy, options = REFUSED[feature]
    message = next(case.message for case in CASES if case.feature == feature)
    for error in two.attempt(train, make, strategy, **options):
        assert message in str(error)
        assert isinstance(error, memopt.UnsupportedError)


def test_stochastic_averages_are_refused(one: Ranks) -> None:
    """As those of the row's other callbacks."""
    (error,) = one.attempt(train, DEEP, callbacks=[StochasticWeightAveraging(0.1)])
    assert isinstance(error, memopt.UnsupportedError) and "StochasticWeightAveraging: Lightning's averages" in str(
        error
    )


@pytest.mark.parametrize(
    ("make", "strategy", "words"),
    [
        (partial(Module, net=Shared), {}, "net.blocks.0.0.weight"),
        (DEEP, {"wrap": ["Blok"]}, "no Blok. Modules with parts are: Block"),
        (DEEP, {"replicate": 3}, "does not divide the 2 devices"),
        (DEEP, {"route": "detour"}, "not one of 'auto', 'exchange', 'reduce'"),
        (partial(Stranger, net=Deep), {}, "not in the module"),
    ],
)
def test_mistakes(two: Ranks, make: Any, strategy: dict[str, Any], words: str) -> None:
    """What cannot work is refused before the first step."""
    for error in two.attempt(train, make, strategy):
        assert isinstance(error, ValueError) and words in str(error), error
