"""Training sharded over processes equals training in one, on the same global batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import OPTIMIZERS, QUIET, Module, Net, next_token_loss
from sharded import (
    BATCH,
    Deep,
    Ranks,
    ShardsItself,
    Straight,
    Wide,
    data,
    furthest,
    threads_after,
    train,
    train_forge,
    train_plain,
)
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import lightning_memopt as memopt

ROUTES = ["exchange", "reduce"]


def assert_equal(
    ranks: Ranks, make: Any, tolerance: float = 1e-5, strategy: Any = None, inspect: Any = None, **options: Any
) -> list[Any]:
    """The sharded and the single run end in the same weights; all ranks agree on them to the last bit."""
    plain = train_plain(make, **options)
    results = ranks(train, make, strategy, inspect=inspect, **options)
    assert all(furthest(results[0], other) == 0 for other in results)
    assert furthest(plain, results[0]) <= tolerance
    assert plain["step"] == results[0]["step"]
    start = dict(make().named_parameters())
    assert all(not torch.equal(w, start[name].detach()) for name, w in plain["weights"].items())
    return results


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0, "lr": 1e-3},
    ]


def halving(step: int) -> float:
    return 1 / (1 + step)


# name -> (arguments of Module, arguments of Trainer). 25 batches in windows of 3 end with a short window of 1.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulate": ({}, {"accumulate_grad_batches": 3}),
    "clip_value": ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "clip_norm": ({}, {"gradient_clip_val": 0.1}),
    "clip_accumulate": ({}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}),
    "groups": ({"groups": two_groups, "schedule": partial(LambdaLR, lr_lambda=halving)}, {}),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(two: Ranks, setting: str, route: str) -> None:
    """Both ways of summing over ranks, through everything that changes what an update sees."""
    module_options, options = SETTINGS[setting]
    assert_equal(two, partial(Module, net=Deep, **module_options), strategy={"route": route}, **options)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("setting", ["plain", "clip_accumulate"])
@pytest.mark.parametrize("net", [Deep, Net])
def test_announced_ahead(two: Ranks, net: type[nn.Module], setting: str, route: str) -> None:
    """The order of things on GPUs: a layer is announced before the one before it is sent."""
    module_options, options = SETTINGS[setting]
    make = partial(Module, net=net, **module_options)
    plain = train_plain(make, **options)
    results = two(train, make, {"route": route}, ahead=True, **options)
    assert furthest(results[0], results[1]) == 0 and furthest(plain, results[0]) <= 1e-5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_rule(two: Ranks, optimizer: str) -> None:
    """Every rule on shards."""
    assert_equal(two, partial(Module, net=Deep, optimizer=OPTIMIZERS[optimizer]), max_steps=20)


EIGHT_BIT = {"adamw8bit": partial(memopt.AdamW8bit, lr=3e-3), "gefen": partial(memopt.Gefen, lr=3e-3)}


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("optimizer", EIGHT_BIT)
def test_eight_bit_states(two: Ranks, optimizer: str, route: str, options: dict[str, Any]) -> None:
    """Blocks lie inside rows, and what is learned from gradients is learned from all ranks'.

    A sum in another order tips a few codes, hence the tolerance: a thousandth of the largest possible distance.
    """
    make = partial(Module, net=Wide, optimizer=EIGHT_BIT[optimizer])
    single = train_forge(make, **options)
    sharded = two(train, make, {"route": route}, **options)[0]
    difference = torch.cat([(w - sharded["weights"][name]).flatten() for name, w in single["weights"].items()])
    assert difference.square().mean().sqrt() < 1e-3 * 20 * 3e-3
    for name, state in single["states"].items():
        other = sharded["states"][name]
        assert {key: value.shape for key, value in state.items()} == {key: value.shape for key, value in other.items()}
        if "codebook" in state:
            torch.testing.assert_close(state["codebook"], other["codebook"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("route", ROUTES)
def test_tied_and_reused(two: Ranks, route: str, options: dict[str, Any]) -> None:
    """Layers used twice, and a head that shares the embedding's weight: factors and FSDP2's average in one update."""
    assert_equal(two, Module, strategy={"route": route}, **options)


class Twice(Deep):
    """The same blocks run twice."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(torch.tanh(self.bottleneck(x + self.mix(x.transpose(1, 2)).transpose(1, 2))))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("checkpoint", [(), ("*.blocks.*",)])
def test_block_used_twice(two: Ranks, reshard: bool, checkpoint: tuple[str, ...]) -> None:
    """FSDP2 gathers and reduces a block at each use; its linear layers are updated once."""
    strategy = {"reshard_after_forward": reshard, "checkpoint": checkpoint}
    assert_equal(two, partial(Module, net=Twice), strategy=strategy)


