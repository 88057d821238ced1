"""SMET through real runs: what it computes, keeps, refuses and reports."""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, Module, Net, fit, next_token_loss, square_loss, tokens, vectors
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from sparse_oracle import Oracle
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import lightning_memopt as memopt
from lightning_memopt.compat import CASES
from lightning_memopt.sparsity import state as states
from lightning_memopt.sparsity.state import ENTRIES

# Many tests update the topology more often than anyone would.
pytestmark = pytest.mark.filterwarnings("ignore:SMET. warmup_steps")
NEAREST = partial(memopt.ForgeStrategy, rounding="nearest")
SPARSE = ("net.up.weight", "net.down.weight")


def row(feature: str) -> str:
    """What the compatibility table says of it, as a pattern."""
    (message,) = (case.message for case in CASES if case.feature == feature)
    return re.escape(message)


def smet(**options: Any) -> memopt.SMET:
    """Frequent updates, to the end."""
    return memopt.SMET(**({"density": 0.5, "update_every": 10, "warmup_steps": 4, "stop_at": None} | options))


def train(callback: Any, module: Any = None, steps: int = 60, **options: Any) -> Any:
    callbacks = [*options.pop("callbacks", []), callback]
    strategy = options.pop("strategy", None) or NEAREST()
    return fit(module or Module(), strategy, options.pop("data", None) or tokens(60), max_steps=steps,
               callbacks=callbacks, **options)  # fmt: skip


# ------------------------------------------------------------------------------------------------- what is computed
@pytest.mark.parametrize(
    "options",
    [{}, {"growth": "gradient"}, {"lr_scaling": "none", "warmup_steps": 0}, {"lr_scaling": "linear", "density": 0.25},
     {"bias_correction": "step"}, {"seed": 7, "prune_schedule": "constant", "prune_fraction": 0.5}],
    ids=["default", "gradient", "plain", "linear", "step", "half"],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_equals_dense_masked_adam_with_ages(options: dict[str, Any], precision: str) -> None:
    """60 steps with topology updates every 10, against formulas in float64."""
    callback = smet(**options)
    density = options.get("density", 0.5)
    power = {"none": 0, "sqrt": 0.5, "linear": 1}[options.get("lr_scaling", "sqrt")]
    by_age = options.get("bias_correction") != "step"
    oracle = Oracle(callback, next_token_loss, density**-power, options.get("warmup_steps", 4), by_age=by_age)
    train(callback, Module(optimizer=partial(AdamW, lr=1e-3)), callbacks=[oracle], precision=precision)
    assert oracle.events >= 2 * 4  # the last update of a cosine may exchange nothing
    assert oracle.worst <= (1e-6 if precision == "32-true" else 1e-14)
    # Dense parameters near 1 show the float32 forward pass: a plain run in float32 is as far from one in float64.
    assert oracle.worst_dense <= (3e-6 if precision == "32-true" else 1e-14)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_and_accumulation(clip: float | None, accumulate: int) -> None:
    """The norm is that of active gradients; ages count steps, not micro-batches."""
    callback = smet(update_every=5)
    oracle = Oracle(callback, next_token_loss, 2**0.5, 4, clip=clip, accumulate=accumulate)
    train(callback, callbacks=[oracle], steps=18, precision="64-true", gradient_clip_val=clip,
          accumulate_grad_batches=accumulate)  # fmt: skip
    assert oracle.events == 2 * 3 and max(oracle.worst, oracle.worst_dense) <= 1e-14
    assert int(callback.ages[SPARSE[0]].max()) == 18


def test_schedule_and_groups() -> None:
    """A learning-rate schedule and two groups; the sparse layers' rate follows their group's."""
    callback = smet(update_every=5)
    oracle = Oracle(callback, next_token_loss, 2**0.5, 4)
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    train(callback, Module(schedule=schedule), callbacks=[oracle], steps=20, precision="64-true")
    assert max(oracle.worst, oracle.worst_dense) <= 1e-14


class Masked(pl.Callback):
    """Fails where a weight off the mask is not zero, or one that was just grown has moved."""

    def __init__(self, callback: memopt.SMET) -> None:
        self.callback, self.checks = callback, 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        params = dict(pl_module.named_parameters())
        for name, mask in self.callback.masks.items():
            assert not params[name][~mask].any()
            assert int(mask.sum()) == round(0.5 * mask.numel())
            self.checks += 1


@pytest.mark.parametrize("growth", ["random", "gradient"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "adamw8bit", "gefen"])
def test_every_rule_moves_active_weights_only(name: str, growth: str) -> None:
    """Finite, masked, of constant density, and training."""
    made = {"adamw8bit": partial(memopt.AdamW8bit, lr=1e-3), "gefen": partial(memopt.Gefen, lr=1e-3)}
    callback = smet(update_every=4, growth=growth)
    masked = Masked(callback)
    module = Module(wide_net, (OPTIMIZERS | made)[name], square_loss)
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    run = train(callback, module, steps=14, data=vectors(64), callbacks=[masked])
    assert masked.checks == 14 * len(callback.masks) == 14
    for key, mask in callback.masks.items():
        weight = run.weights[key]
        assert weight.isfinite().all() and (weight[mask] != start[key][mask]).float().mean() > 0.8


def wide_net() -> nn.Module:
    """One layer large enough for 8-bit codes, and a head."""
    return nn.Sequential(nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 2))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sgd_maximize"])
