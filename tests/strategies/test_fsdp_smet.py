"""SMET on shards: masks, weights, ages and states are those of one process, whatever the number of ranks."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, QUIET, Module, next_token_loss
from sharded import Deep, Ranks, Wide, data, furthest, train, train_forge, whole
from torch import Tensor, nn
from torch.optim import AdamW

import lightning_memopt as memopt
from lightning_memopt.kernels.active import Largest
from lightning_memopt.sparsity.bits import unpack
from lightning_memopt.sparsity.checkpoint import masks_of
from lightning_memopt.sparsity.shard import Shard
from lightning_memopt.sparsity.topology import Runs, exchange, random_mask

pytestmark = pytest.mark.filterwarnings("ignore:SMET. warmup_steps")
ROUTES = ["exchange", "reduce"]
# Two topology updates, at steps 6 and 12 of 13.
OPTIONS: dict[str, Any] = {
    "density": 0.5, "update_every": 6, "warmup_steps": 3, "stop_at": None, "prune_schedule": "constant",
    "prune_fraction": 0.3,
}  # fmt: skip


class Watched(memopt.SMET):
    """Remembers masks after each topology update and half-way between; gathering them takes longer than a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        step, before = args[0].global_step, self._step
        super().on_train_batch_end(*args, **kwargs)
        if step != before and step % 3 == 0:
            self.seen.append(self.masks)


def says(trainer: pl.Trainer) -> dict[str, Any]:
    """What the callback shows, and what it logged."""
    callback = next(c for c in trainer.callbacks if isinstance(c, memopt.SMET))  # type: ignore[attr-defined]
    own = {name: layer.own for name, layer in callback.layers.items()}
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
    return run(callbacks=[Watched(**(OPTIONS | (smet or {})))], inspect=says, **({"max_steps": 13} | options))