@pytest.mark.parametrize("wrap", [["Block"], ["Conv1d", "Block"], "auto"])
def test_wrap(two: Ranks, wrap: Any) -> None:
    """By class or by repetition: the same training."""
    results = two(train, strategy={"wrap": wrap}, inspect=units)
    blocks = ["net.blocks.0", "net.blocks.1"]
    assert results[0]["said"] == ["", *blocks, *(["net.mix"] if "Conv1d" in wrap else [])]
    assert furthest(train_plain(), results[0]) <= 1e-5


class Listed(nn.Module):
    """Blocks that are lists (or dicts) of layers, which have no forward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 7), nn.Linear(7, 11)
        blocks = [[nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.LayerNorm(7)] for _ in range(3)]
        if kind == "list":
            self.blocks = nn.ModuleList(nn.ModuleList(parts) for parts in blocks)
        else:
            self.blocks = nn.ModuleList(nn.ModuleDict(dict(zip("ab", parts, strict=True))) for parts in blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            layer, norm = block.values() if isinstance(block, nn.ModuleDict) else block
            x = norm(x + layer(x))
        return self.head(x)


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_blocks_without_forward(two: Ranks, kind: str) -> None:
    """What they hold is sharded in their place."""
    assert_equal(two, partial(Module, net=partial(Listed, kind)))


def units(trainer: Any) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    return [name for name, part in trainer.lightning_module.named_modules() if isinstance(part, FSDPModule)]


@pytest.mark.parametrize("route", ROUTES)
def test_four_ranks(four: Ranks, route: str) -> None:
    """Rows 3, 7, 11 and 17 over four ranks: short and empty shards."""
    assert_equal(four, partial(Module, net=Deep), strategy={"route": route}, gradient_clip_val=0.1)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}])
def test_replicas(four: Ranks, route: str, options: dict[str, Any]) -> None:
    """Two replicas of two shards each."""
    assert_equal(four, partial(Module, net=Deep), strategy={"route": route, "replicate": 2}, **options)


def uneven_loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
    """Each sample's tokens up to its first id: any number, also none in a sample."""
    ids, targets = batch
    rank = int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else None
    parts = ids.chunk(2) if rank is None else (ids,)
    goals = targets.chunk(2) if rank is None else (targets,)
    losses = []
    for i, (part, goal) in enumerate(zip(parts, goals, strict=True)):
        length = (2, 5)[i if rank is None else rank]
        losses.append(next_token_loss(net, [part[:, :length], goal[:, :length]]))
    return torch.stack(losses).mean()


class Interleaved(Module):
    """In one process: even samples are rank 0's, odd ones rank 1's, as the sampler deals them out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not torch.distributed.is_initialized():
            order = [*range(0, BATCH, 2), *range(1, BATCH, 2)]
            batch = [part[order] for part in batch]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("route", ROUTES)
def test_uneven_tokens(two: Ranks, route: str) -> None:
    """Rank 0 has 4 tokens, rank 1 has 10: the mean over ranks of their means, as FSDP2 takes it."""
    make = partial(Interleaved, net=Straight, loss=uneven_loss)
    assert_equal(two, make, strategy={"route": route})


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum", "lion"])
def test_bf16_true(one: Ranks, two: Ranks, optimizer: str) -> None:
    """Stochastic rounding depends on global indices only, so that one and two processes nearly always agree.

    Sums over ranks have another order, which tips a few roundings; FSDP2 reduces the other parameters in bf16.
    """
    make = partial(Module, net=Deep, optimizer=OPTIMIZERS[optimizer])
    options = {"precision": "bf16-true", "max_steps": 4}
    strategy = {"rounding": "stochastic"}
    single = one(train, make, strategy, **options)[0]
    double = two(train, make, strategy, **options)[0]
    same = total = 0
    for name, weight in single["weights"].items():
        if weight.ndim == 2 and "embedding" not in name:
            same += int((weight == double["weights"][name]).sum())
            total += weight.numel()
    assert same / total > 0.8


def test_bf16_mixed(two: Ranks) -> None:
    """Float32 weights under autocast, within what bf16 activations allow."""
    options = {"precision": "bf16-mixed"}
    plain = train_plain(**options)
    sharded = two(train, **options)[0]
    start = dict(Module(net=Deep).named_parameters())
    for name, weight in plain["weights"].items():
        moved = (weight - start[name].detach()).norm()
        assert (weight - sharded["weights"][name]).norm() <= 0.05 * moved, name


class Everywhere(Module):
    """Uses weights of the root outside of any forward pass, and calls itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        penalty = self.net.bottleneck.weight.square().mean()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) + penalty

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.net, batch))


def test_step_uses_root_weights(two: Ranks) -> None:
    """The training step may use what it likes of the module that is not inside a block."""
    assert_equal(two, partial(Everywhere, net=Deep))