def test_without_updates_equals_a_masked_plain_run(name: str) -> None:
    """A mask that never changes: plain torch with masked weights and gradients, for every rule."""
    callback = smet(prune_fraction=0.0, warmup_steps=0, lr_scaling="none")
    fused = train(callback, Module(optimizer=OPTIMIZERS[name]), steps=12, precision="64-true")

    class Plain(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.on_before_optimizer_step(trainer, pl_module)

        @torch.no_grad()
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            params = dict(pl_module.named_parameters())
            for key, mask in callback.masks.items():
                params[key][~mask] = 0
                if params[key].grad is not None:
                    params[key].grad[~mask] = 0

    plain = fit(Module(optimizer=OPTIMIZERS[name]), "auto", tokens(60), max_steps=12, callbacks=[Plain()],
                precision="64-true")  # fmt: skip
    for key, weight in fused.weights.items():
        mask = callback.masks.get(key, torch.ones_like(weight, dtype=torch.bool))
        assert (weight - plain.weights[key])[mask].abs().max() <= 1e-12


# ------------------------------------------------------------------------------------------------- the cold start
def first_update(bias_correction: str, warmup: int = 0) -> float:
    """Size of the first update of regrown weights, late in training, in units of the layer's learning rate."""
    sizes: list[float] = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.optimizers[0].state[pl_module.net[0].weight]["step"].fill_(20000)

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            self.born = callback.ages["net.0.weight"] == 1 if trainer.global_step == 5 else None

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            if self.born is not None:
                sizes.extend(pl_module.net[0].weight[self.born].abs().tolist())

    options = {"warmup_steps": warmup, "bias_correction": bias_correction, "lr_scaling": "none"}
    callback = smet(update_every=5, prune_schedule="constant", **options)
    optimizer = partial(AdamW, lr=1e-5, weight_decay=0.0, eps=1e-30)
    module = Module(lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 1)), optimizer, square_loss)
    train(callback, module, steps=6, data=vectors(), callbacks=[Watch()])
    assert sizes
    return max(sizes) / 1e-5


@pytest.mark.filterwarnings("ignore:SMET. warmup_steps")
def test_cold_start() -> None:
    """With the parameter's step the first update is 3.16 times the learning rate; by age it is one, then damped."""
    assert first_update("step") == pytest.approx(0.1 / math.sqrt(0.001), rel=1e-3)
    assert first_update("age") == pytest.approx(1.0, rel=1e-3)
    assert first_update("age", warmup=8) == pytest.approx(1 / 8, rel=1e-3)


# ------------------------------------------------------------------------------------------------- topology
class Topologies(pl.Callback):
    """Masks after every step, and the weights whose magnitude decided."""

    def __init__(self, callback: memopt.SMET) -> None:
        self.callback = callback
        self.masks: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.masks.append(self.callback.masks)


def masks_of(**options: Any) -> list[dict[str, Tensor]]:
    callback = smet(**options)
    seen = Topologies(callback)
    fit(Module(), NEAREST(), tokens(60), max_steps=42, callbacks=[callback, seen])
    return seen.masks


@pytest.mark.parametrize("options", [{}, {"growth": "gradient"}, {"block_size": 2, "include": ["up"]}])
def test_same_seed_same_masks(options: dict[str, Any]) -> None:
    """And another seed, others."""
    first, again, other = (masks_of(**options, seed=seed) for seed in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(first[-1][name], other[-1][name]) for name in first[-1])


def test_when_the_topology_changes() -> None:
    """After steps 10, 20, 30 of 42 if stop_at lies at 33.6."""
    masks = masks_of(stop_at=0.8, prune_schedule="linear")
    changed = [i + 1 for i in range(1, 42) if not torch.equal(masks[i][SPARSE[0]], masks[i - 1][SPARSE[0]])]
    assert changed == [10, 20, 30]


def test_block_masks_hold_whole_runs() -> None:
    """Runs of two weights of a row."""
    for masks in masks_of(block_size=2, include=["up"]):
        runs = masks["net.up.weight"].view(17, 4, 2)
        assert torch.equal(runs[..., 0], runs[..., 1])


class Places(pl.Callback):
    """Where the tensors of all states lie, after every step but the first, which Gefen learns from."""

    def __init__(self) -> None:
        self.places: set[tuple[int, ...]] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > 1:
            values = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
            self.places.add(tuple(v.data_ptr() for v in values if isinstance(v, Tensor) and v.dim()))


