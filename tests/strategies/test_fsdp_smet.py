"""SMET on shards: masks, weights, ages and states are those of one process, whatever the number of ranks."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, Module
from sharded import Deep, Ranks, Wide, furthest, train, train_forge, whole
from torch import Tensor

import lightning_memopt as memopt

pytestmark = pytest.mark.filterwarnings("ignore:SMET. warmup_steps")
ROUTES = ["exchange", "reduce"]
# Three topology updates, at steps 6, 12 and 18 of 20.
OPTIONS: dict[str, Any] = {
    "density": 0.5, "update_every": 6, "warmup_steps": 3, "stop_at": None, "prune_schedule": "constant",
    "prune_fraction": 0.3,
}  # fmt: skip


class Watched(memopt.SMET):
    """Remembers masks after every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        self.seen.append(self.masks)


def says(trainer: pl.Trainer) -> dict[str, Any]:
    """What the callback shows, and what it logged."""
    callback = next(c for c in trainer.callbacks if isinstance(c, memopt.SMET))  # type: ignore[attr-defined]
    own = {name: len(layer.slot.state["smet_cohort"]) for name, layer in callback.layers.items()}
    return {
        "seen": getattr(callback, "seen", None),
        "masks": callback.masks,
        "ages": callback.ages,
        "memory": callback.memory(),
        "own": own,
        "states": {name: states_of(layer) for name, layer in callback.layers.items()},
        "logged": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


def states_of(layer: Any) -> dict[str, Any]:
    """A layer's state as on one device, in which values of all ranks follow one another."""
    from lightning_memopt.sparsity.shard import Shard

    state, shard = layer.slot.state, Shard.of(layer.slot.param)
    own = len(state["smet_cohort"])
    result = {}
    for key, value in state.items():
        if key in ("smet_mask", "smet_index"):
            continue
        if type(value) is Tensor and value.dim() and value.shape[-1] == own:
            parts = [value.view(-1)]
            if shard.group is not None:
                parts = [None] * len(shard.each(0))
                torch.distributed.all_gather_object(parts, value.view(-1), group=shard.group)
            value = torch.cat(parts)
        result[key] = whole(value) if isinstance(value, Tensor) else value
    return result


def sparse(run: Any, smet: dict[str, Any] | None = None, **options: Any) -> Any:
    """`run` (a function of tests/sharded.py, or ranks and one) with SMET."""
    return run(callbacks=[Watched(**(OPTIONS | (smet or {})))], inspect=says, **options)


def assert_same_topology(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Masks after every step, and ages at the end."""
    for mine, other in zip(a["seen"], b["seen"], strict=True):
        assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
    assert all(torch.equal(a["ages"][name], b["ages"][name]) for name in a["ages"])


def assert_equal(
    ranks: Ranks, make: Any = None, smet: dict[str, Any] | None = None, strategy: Any = None, **options: Any
) -> list[dict[str, Any]]:
    """One process and several: the same masks, and weights within 1e-5 after 20 steps."""
    make = make or partial(Module, net=Deep)
    single = sparse(partial(train_forge, make), smet, **options)
    results = sparse(partial(ranks, train, make, strategy), smet, **options)
    assert len(single["said"]["seen"]) == 20 * options.get("accumulate_grad_batches", 1)
    steps = pairwise(single["said"]["seen"])
    assert sum(not torch.equal(before[name], after[name]) for before, after in steps for name in before) >= 3
    for result in results:
        assert_same_topology(single["said"], result["said"])
        assert furthest(results[0], result) == 0
    assert furthest(single, results[0]) <= 1e-5
    for name, mask in single["said"]["masks"].items():
        assert not results[0]["weights"][name][~mask].any()
    return [single, *results]


# name -> (arguments of SMET, arguments of Trainer). 25 batches in windows of 3 end with a short window of 1.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "gradient": ({"growth": "gradient", "density": 0.3, "lr_scaling": "linear"}, {}),
    "clip_accumulate": ({}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3, "batches": 75}),
    "gradient_accumulate": ({"growth": "gradient"}, {"accumulate_grad_batches": 2, "batches": 50}),
    "blocks": ({"block_size": 7, "include": ["up", "bottleneck"], "growth": "gradient"}, {"gradient_clip_val": 0.1}),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(two: Ranks, setting: str, route: str) -> None:
    """Both ways of summing over ranks, through everything that changes what an update sees."""
    smet, options = SETTINGS[setting]
    assert_equal(two, smet=smet, strategy={"route": route}, **options)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("replicate", [1, 2])
def test_four_ranks(four: Ranks, route: str, replicate: int) -> None:
    """Rows 3, 7 and 17 over four ranks, with empty shards, and over two replicas of two."""
    strategy = {"route": route, "replicate": replicate}
    results = assert_equal(four, smet={"growth": "gradient"}, strategy=strategy, gradient_clip_val=0.1)
    if replicate == 1:
        assert [result["said"]["own"]["net.bottleneck.weight"] for result in results[1:]][-1] == 0


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in ("adamw", "sgd_maximize")])
def test_every_rule(two: Ranks, optimizer: str) -> None:
    """Every rule's state on shards."""
    assert_equal(two, partial(Module, net=Deep, optimizer=OPTIMIZERS[optimizer]))


EIGHT_BIT = {
    "adamw8bit": partial(memopt.AdamW8bit, lr=3e-3),
    "gefen": partial(memopt.Gefen, lr=3e-3),
    "gefen_table": partial(memopt.Gefen, lr=3e-3, codebook="table"),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("optimizer", EIGHT_BIT)
def test_eight_bit_states(two: Ranks, optimizer: str, route: str) -> None:
    """Blocks lie inside rows, so they are those of one process.

    A sum in another order tips a few codes, hence the tolerance: a thousandth of the largest possible distance. Weights
    that are nearly equal may then be pruned in another order.
    """
    make = partial(Module, net=Wide, optimizer=EIGHT_BIT[optimizer])
    options: dict[str, Any] = {"gradient_clip_val": 0.1}
    single = sparse(partial(train_forge, make), {"lr_scaling": "none"}, **options)
    sharded = sparse(partial(two, train, make, {"route": route}), {"lr_scaling": "none"}, **options)[0]
    same, total = 0, 0
    distances = []
    for name, weight in single["weights"].items():
        both = torch.ones_like(weight, dtype=torch.bool)
        if name in single["said"]["masks"]:
            mine, other = single["said"]["masks"][name], sharded["said"]["masks"][name]
            assert int(mine.sum()) == int(other.sum())
            same, total, both = same + int((mine == other).sum()), total + mine.numel(), mine == other
        distances.append((weight - sharded["weights"][name])[both])
    assert same / total > 0.999
    assert torch.cat(distances).square().mean().sqrt() < 1e-3 * 20 * 3e-3
    for name, state in single["states"].items():
        other = sharded["states"][name]
        assert state.keys() == other.keys()
        if "codebook" in state:
            torch.testing.assert_close(state["codebook"], other["codebook"], atol=1e-4, rtol=1e-4)
            assert state["exp_avg_scale"].shape == other["exp_avg_scale"].shape


# ------------------------------------------------------------------------------------------------- checkpoints
FORMATS = {"folder": {"save_distributed_checkpoint": True}, "file": {"save_distributed_checkpoint": False}}
# All steps see one batch: Lightning starts the data anew on resume. A topology update follows step 6.
SEVEN, THIRTEEN = {"batches": 1, "max_steps": 7}, {"batches": 1, "max_steps": 13}


def run(size: int, ranks: dict[int, Ranks], make: Any, strategy: Any = None, **options: Any) -> dict[str, Any]:
    """The first rank's account of a run over so many ranks; 0 stands for `forge`, in this process."""
    if not size:
        return sparse(partial(train_forge, make), **options)
    return sparse(partial(ranks[size], train, make, strategy), **options)[0]


def assert_resumes(
    ranks: dict[int, Ranks], path: Path, make: Any, before: int, after: int, form: str, strategy: Any = None,
    tipped: bool = False,
) -> None:  # fmt: skip
    """Masks, ages, weights and states after loading are the saved ones; training goes on as if uninterrupted.

    With 8-bit codes (`tipped`) the steps before the checkpoint, on another number of ranks, tip a few codes, and so the
    order in which weights that are nearly equal are pruned.
    """
    options: dict[str, Any] = {"make": make, "strategy": FORMATS[form] | (strategy or {})}
    saved = run(before, ranks, save=path, **options, **SEVEN)
    loaded = run(after, ranks, ckpt_path=path, **options, **SEVEN)
    assert furthest(saved, loaded) == 0 and loaded["step"] == 7
    for part in ("masks", "ages"):
        assert all(torch.equal(saved["said"][part][name], loaded["said"][part][name]) for name in saved["said"][part])
    for name, entries in saved["said"]["states"].items():
        for key, value in entries.items():
            other = loaded["said"]["states"][name][key]
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, (name, key)
    resumed = run(after, ranks, ckpt_path=path, **options, **THIRTEEN)
    uninterrupted = run(after, ranks, **options, **THIRTEEN)
    assert resumed["step"] == 13
    if tipped:
        pairs = [(w - uninterrupted["weights"][name]).abs().flatten() for name, w in resumed["weights"].items()]
        assert (torch.cat(pairs) > 1e-3).float().mean() < 1e-3
        return
    assert furthest(resumed, uninterrupted) <= (0 if before == after else 1e-6)
    assert_same_topology({**uninterrupted["said"], "seen": uninterrupted["said"]["seen"][7:]}, resumed["said"])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_reshard(one: Ranks, two: Ranks, before: int, after: int, form: str, tmp_path: Path) -> None:
    """Every state, to the last bit, on another number of ranks."""
    assert_resumes({1: one, 2: two}, tmp_path / "a.ckpt", partial(Module, net=Deep), before, after, form)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "gefen"])
@pytest.mark.parametrize(("before", "after", "form"), [(2, 1, "folder"), (2, 0, "file"), (0, 2, "file")])
def test_reshard_codes(
    one: Ranks, two: Ranks, optimizer: str, before: int, after: int, form: str, tmp_path: Path
) -> None:
    """Codes and what blocks share."""
    make = partial(Module, net=Wide, optimizer=EIGHT_BIT[optimizer])
    assert_resumes({1: one, 2: two}, tmp_path / "a.ckpt", make, before, after, form, tipped=True)


def test_four_to_two(two: Ranks, four: Ranks, tmp_path: Path) -> None:
    """Short and empty shards; and replicas to shards alone."""
    assert_resumes({2: two, 4: four}, tmp_path / "a.ckpt", partial(Module, net=Deep), 4, 2, "folder")


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2)])
def test_to_and_from_one_device(two: Ranks, before: int, after: int, tmp_path: Path) -> None:
    """A single file moves between `forge` and `forge_fsdp`."""
    assert_resumes({2: two}, tmp_path / "a.ckpt", partial(Module, net=Deep), before, after, "file")