class Frozen(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.head.weight.requires_grad_(False)


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def test_frozen_parameters(two: Ranks) -> None:
    """They stay as they are, in blocks that are frozen as a whole or in part."""
    make = partial(Module, net=Frozen, groups=trained)
    plain, sharded = train_plain(make), two(train, make)[0]
    assert furthest(plain, sharded) <= 1e-5
    start = make().state_dict()
    assert torch.equal(start["net.head.weight"], sharded["weights"]["net.head.weight"])
    assert torch.equal(start["net.blocks.0.up.weight"], sharded["weights"]["net.blocks.0.up.weight"])


class BuiltBefore(Module):
    """Its optimizer holds the parameters of before sharding, as the command line's does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.early = AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)
        self.originals = list(self.parameters())

    def configure_optimizers(self) -> Any:
        return self.early


def test_optimizer_built_before_sharding(two: Ranks) -> None:
    """It is handed the sharded parameters by name; those of before take no memory any more."""
    results = assert_equal(two, partial(BuiltBefore, net=Deep), inspect=kept_elements)
    assert results[0]["said"] == 0


def kept_elements(trainer: Any) -> int:
    return sum(param.numel() for param in trainer.lightning_module.originals)


class Meta(Module):
    """Built without memory in configure_model."""

    def configure_model(self) -> None:
        if next(self.net.parameters()).is_meta:
            return
        with torch.device("meta"):
            self.net = Deep()


def test_meta_device(two: Ranks) -> None:
    """Parameters are created shard by shard, by each module's reset_parameters."""
    results = two(train, partial(Meta, net=Deep), max_steps=2)
    assert furthest(results[0], results[1]) == 0
    assert all(torch.isfinite(w).all() for w in results[0]["weights"].values())
    assert results[0]["weights"]["net.head.weight"].std() > 0.1


class ShardsHalf(ShardsItself):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net.blocks[0], mesh=self.device_mesh["data_parallel"])


def test_module_that_shards_itself(two: Ranks) -> None:
    """It is left as it is; a parameter that it left out is refused."""
    assert_equal(two, partial(ShardsItself, net=Deep))
    for error in two.attempt(train, partial(ShardsHalf, net=Deep)):
        assert isinstance(error, memopt.UnsupportedError) and "net.embedding.weight is trained but not" in str(error)


class Manual(Module):
    """Two optimizers, two fused steps per batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.other = Deep()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            with memopt.fused_step(optimizer):
                self.manual_backward(self.loss(net, batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [AdamW(self.net.parameters(), lr=3e-3), AdamW(self.other.parameters(), lr=1e-3)]


def test_manual_optimization(two: Ranks) -> None:
    """Each child module is sharded on its own."""
    assert_equal(two, partial(Manual, net=Deep), max_steps=16)


def test_alias_and_single_device(one: Ranks) -> None:
    """``devices=1`` needs no other process; the name is registered."""
    plain = train_plain()
    assert furthest(plain, one(train)[0]) <= 1e-5
    assert furthest(plain, one(train, gradient_clip_val=100.0)[0]) <= 1e-5
    from lightning.pytorch.strategies import StrategyRegistry

    assert isinstance(StrategyRegistry.get("forge_fsdp"), memopt.ForgeFSDPStrategy)


def test_net_is_the_harness_one() -> None:
    """`Module`'s default network has tied and reused layers; `test_tied_and_reused` relies on it."""
    net = Net()
    assert net.head.weight is net.embedding.weight


class Evaluates(Module):
    """Validation, test and prediction on the root's and the blocks' weights."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(self.net, batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def every_stage() -> dict[str, Any]:
    """Validate before any fit, fit twice with validation in between, test and predict after."""
    import lightning.pytorch as pl

    trained, losses = Evaluates(net=Deep), []
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    for steps in (2, 4):
        strategy = memopt.ForgeFSDPStrategy(rounding="nearest") if size > 1 else "auto"
        trainer = pl.Trainer(
            strategy=strategy, **(QUIET | {"devices": size, "max_steps": steps, "val_check_interval": 2})
        )
        losses.append(trainer.validate(trained, data(size), verbose=False)[0]["loss"])
        trainer.fit(trained, data(size), data(size))
        losses.append(trainer.test(trained, data(size), verbose=False)[0]["loss"])
    outputs = trainer.predict(trained, data(size))
    assert outputs is not None
    return {"losses": losses, "finite": all(bool(torch.isfinite(out).all()) for out in outputs)}


def test_every_stage(two: Ranks) -> None:
    """The module stays sharded from one stage to the next, and each sees the weights of the one before."""
    two(train, max_steps=1)  # joins the ranks
    results = two(every_stage)
    assert all(result["finite"] for result in results)
    assert results[0]["losses"] == pytest.approx(every_stage()["losses"], abs=1e-5)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted on Linux")
def test_runs_leave_no_threads(two: Ranks) -> None:
    """The groups of one run serve the next."""
    for first, second, third in two(threads_after, 3):
        assert first == second == third