@pytest.mark.parametrize("growth", ["random", "gradient"])
@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "gefen"])
def test_states_stay_where_they_are(name: str, growth: str) -> None:
    """Over topology updates: what holds their addresses, a CUDA graph say, need not be made anew."""
    made = {"adamw8bit": partial(memopt.AdamW8bit, lr=1e-3), "gefen": partial(memopt.Gefen, lr=1e-3)}
    callback, places = smet(update_every=4, growth=growth), Places()
    seen = Topologies(callback)
    train(callback, Module(wide_net, (OPTIMIZERS | made)[name], square_loss), steps=14, data=vectors(64),
          callbacks=[places, seen])  # fmt: skip
    assert len({tuple(masks["net.0.weight"].flatten().tolist()) for masks in seen.masks}) == 4
    assert len(places.places) == 1 and len(*places.places) >= 5


def test_full_layers_say_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to grow at density 1, little at 0.97."""
    said: list[str] = []
    monkeypatch.setattr("lightning_memopt.sparsity.layer.rank_zero_info", said.append)
    callback = smet(density={"up": 1.0, "down": 0.97}, update_every=4)
    run = train(callback, steps=10)
    assert any("net.up.weight: only 0 of 136" in line for line in said)
    assert any("net.down.weight: only 4 of 136" in line for line in said)
    assert callback.masks["net.up.weight"].all() and int(callback.masks["net.down.weight"].sum()) == 132
    assert run.weights["net.up.weight"].isfinite().all()


# ------------------------------------------------------------------------------------------------- cleared states
def clear_all(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    optimizer.state.clear()


def clear_each(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    for weight in weights:
        optimizer.state[weight].clear()


def delete_each(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    for weight in weights:
        del optimizer.state[weight]


class Clears(Module):
    """Clears optimizer states in two steps, at some place in the step."""

    def __init__(self, clear: Callable[[Optimizer, list[nn.Parameter]], None], hook: str, **options: Any) -> None:
        super().__init__(**options)
        self.clear, self.hook = clear, hook

    def at(self, hook: str) -> None:
        if hook == self.hook and self.global_step in (4, 13):
            optimizer = self.trainer.optimizers[0]
            self.clear(optimizer, [self.net.up.weight, self.net.down.weight])

    def on_train_batch_start(self, *_: Any) -> None:
        self.at("on_train_batch_start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, *_: Any) -> None:
        self.at("on_before_backward")


@pytest.mark.parametrize("hook", ["training_step", "on_before_backward"])
@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
@pytest.mark.parametrize("clear", [clear_all, clear_each, delete_each])
def test_states_may_be_cleared_anywhere_in_a_step(clear: Any, name: str, hook: str) -> None:
    """Before the backward pass one place is as good as another."""
    first, second = (
        train(c := smet(update_every=5), Clears(clear, at, optimizer=OPTIMIZERS[name]), steps=17).weights | c.ages
        for at in ("on_train_batch_start", hook)
    )
    assert all(torch.equal(first[key], second[key]) for key in first)


class ClearsStates(pl.Callback):
    """Clears the optimizer's state after some steps, before anyone else looks at it."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.oracle: Oracle | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.optimizers[0].state.clear()
            if self.oracle is not None:
                self.oracle.steps = 0
                for moment in (moment for moments in self.oracle.moments.values() for moment in moments):
                    moment.zero_()


@pytest.mark.parametrize("growth", ["random", "gradient"])
def test_a_cleared_state_begins_anew(growth: str) -> None:
    """With the mask of the run, no moments, and age 1 for all; also right before a topology update."""
    callback, clears = smet(update_every=5, growth=growth), ClearsStates(7, 10)
    clears.oracle = oracle = Oracle(callback, next_token_loss, 2**0.5, 4)
    train(callback, callbacks=[clears, oracle], steps=23, precision="64-true")
    assert oracle.events >= 2 * 3 and max(oracle.worst, oracle.worst_dense) <= 1e-14
    assert int(callback.ages[SPARSE[0]].max()) == 13


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "gefen"])
def test_a_checkpoint_of_cleared_states_has_the_masks(optimizer: str, tmp_path: Path) -> None:
    """It resumes bitwise."""
    makers: dict[str, Any] = {"adamw8bit": memopt.AdamW8bit, "gefen": memopt.Gefen, "adamw": AdamW}
    make = partial(Module, wide_net, partial(makers[optimizer], lr=1e-3), square_loss)
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=9, save_top_k=-1)
    runs = []
    for ckpt_path, callbacks in ((None, [ClearsStates(9), save]), (tmp_path / "step=9.ckpt", [])):
        callback = smet(update_every=4)
        run = fit(make(), NEAREST(), Replay(60, vectors(64, 60)), ckpt_path, max_steps=17, max_epochs=1,
                  callbacks=[*callbacks, callback], enable_checkpointing=bool(callbacks))  # fmt: skip
        runs.append(run.weights | callback.masks | {f"age of {name}": age for name, age in callback.ages.items()})
    assert all(torch.equal(value, runs[1][key]) for key, value in runs[0].items())