def assert_same_topology(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Masks after every step, and ages at the end."""
    for mine, other in zip(a["seen"], b["seen"], strict=True):
        assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
    assert all(torch.equal(a["ages"][name], b["ages"][name]) for name in a["ages"])


def assert_equal(
    ranks: Ranks, make: Any = None, smet: dict[str, Any] | None = None, strategy: Any = None, **options: Any
) -> list[dict[str, Any]]:
    """One process and several: the same masks, and weights within 1e-5 at the end."""
    make = make or partial(Module, net=Deep)
    single = sparse(partial(train_forge, make), smet, **options)
    results = sparse(partial(ranks, train, make, strategy), smet, **options)
    assert len(single["said"]["seen"]) == 4
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
    "gradient_blocks": (
        {"growth": "gradient", "block_size": 7, "include": ["up", "bottleneck"]},
        {"accumulate_grad_batches": 2, "batches": 50},
    ),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(two: Ranks, setting: str, route: str) -> None:
    """Both ways of summing over ranks, through everything that changes what an update sees."""
    smet, options = SETTINGS[setting]
    assert_equal(two, smet=smet, strategy={"route": route}, **options)


def with_penalty(net: nn.Module, batch: list[Tensor]) -> Tensor:
    """A sparse weight has a gradient beside that of its layer."""
    return next_token_loss(net, batch) + net.bottleneck.weight.square().mean()


def test_gradient_of_autograd(two: Ranks) -> None:
    """What FSDP2 averages joins what is summed here."""
    make = partial(Module, net=Deep, loss=with_penalty)
    assert_equal(two, make, smet={"growth": "gradient"}, gradient_clip_val=0.1)


def test_what_is_shown(two: Ranks) -> None:
    """Logs are those of one process, bytes those of the rank's rows."""
    single, *results = assert_equal(two)
    for result in results:
        assert result["said"]["logged"].keys() == single["said"]["logged"].keys()
        for name, value in single["said"]["logged"].items():
            assert result["said"]["logged"][name] == pytest.approx(value, abs=1e-5), name
        said = result["said"]
        assert said["memory"]["moments"] == 8 * sum(said["own"].values())  # two of float32
        assert said["memory"]["ages"] == sum(said["own"].values())
    for part in ("weight", "moments", "ages"):
        assert sum(result["said"]["memory"][part] for result in results) == single["said"]["memory"][part]
    # Tiny layers round up to whole bytes and segments.
    assert all(result["said"]["memory"]["mask"] < single["said"]["memory"]["mask"] for result in results)


class ClearsStates(pl.Callback):
    """Clears the optimizer's state after two steps, of which a topology update follows the first."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in (6, 9):
            trainer.optimizers[0].state.clear()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum"])
def test_a_cleared_state_begins_anew(two: Ranks, optimizer: str) -> None:
    """With the mask of the run, on all ranks."""
    make = partial(Module, net=Deep, optimizer=OPTIMIZERS[optimizer])
    single = train_forge(make, callbacks=[ClearsStates(), Watched(**OPTIONS)], inspect=says)
    results = two(train, make, callbacks=[ClearsStates(), Watched(**OPTIONS)], inspect=says)
    assert_same_topology(single["said"], results[0]["said"])
    assert furthest(*results) == 0 and furthest(single, results[0]) <= 1e-5
    assert max(int(age.max()) for age in results[0]["said"]["ages"].values()) == 3


def fit_twice() -> list[dict[str, Tensor]]:
    """Masks at the end of a fit, at the start and the end of another of the same module and callback."""
    module, callback = Module(net=Deep), memopt.SMET(**OPTIONS)
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    seen = []

    class Start(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append(callback.masks)

    for _ in range(2):
        made = memopt.ForgeFSDPStrategy if size > 1 else memopt.ForgeStrategy
        trainer = pl.Trainer(strategy=made(rounding="nearest"), callbacks=[callback, Start()],
                             **(QUIET | {"devices": size, "max_steps": 8}))  # fmt: skip
        trainer.fit(module, data(size))
        seen.append(callback.masks)
    return seen[1:]


def test_a_second_fit_keeps_the_topology(two: Ranks) -> None:
    """As on one device."""
    two(train, max_steps=1)  # joins the ranks
    single, (sharded, _) = fit_twice(), two(fit_twice)
    assert all(torch.equal(sharded[0][name], sharded[1][name]) for name in sharded[0])
    for mine, other in zip(single, sharded, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def spoiled(net: nn.Module, batch: list[Tensor]) -> Tensor:
    """An infinite gradient of the bottleneck in rank 0's share of a few batches."""
    loss = next_token_loss(net, batch)
    bad = bool((batch[0][0, 0] == 3) & (torch.distributed.get_rank() == 0))
    return loss + (net.bottleneck.weight.sum() * (torch.inf if bad else 0.0)).nan_to_num(0.0)


def test_non_finite_gradients_are_left_out_everywhere(two: Ranks) -> None:
    """All ranks skip the same updates and go on with equal masks and ages."""
    make = partial(Module, net=Deep, loss=spoiled)
    results = sparse(partial(two, train, make, {"nonfinite": "skip"}))
    assert furthest(*results) == 0
    assert_same_topology(*(result["said"] for result in results))
    skipped = results[0]["said"]["logged"]["skipped_updates"]
    assert skipped > 0 and results[0]["states"]["net.bottleneck.weight"]["step"] == 13 - skipped
    assert all(weight.isfinite().all() for weight in results[0]["weights"].values())


def exchanges(run: int) -> dict[str, Tensor]:
    """New masks of layers with many equal magnitudes and gradients; of this rank's rows, or of all."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if size > 1 else 0
    group = torch.distributed.group.WORLD if size > 1 else None
    results = {}
    for rows, columns in ((3, 12), (17, 24), (64, 9)):
        generator = torch.Generator().manual_seed(rows)
        weight = torch.randint(-3, 4, (rows, columns), generator=generator).float()
        grad = torch.randint(0, 3, (rows, columns), generator=generator).float()
        per = -(-rows // size)
        mine = slice(min(rank * per, rows), min((rank + 1) * per, rows))
        shard = Shard(mine.start * columns, (mine.stop - mine.start) * columns, group, torch.device("cpu"))
        runs = Runs("layer", rows * columns, run, shard)
        keep = runs.count // 2
        mask = random_mask(runs, keep, 5, shard.device)
        results[f"start {rows}"] = unpack(mask, 0, shard.count)
        for growth in (None, Largest(keep // 3, run)):
            if growth is not None and shard.count:
                growth.add(shard.first, grad[mine].reshape(-1), unpack(mask, 0, shard.count))
            new = exchange(weight[mine], mask, runs, keep // 3, 5, 1, growth)
            results[f"{rows} {growth is None}"] = unpack(new, 0, shard.count)
    return results


def test_equal_magnitudes_go_by_their_place(four: Ranks) -> None:
    """Ties are broken over all ranks as in one process."""
    four(train, max_steps=1)  # joins the ranks
    for length in (1, 3):
        parts = four(exchanges, length)
        for name, mask in exchanges(length).items():
            assert torch.equal(torch.cat([part[name] for part in parts]), mask), name


@pytest.mark.parametrize(("replicate", "route"), [(1, "reduce"), (2, "exchange")])
def test_four_ranks(four: Ranks, route: str, replicate: int) -> None:
    """Rows 3, 7 and 17 over four ranks, with empty shards, and over two replicas of two."""
    strategy = {"route": route, "replicate": replicate}
    results = assert_equal(four, smet={"growth": "gradient"}, strategy=strategy, gradient_clip_val=0.1)
    if replicate == 1:
        assert [result["said"]["own"]["net.bottleneck.weight"] for result in results[1:]][-1] == 0


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop_momentum_centered", "adagrad", "nadam", "lion"])
def test_rules(two: Ranks, optimizer: str) -> None:
    """No moment, one, three, one that starts elsewhere than at zero, and more counts than steps."""
    assert_equal(two, partial(Module, net=Deep, optimizer=OPTIMIZERS[optimizer]))


EIGHT_BIT = {
    "adamw8bit": partial(memopt.AdamW8bit, lr=3e-3),
    "gefen": partial(memopt.Gefen, lr=3e-3),
    "gefen_table": partial(memopt.Gefen, lr=3e-3, codebook="table"),
}


@pytest.mark.parametrize(
    ("optimizer", "route"), [("adamw8bit", "exchange"), ("gefen", "reduce"), ("gefen_table", "exchange")]
)
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
    assert_same_topology({**uninterrupted["said"], "seen": uninterrupted["said"]["seen"][2:]}, resumed["said"])


@pytest.mark.parametrize(
    ("before", "after", "form"), [(2, 1, "folder"), (1, 2, "folder"), (2, 2, "folder"), (2, 1, "file")]
)
def test_reshard(one: Ranks, two: Ranks, before: int, after: int, form: str, tmp_path: Path) -> None:
    """Every state, to the last bit, on another number of ranks."""
    assert_resumes({1: one, 2: two}, tmp_path / "a.ckpt", partial(Module, net=Deep), before, after, form)


@pytest.mark.parametrize(
    ("optimizer", "before", "after", "form"),
    [("adamw8bit", 2, 1, "folder"), ("gefen", 1, 2, "folder"), ("gefen", 2, 0, "file"), ("adamw8bit", 0, 2, "file")],
)
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


@pytest.mark.parametrize("form", FORMATS)
def test_masks_of_a_checkpoint(two: Ranks, form: str, tmp_path: Path) -> None:
    """A single file, or one that was made of a folder, says which weights are active."""
    path = tmp_path / "a.ckpt"
    said = run(2, {2: two}, partial(Module, net=Deep), FORMATS[form], save=path, **SEVEN)["said"]
    if form == "folder":
        consolidate = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint", str(path)]
        subprocess.run(consolidate, check=True, capture_output=True)
        path = path.with_name("a.ckpt.consolidated")
    masks = masks_of(torch.load(path, weights_only=True))
    assert masks.keys() == said["masks"].keys()
    assert all(torch.equal(mask, said["masks"][name]) for name, mask in masks.items())


@pytest.mark.parametrize("form", FORMATS)
def test_dense_and_sparse_checkpoints(two: Ranks, form: str, tmp_path: Path) -> None:
    """A dense run goes on with SMET; another density, and a run without SMET, are refused on all ranks."""
    make, dense, kept = partial(Module, net=Deep), tmp_path / "dense.ckpt", tmp_path / "sparse.ckpt"
    before = two(train, make, FORMATS[form], save=dense, **SEVEN)[0]
    after = run(2, {2: two}, make, FORMATS[form], ckpt_path=dense, save=kept, **SEVEN)
    for name, mask in after["said"]["masks"].items():
        moments = after["said"]["states"][name]
        assert torch.equal(moments["exp_avg"], before["states"][name]["exp_avg"][mask])
    assert run(2, {2: two}, make, FORMATS[form], ckpt_path=dense, **THIRTEEN)["step"] == 13
    for error in two.attempt(train, make, FORMATS[form], ckpt_path=kept, **THIRTEEN):
        assert isinstance(error, memopt.UnsupportedError) and "Add the callback lightning_memopt.SMET" in str(error)
    others = [memopt.SMET(**(OPTIONS | {"density": 0.4}))]
    for error in two.attempt(train, make, FORMATS[form], ckpt_path=kept, callbacks=others, **THIRTEEN):
        assert isinstance(error, memopt.UnsupportedError) and "Resume with the density" in str(error)


def test_bf16_resumes_bitwise(two: Ranks, tmp_path: Path) -> None:
    """Stochastic rounding and float32 moments."""
    make = partial(Module, net=Deep, optimizer=partial(AdamW, lr=3e-3))
    strategy = {"rounding": "stochastic", "state_dtype": "float32"}
    options: dict[str, Any] = {"make": make, "strategy": strategy, "precision": "bf16-true"}
    run(2, {2: two}, save=tmp_path / "a.ckpt", **options, **SEVEN)
    resumed = run(2, {2: two}, ckpt_path=tmp_path / "a.ckpt", **options, **THIRTEEN)
    assert furthest(resumed, run(2, {2: two}, **options, **THIRTEEN)) == 0


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_of_cleared_states_has_the_masks(two: Ranks, form: str, tmp_path: Path) -> None:
    """Saved right after the step in which states were cleared."""
    make, callbacks = partial(Module, net=Deep), [ClearsStates(), memopt.SMET(**OPTIONS)]
    options: dict[str, Any] = {"make": make, "strategy": FORMATS[form], "inspect": says, "batches": 1}
    save, to_nine, on = tmp_path / "a.ckpt", {"max_steps": 9}, {"max_steps": 13}
    saved = two(train, callbacks=callbacks, save=save, **options, **to_nine)[0]
    resumed = two(train, callbacks=callbacks[1:], ckpt_path=save, **options, **on)[0]
    whole_run = two(train, callbacks=callbacks, **options, **on)[0]
    assert furthest(resumed, whole_run) == 0 and furthest(saved, resumed) > 0
    for part in ("masks", "ages"):
        mine, other = resumed["said"][part], whole_run["said"][part]
        assert all(torch.equal(mine[name], other[name]) for name in mine)


class Buffers(pl.Callback):
    """Sizes of the buffers that gradients of sparse layers wait in, and of what they may at most be."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        callback = next(c for c in trainer.callbacks if isinstance(c, memopt.SMET))  # type: ignore[attr-defined]
        for layer in callback.layers.values():
            assert layer.slot.buffer is None
            if layer.buffer is not None:
                assert layer.buffer.numel() == layer.own
                layer.waited = True  # type: ignore[attr-defined]


def waited(trainer: pl.Trainer) -> bool:
    callback = next(c for c in trainer.callbacks if isinstance(c, memopt.SMET))  # type: ignore[attr-defined]
    return all(hasattr(layer, "waited") for layer in callback.layers.values())


def test_waiting_gradients_are_those_of_active_weights(two: Ranks) -> None:
    """What `reduce` accumulates has an element per active weight of the rank's rows."""
    callbacks = [memopt.SMET(**OPTIONS), Buffers()]
    make, options = partial(Module, net=Deep), {"max_steps": 3, "accumulate_grad_batches": 3}
    results = two(train, make, {"route": "reduce"}, inspect=waited, callbacks=callbacks, **options)
    assert all(result["said"] for result in results)


class Few(nn.Module):
    """A sparse layer of which a rank may have one active weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.few, self.head = nn.Embedding(11, 4), nn.Linear(4, 2), nn.Linear(2, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.few(self.embedding(ids))))


def train_few(*args: Any, **options: Any) -> Any:
    return train(*args, callbacks=[memopt.SMET(density=0.25, update_every=2, warmup_steps=0)], batches=1, **options)


@pytest.mark.parametrize("form", [True, False])
def test_a_rank_with_one_active_weight_saves(two: Ranks, form: bool, tmp_path: Path) -> None:
    make, strategy = partial(Module, net=Few), {"save_distributed_checkpoint": form}
    two(train_few, make, strategy, tmp_path / "checkpoint", max_steps=3)
    whole = two(train_few, make, strategy, max_steps=6)[0]
    resumed = two(train_few, make, strategy, ckpt_path=tmp_path / "checkpoint", max_steps=6)[0]
    assert furthest(whole, resumed) == 0
