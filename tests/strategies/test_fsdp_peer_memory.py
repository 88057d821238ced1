"""Reading the other ranks' memory trains as collectives do; where it is impossible, collectives are used."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import Module
from sharded import Deep, Ranks, ShardsItself, Wide, assert_same_states, furthest, train

import lightning_memopt as memopt
from lightning_memopt.backward import windows
from lightning_memopt.backward.windows import ALIGNED, Window
from lightning_memopt.strategies import sharding

GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
ACCELERATORS = ["cpu", pytest.param("gpu", marks=GPUS)]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"gradient_clip_val": 0.1},
    "clip_accumulate": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
}
# Factors that arrive by collectives lie in memory in another way, for which a GPU's matmuls may sum in another order.
EQUAL = {"cpu": 0.0, "gpu": 1e-6}
COPIES, COLLECTIVES = {"peer_memory": True}, {"peer_memory": False}


class Copied(pl.Callback):
    """Notes how many units are gathered by copies, and how many there are."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        assert trainer.lightning_module is not None
        groups = sharding.groups(trainer.lightning_module)
        trainer.copied = sum("unshard" in vars(group) for group in groups), len(groups)  # type: ignore[attr-defined]


def copied(trainer: Any) -> tuple[int, int]:
    return trainer.copied


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("route", ["exchange", "reduce"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(two: Ranks, setting: str, route: str, accelerator: str) -> None:
    """With rows that the number of ranks does not divide."""
    options = SETTINGS[setting] | {"accelerator": accelerator, "callbacks": [Copied()], "inspect": copied}
    make = partial(Module, net=Deep)
    results = two(train, make, {"route": route} | COPIES, **options)
    collectives = two(train, make, {"route": route} | COLLECTIVES, **options)
    assert results[0]["said"] == (3, 3) and collectives[0]["said"] == (0, 3)
    assert furthest(results[0], results[1]) == 0
    assert furthest(results[0], collectives[0]) <= EQUAL[accelerator]


class Beside(pl.Callback):
    """Notes what updates expect beside them."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        updater: Any = trainer.strategy.updater  # type: ignore[attr-defined]
        trainer.beside = updater._build(next(iter(updater.slots.values()))).beside  # type: ignore[attr-defined]


def beside(trainer: Any) -> str:
    return trainer.beside


def test_updates_know_what_runs_beside_them(two: Ranks) -> None:
    """Barriers only where no unit is left to collectives, nothing on one device."""
    make, options = partial(Module, net=Deep), {"callbacks": [Beside()], "inspect": beside}
    assert two(train, make, COPIES, **options)[0]["said"] == "barriers"
    assert two(train, make, COLLECTIVES, **options)[0]["said"] == "collectives"


def test_replicas(four: Ranks) -> None:
    """Weights are gathered within a replica, factors sent to all ranks."""
    strategy = {"route": "exchange", "replicate": 2}
    results = four(train, partial(Module, net=Deep), strategy | COPIES)
    assert furthest(results[0], four(train, partial(Module, net=Deep), strategy | COLLECTIVES)[3]) == 0


class Halves(pl.Callback):
    """Changes and loads weights between steps."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 3:
            for param in module.parameters():
                param.mul_(0.5)
        if trainer.global_step == 5:
            module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_weights_that_change_between_steps(two: Ranks, accelerator: str) -> None:
    """Others read them as they are now."""
    options: dict[str, Any] = {"callbacks": [Halves(), Copied()], "inspect": copied, "accelerator": accelerator}
    results = two(train, partial(Module, net=Deep), COPIES, **options)
    assert results[0]["said"] == (3, 3)
    collectives = two(train, partial(Module, net=Deep), COLLECTIVES, **options)
    assert furthest(results[1], collectives[0]) <= EQUAL[accelerator]


def test_module_that_shards_itself(two: Ranks) -> None:
    """Its units are gathered in the same way."""
    make = partial(ShardsItself, net=Deep)
    results = two(train, make, COPIES, callbacks=[Copied()], inspect=copied)
    assert results[0]["said"] == (3, 3)
    assert furthest(results[0], two(train, make, COLLECTIVES)[0]) == 0


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_checkpoint(two: Ranks, tmp_path: Path, accelerator: str) -> None:
    """Saved by one way, resumed by the other."""
    make, path = partial(Module, net=Wide), tmp_path / "five.ckpt"
    five: dict[str, Any] = {"batches": 1, "max_steps": 5, "accelerator": accelerator}
    ten = five | {"max_steps": 10}
    saved = two(train, make, COPIES, save=path, **five)[0]
    for strategy in (COPIES, COLLECTIVES):
        assert_same_states(saved, two(train, make, strategy, ckpt_path=path, **five)[0])
    results = [two(train, make, strategy, ckpt_path=path, **ten)[0] for strategy in (COPIES, COLLECTIVES)]
    assert furthest(*results) <= EQUAL[accelerator]


def apart(strategy: dict[str, Any] | None) -> Any:
    """Train as if every rank had a host of its own."""
    plain, windows._host = windows._host, lambda: f"host {dist.get_rank()}"
    try:
        return train(partial(Module, net=Deep), strategy, callbacks=[Copied()], inspect=copied)
    finally:
        windows._host = plain


def test_several_hosts(two: Ranks) -> None:
    """Refused where asked for; by default collectives are used."""
    for error in two.attempt(apart, COPIES):
        assert isinstance(error, memopt.UnsupportedError) and "several hosts" in str(error)
    assert two(apart, None)[0]["said"] == (0, 3)


def left_behind(strategy: dict[str, Any]) -> int:
    """Windows after a run."""
    train(partial(Module, net=Deep), strategy | {"route": "exchange"}, max_steps=2)
    gc.collect()
    return len(windows._windows)


def test_windows_end_with_their_run(two: Ranks) -> None:
    """Nothing holds on to them."""
    assert two(left_behind, COPIES) == [0, 0]


@pytest.fixture
def doomed() -> Iterator[Ranks]:
    """Ranks whose devices are lost afterwards."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def come_late() -> str:
    """One rank does not come to a barrier."""
    device = torch.device("cuda", int(torch.distributed.get_node_local_rank()))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    assert dist.group.WORLD is not None
    window = Window(ALIGNED, dist.group.WORLD, device, timedelta(seconds=2))
    assert windows.held(device) == ALIGNED
    window.barrier()
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        window.barrier()
    torch.cuda.synchronize()
    return "passed"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_time_out(doomed: Ranks) -> None:
    """A device that waits for another one in vain ends with an error."""
    first, second = doomed.attempt(come_late)
    assert isinstance(first, RuntimeError) and second == "passed"