@pytest.mark.parametrize("hook", ["on_train_batch_start", "training_step"])
def test_what_torch_loads_is_refused(hook: str) -> None:
    """It casts every entry to the weight's dtype, also masks."""

    def reload(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
        optimizer.load_state_dict(optimizer.state_dict())

    with pytest.raises(memopt.UnsupportedError, match="cast the state of net"):
        train(smet(update_every=5), Clears(reload, hook), steps=6)


def zero_all(optimizer: Optimizer, weights: list[nn.Parameter], zero: Callable[[Tensor], Any] = Tensor.zero_) -> None:
    """All that a state holds, as of a dense weight."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                zero(value)


@pytest.mark.parametrize("entry", [*ENTRIES[:3], None])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "training_step", "on_before_backward"])
def test_masks_and_ages_that_are_zeroed_in_place_are_refused(hook: str, entry: str | None) -> None:
    """Before the step's checkpoint: nothing else knows which weights are active."""

    def zero(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
        if entry is None:
            zero_all(optimizer, weights)
        else:
            optimizer.state[weights[1]][entry].zero_()

    name = rf"{entry} of {SPARSE[1]}" if entry else rf"{ENTRIES[0]} of {SPARSE[0]}"
    with pytest.raises(memopt.UpdateError, match=rf"{name} was written to .* optimizer\.state\.clear\(\) keeps"):
        train(smet(update_every=5), Clears(zero, hook), steps=6)


def zero_data(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    """As `zero_all`, behind autograd's back, which does not count such writes."""
    zero_all(optimizer, weights, lambda value: value.data.zero_())


def zero_anew(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
    """Put zeros in the place of all that states hold."""
    for state in optimizer.state.values():
        state |= {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, Tensor)}


def test_masks_that_are_replaced_by_zeros_are_refused() -> None:
    """Before the next update, which no weight would take, and whether or not the topology changes again."""
    with pytest.raises(memopt.UpdateError, match=r"smet_mask of .* which weights are active") as raised:
        train(smet(update_every=100), module := Clears(zero_anew, "on_train_batch_start"), steps=6)
    assert module.trainer.global_step == 4 and "keeps the masks" in str(raised.value)


def test_masks_that_are_zeroed_unseen_are_refused_before_they_change() -> None:
    with pytest.raises(memopt.UpdateError, match=r"smet_mask of .* which weights are active"):
        train(smet(update_every=5), module := Clears(zero_data, "on_train_batch_start"), steps=6)
    assert module.trainer.global_step == 5


class TakesOut(pl.Callback):
    """Takes a layer out of its optimizer, its state as well."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4:
            (group,) = trainer.optimizers[0].param_groups
            group["params"] = [param for param in group["params"] if param is not module.net.up.weight]
            del trainer.optimizers[0].state[module.net.up.weight]


@pytest.mark.parametrize("growth", ["random", "gradient"])
def test_layers_may_be_taken_out_of_the_optimizer(growth: str, tmp_path: Path) -> None:
    """The topology of the others goes on changing, and checkpoints know nothing of what was taken out."""
    callback = smet(update_every=5, growth=growth)
    run = train(callback, callbacks=[TakesOut()], steps=12)
    run.trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert tuple(callback.masks) == SPARSE[1:] and callback.ages[SPARSE[1]].unique().tolist() == [0, 2, 7, 12]
    assert run.module.net.up.weight not in run.optimizer.state


def test_moments_may_be_zeroed_in_place() -> None:
    """They begin anew, at the mask and the ages that they had."""

    def zero(optimizer: Optimizer, weights: list[nn.Parameter]) -> None:
        for weight in weights:
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer.state[weight][moment].zero_()

    run = train(callback := smet(update_every=5), Clears(zero, "training_step"), steps=17)
    assert run.trainer.global_step == 17 and int(callback.ages[SPARSE[0]].max()) == 17


def test_a_second_fit_of_masks_that_were_zeroed_is_refused() -> None:
    """It would draw others, and zero what was trained."""
    run = train(callback := smet(update_every=5), steps=6)
    zero_all(run.optimizer, [])
    with pytest.raises(memopt.UpdateError, match="which weights are active"):
        train(callback, run.module, steps=12)


def test_a_run_ends_well_after_torch_has_loaded() -> None:
    """Nobody needs the masks any more."""

    class Reloads(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.optimizers[0].load_state_dict(trainer.optimizers[0].state_dict())

    run = train(smet(update_every=5), callbacks=[Reloads()], steps=6)
    assert run.trainer.global_step == 6


def test_a_checkpoint_that_lost_the_masks_is_refused(tmp_path: Path) -> None:
    """Written after the fit, of states that were cleared: resuming with other masks would zero trained weights."""
    run = train(smet(update_every=5), steps=6)
    run.trainer.save_checkpoint(tmp_path / "whole.ckpt")
    run.optimizer.state.clear()
    run.trainer.save_checkpoint(tmp_path / "lost.ckpt")
    assert train(smet(update_every=5), steps=7, ckpt_path=tmp_path / "whole.ckpt").trainer.global_step == 7
    with pytest.raises(memopt.UnsupportedError, match=r"net\.\S+ was sparse .* lacks its mask"):
        train(smet(update_every=5), steps=7, ckpt_path=tmp_path / "lost.ckpt")


def test_masks_outlive_the_optimizer() -> None:
    """What was read after training can still be read when the states were given up."""
    run = train(callback := smet(update_every=5), steps=12)
    before = callback.masks
    run.optimizer.state.clear()
    assert all(torch.equal(mask, callback.masks[name]) for name, mask in before.items())
    assert {int(age.max()) for age in callback.ages.values()} == {1}


# ------------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("at", [9, 10, 11, 19, 20])
@pytest.mark.parametrize("options", [{}, {"growth": "gradient"}], ids=["random", "gradient"])
def test_resume_is_bitwise(at: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Around the first and last step of a topology period, bf16 weights with stochastic rounding."""
    make = partial(Module, optimizer=partial(AdamW, lr=3e-3))

    def run(steps: int, ckpt: Any = None, callbacks: list[Any] | None = None) -> tuple[Any, memopt.SMET]:
        callback = smet(**options)
        ran = fit(make(), "forge", Replay(60), ckpt, max_steps=steps, max_epochs=1, precision="bf16-true",
                  callbacks=[callback, *(callbacks or [])], enable_checkpointing=bool(callbacks),
                  default_root_dir=tmp_path)  # fmt: skip
        return ran, callback

    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=at, save_top_k=-1)
    whole, first = run(40, callbacks=[save])
    resumed, second = run(40, tmp_path / f"step={at}.ckpt")
    assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in whole.weights)
    for mine, other in ((first.masks, second.masks), (first.ages, second.ages)):
        assert all(torch.equal(mine[name], other[name]) for name in SPARSE)
    for one, two in zip(whole.module.parameters(), resumed.module.parameters(), strict=True):
        a, b = whole.optimizer.state[one], resumed.optimizer.state[two]
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert torch.equal(value, b[key]) if isinstance(value, Tensor) else value == b[key], key


class Replay:
    """Batches by number, going on after those a checkpoint has seen."""

    def __init__(self, count: int, data: Any = None) -> None:
        self.batches, self.first = list(data or tokens(count)), 0

    def __iter__(self) -> Any:
        for number in range(self.first, len(self.batches)):
            self.first = number + 1
            yield self.batches[number]

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


def saved(tmp_path: Path, callbacks: list[Any], **options: Any) -> Path:
    run = fit(Module(), "forge", max_steps=12, callbacks=callbacks, **options)
    run.trainer.save_checkpoint(tmp_path / "run.ckpt")
    return tmp_path / "run.ckpt"


def test_checkpoint_without_the_callback_is_refused(tmp_path: Path) -> None:
    """Its states fit no dense weight."""
    path = saved(tmp_path, [smet()])
    with pytest.raises(memopt.UnsupportedError, match=row("a checkpoint of SMET without SMET")):
        fit(Module(), "forge", ckpt_path=path)


def test_dense_checkpoint_becomes_sparse(tmp_path: Path) -> None:
    """The moments of a dense run are taken over where weights stay active."""
    path = saved(tmp_path, [])
    dense = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    callback = smet(update_every=1000)

    class First(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            state = trainer.optimizers[0].state[pl_module.net.up.weight]
            mask = callback.masks["net.up.weight"]
            number = [name for name, _ in pl_module.named_parameters()].index("net.up.weight")
            assert torch.equal(state["exp_avg"][0], dense[number]["exp_avg"][mask])
            assert (callback.ages["net.up.weight"][mask] == 12).all()

    train(callback, steps=14, ckpt_path=path, callbacks=[First()])


def test_layers_that_become_sparse_on_resume_are_named(tmp_path: Path) -> None:
    """Others go on with their masks and are not."""
    path = saved(tmp_path, [smet(exclude=["net.up", "net.head"])])
    with pytest.warns(UserWarning, match=r"SMET: net\.up\.weight had no mask in the run") as caught:
        train(smet(exclude=["net.head"]), steps=14, ckpt_path=path)
    assert not any("net.down" in str(warning.message) for warning in caught)


def test_other_density_or_block_on_resume_is_refused(tmp_path: Path) -> None:
    """Neither can change in the middle of a run."""
    path = saved(tmp_path, [smet()])
    with pytest.raises(memopt.UnsupportedError, match="Resume with the density"):
        fit(Module(), "forge", ckpt_path=path, callbacks=[smet(density=0.25)])
    with pytest.raises(memopt.UnsupportedError, match="block_size=1"):
        fit(Module(), "forge", ckpt_path=path, callbacks=[smet(block_size=2, include=["up"])])


def test_fit_again_goes_on_with_the_same_masks() -> None:
    """A second fit of the same module and callback keeps the topology."""
    module, callback = Module(), smet(update_every=5)
    train(callback, module, steps=7)
    before = callback.masks
    train(callback, module, steps=2)
    assert all(torch.equal(before[name], mask) for name, mask in callback.masks.items())


def test_testing_sees_the_sparse_weights() -> None:
    """Evaluation after training changes nothing."""

    class Tested(Module):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            for name, mask in callback.masks.items():
                assert not dict(self.named_parameters())[name][~mask].any()

    callback = smet()
    run = train(callback, Tested(), steps=12)
    run.trainer.test(run.module, tokens(2), verbose=False)


# ------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("density", [0.5, 0.25])
def test_bytes(density: float) -> None:
    """What lies in the state, against the limits, and against AdamW's bf16 moments of a dense weight."""
    callback = memopt.SMET(density, update_every=2, warmup_steps=1, include=["0"])
    module = Module(lambda: nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 1)), loss=square_loss)
    run = train(callback, module, steps=8, data=vectors(256), precision="bf16-true")
    weights, memory = 256 * 512, callback.memory()
    assert memory["mask"] + memory["index"] <= 0.25 * weights
    assert memory["ages"] == round(density * weights)
    assert memory["moments"] == 4 * round(density * weights)
    assert sum(memory.values()) < {0.5: 0.8, 0.25: 0.6}[density] * 6 * weights
    state = run.optimizer.state[run.module.net[0].weight]
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
    assert sum(t.nbytes for t in tensors) == sum(memory.values()) - memory["weight"]
    assert set(states.ENTRIES) <= state.keys()


def test_nothing_of_the_weights_size_is_made() -> None:
    """Not at set-up, not in a step: the largest tensor made on the way is a slab or a chunk of the layer."""
    from torch.utils._python_dispatch import TorchDispatchMode

    rows, columns = 4096, 512
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for out in result if isinstance(result, tuple | list) else (result,):
                if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in known:
                    sizes.append(out.untyped_storage().nbytes())
            return result

    weight = nn.Linear(columns, rows, bias=False)
    module = Module(lambda: nn.Sequential(weight, nn.Linear(rows, 1)), loss=square_loss)
    known = {p.untyped_storage().data_ptr() for p in module.parameters()}

    class Measure(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            self.mode = Sizes()
            self.mode.__enter__()

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.mode.__exit__(None, None, None)

    callback = memopt.SMET(0.1, update_every=1000)
    train(callback, module, steps=1, data=vectors(columns), callbacks=[Measure()])
    assert sizes and max(sizes) < weight.weight.nbytes / 2


# ------------------------------------------------------------------------------------------------- what is refused
def test_other_strategies_are_refused() -> None:
    """With the reason and the way out."""
    with pytest.raises(memopt.UnsupportedError, match=row("SMET under another strategy")):
        fit(Module(), "auto", callbacks=[smet()])


@pytest.mark.parametrize("average", [WeightAveraging, partial(StochasticWeightAveraging, 0.01, swa_epoch_start=1)])
def test_averages_over_several_masks_are_refused(average: Callable[[], pl.Callback]) -> None:
    """Averages over one mask are as sparse as it."""
    with pytest.raises(memopt.UnsupportedError, match=row("weight averaging callbacks with SMET")):
        train(smet(), steps=5, callbacks=[average()])
    callback = smet(prune_fraction=0.0)
    train(callback, steps=-1, max_epochs=3, data=tokens(10), callbacks=[average()])
    layers = callback.layers.values()
    assert layers and all(layer.param.any() and not layer.param[~layer.mask()].any() for layer in layers)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"density": 0.0}, "outside"), ({"density": 1.5}, "outside"), ({"growth": "luck"}, "growth='luck'"),
     ({"include": ["nothing"]}, "linear layers are: net.up, net.down, net.head"),
     ({"include": ["head"]}, row("SMET on a weight that is shared with an embedding")),
     ({"block_size": 3, "include": ["up"]}, "does not divide"),
     ({"update_every": 0}, "at least 1")],
)  # fmt: skip
def test_refusals(options: dict[str, Any], words: str) -> None:
    """Before anything is trained."""
    with pytest.raises(memopt.UnsupportedError, match=words):
        train(smet(**options), steps=1)


def test_parametrized_layers_stay_dense() -> None:
    """Their weight is computed from another; asking for it at set-up would draw random numbers or iterate."""
    asked = []

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            asked.append(1)
            return weight

    def net() -> nn.Module:
        layers = nn.Sequential(OrderedDict(up=nn.Linear(64, 64), down=nn.Linear(64, 64), head=nn.Linear(64, 8)))
        nn.utils.parametrize.register_parametrization(layers.up, "weight", Counted())
        asked.clear()
        return layers

    train(callback := smet(), Module(net, loss=square_loss), steps=3, data=vectors(64))
    assert set(callback.masks) == {"net.down.weight"} and len(asked) == 3


def test_a_parametrized_head_is_the_head() -> None:
    def net() -> nn.Module:
        head = nn.utils.parametrizations.weight_norm(nn.Linear(64, 8))
        return nn.Sequential(OrderedDict(up=nn.Linear(64, 64), down=nn.Linear(64, 64), head=head))

    train(callback := smet(), Module(net, loss=square_loss), steps=1, data=vectors(64))
    assert set(callback.masks) == {"net.up.weight", "net.down.weight"}


def shared_pair() -> nn.Module:
    up, down = nn.Linear(64, 64), nn.Linear(64, 64)
    down.weight = up.weight
    return nn.Sequential(OrderedDict(up=up, down=down, head=nn.Linear(64, 8)))


def test_one_weight_of_two_layers_has_one_density() -> None:
    """The last one would count otherwise, unsaid."""
    words = row("SMET with two densities for one weight")
    with pytest.raises(memopt.UnsupportedError, match=f"net.up and net.down: {words}"):
        train(smet(density={"up": 0.5, "down": 0.25}), Module(shared_pair, loss=square_loss), steps=1, data=vectors(64))
    for options in ({"density": 0.5}, {"density": {"up": 0.5, "down": 0.25}, "exclude": ["down"]}):
        train(callback := smet(**options), Module(shared_pair, loss=square_loss), steps=1, data=vectors(64))
        assert [layer.density for layer in callback.layers.values()] == [0.5]


def test_a_model_without_linear_layers_hears_which_can_be_sparse() -> None:
    """GPT-2's layers, for one, are of another class."""
    convolution = Module(partial(nn.Conv1d, 8, 8, 1), loss=lambda net, batch: net(batch[0][..., None]).sum())
    with pytest.raises(memopt.UnsupportedError, match=r"only nn\.Linear can be.*linear layers are: none"):
        train(smet(), convolution, steps=1, data=vectors())


def test_two_are_refused() -> None:
    """One callback owns the masks of a run."""
    with pytest.raises(memopt.UnsupportedError, match="only one per run"):
        train(smet(), callbacks=[SecondSMET(0.5)], steps=1)


class SecondSMET(memopt.SMET):
    """A key of its own, which Lightning asks for."""

    @property
    def state_key(self) -> str:
        return "second"


def test_endless_training_needs_no_end() -> None:
    """Without an end, nothing may depend on it."""
    with pytest.raises(memopt.UnsupportedError, match="training has no end"):
        fit(Module(), "forge", max_steps=-1, max_epochs=-1, callbacks=[smet()])


def test_long_warm_up_is_warned_about() -> None:
    """Weights would be pruned before they have moved."""
    with pytest.warns(UserWarning, match="likely to be pruned again"):
        memopt.SMET(update_every=10, warmup_steps=10)


# ------------------------------------------------------------------------------------------------- what is reported
def test_progress_is_logged(tmp_path: Path) -> None:
    """Density, exchanged weights and the loss around each update, whatever log_every_n_steps is."""
    logger = pl.loggers.CSVLogger(tmp_path, name="", version="")
    train(smet(update_every=5, prune_fraction=0.25), steps=23, logger=logger, log_every_n_steps=1000)
    from lightning_memopt.callbacks.metrics_csv import curve, read_rows

    rows = read_rows(logger)
    assert [step for step, _ in curve(rows, "smet/pruned")] == [5, 10, 15, 20]
    assert {value for _, value in curve(rows, "smet/density")} == {0.5}
    assert curve(rows, "smet/pruned") == curve(rows, "smet/regrown") and rows[0]["smet/pruned"] > 20
    assert [step for step, _ in curve(rows, "smet/loss_jump")] == [10, 15, 20]


def test_non_finite_gradient_changes_nothing() -> None:
    """Neither weights nor ages, where updates are skipped."""

    def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
        value = next_token_loss(net, batch)
        loss.calls += 1
        return value * float("nan") if loss.calls == 3 else value

    loss.calls = 0
    callback = smet()
    run = train(callback, Module(loss=loss), steps=4, strategy=memopt.ForgeStrategy(nonfinite="skip"))
    assert int(callback.ages[SPARSE[0]].max()) == 3
    assert all(weight.isfinite().all() for weight in run.weights.values())


def test_manual_optimization() -> None:
    """Fused steps of a module that optimizes by hand."""

    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            with memopt.fused_step(optimizer):
                self.manual_backward(self.loss(self.net, batch))
            optimizer.step()

    hand, auto = smet(update_every=5), smet(update_every=5)
    first, second = Manual(), Module()
    a = train(hand, first, steps=17)
    b = train(auto, second, steps=17)
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


def test_plain_sgd_needs_no_moments() -> None:
    """A rule without state still has mask and ages."""
    callback = smet(update_every=3)
    train(callback, Module(optimizer=partial(SGD, lr=0.01)), steps=8)
    assert callback.memory()["moments"] == 0 and int(callback.ages[SPARSE[0]].max()) == 8


def test_default_layers() -> None:
    """All linear layers but the head, which here shares the embedding's matrix or is the last one."""
    assert train(c := smet(), Module(partial(Net, tied=True)), steps=1) and set(c.masks) == set(SPARSE)
    assert train(c := smet(), Module(partial(Net, tied=False)), steps=1) and set(c.masks) == set(SPARSE)


@pytest.mark.parametrize("codebook", ["curve", "table"])
@pytest.mark.parametrize("optimizer", ["gefen", "adamw8bit"])
def test_codes_resume_and_follow_adamw(optimizer: str, codebook: str, tmp_path: Path) -> None:
    """8-bit moments resume bitwise over topology updates, and stay near AdamW's path."""
    make = {
        "gefen": partial(memopt.Gefen, lr=1e-3, codebook=codebook),
        "adamw8bit": partial(memopt.AdamW8bit, lr=1e-3),
    }[optimizer]

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 192), nn.Tanh(), nn.Linear(192, 2))

    def run(maker: Any, steps: int, ckpt: Any = None, save: bool = False) -> Any:
        callback = smet(update_every=7, prune_schedule="constant")
        saver = [ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)] if save else []
        return fit(Module(net, maker, square_loss), "forge", Replay(60, vectors(128, 60)), ckpt, max_steps=steps,
                   max_epochs=1, callbacks=[callback, *saver], enable_checkpointing=save)  # fmt: skip

    whole = run(make, 30, save=True)
    resumed = run(make, 30, tmp_path / "step=10.ckpt")
    assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in whole.weights)
    adamw = run(partial(AdamW, lr=1e-3), 30)
    start = dict(Module(net).named_parameters())
    name = "net.0.weight"
    both = (whole.weights[name] != 0) & (adamw.weights[name] != 0)
    moved = (adamw.weights[name] - start[name].detach())[both]
    assert (whole.weights[name] - adamw.weights[name])[both].norm() < 0.35 * moved.norm()


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("growth", ["random", "gradient"])
def test_accumulated_gradients_are_those_of_active_weights(clip: float | None, growth: str) -> None:
    """Past the break-even, a buffer of active weights, or, where inactive ones are wanted too, of all."""
    seen: list[tuple[int, bool]] = []

    class Buffers(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            slot = callback.layers["net.0.weight"].slot
            for buffer in (slot.sparse.buffer, slot.buffer):
                if buffer is not None:
                    seen.append((buffer.numel(), slot.sparse.growth is not None))

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2))

    callback = smet(update_every=2, growth=growth, density=0.25)
    oracle = Oracle(callback, square_loss, 2, 4, clip=clip, accumulate=3)
    train(callback, Module(net, loss=square_loss), callbacks=[oracle, Buffers()], steps=8, precision="64-true",
          data=vectors(8, 60, 16), gradient_clip_val=clip, accumulate_grad_batches=3)  # fmt: skip
    assert oracle.events >= 2 and max(oracle.worst, oracle.worst_dense) <= 1e-14
    assert seen and all(size == (96 if collecting else 24) for size, collecting in seen)


def test_moments_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    """Whole moments of active weights are no codes, and the other way round."""
    adamw, coded = partial(AdamW, lr=1e-3), partial(memopt.AdamW8bit, lr=1e-3)
    net = partial(nn.Sequential, nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 2))
    for first, second in ((adamw, coded), (coded, adamw)):
        run = fit(Module(net, first, square_loss), "forge", vectors(64), max_steps=3, callbacks=[smet()])
        run.trainer.save_checkpoint(tmp_path / "a.ckpt")
        with pytest.raises(memopt.UnsupportedError, match="has another form"):
            fit(Module(net, second, square_loss), "forge", vectors(64), tmp_path / "a.ckpt", callbacks=[smet()])


def test_a_copy_has_the_settings_and_begins_anew() -> None:
    """Of a callback that was used, too."""
    used = smet(seed=3)
    first = train(used, steps=25)
    copied = copy.deepcopy(used)
    assert not copied.masks and copied.settings == used.settings and copied.density == used.density
    again = train(copied, steps=25)
    assert set(copied.masks) == set(used.masks) and all(
        torch.equal(weight, again.weights[name]) for name, weight in first.weights.items()
    )


@pytest.mark.parametrize("optimizer", [memopt.AdamW8bit, memopt.Gefen])
def test_its_checkpoint_without_it_is_refused(optimizer: Any, tmp_path: Path) -> None:
    """The optimizer's state is of active weights only."""
    make = partial(Module, partial(Net, width=64, hidden=128), partial(optimizer, lr=1e-3))
    train(smet(), make(), steps=2).trainer.save_checkpoint(tmp_path / "sparse.ckpt")
    with pytest.raises(memopt.UnsupportedError, match=row("a checkpoint of SMET without SMET")):
        fit(make(), NEAREST(), max_steps=4, ckpt_path=tmp_path / "sparse.ckpt")
