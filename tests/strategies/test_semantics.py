"""Lightning's own features under the fused strategy: same weights, same counters, same hooks as the plain run."""

from __future__ import annotations

import copy
import csv
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import (
    OPTIMIZERS,
    QUIET,
    Module,
    Net,
    NoGradientLeft,
    assert_equal_runs,
    difference,
    fit,
    tokens,
)
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

import lightning_memopt as memopt

# ---------------------------------------------------------------- steps without a loss


class SkipsBatches(Module):
    """`training_step` returns None for some micro-batches."""

    skipped: tuple[int, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 6 in self.skipped else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("skipped", "accumulate"),
    [((1, 4), 1), ((2,), 3), ((0,), 3), ((0, 1), 3), ((0, 1, 2), 3), ((5,), 2)],
    ids=["single", "last", "first", "first_two", "whole_window", "every_third_window"],
)
def test_none(skipped: tuple[int, ...], accumulate: int) -> None:
    """A step without a loss leaves weights, moments and step counts alone, wherever it lies in its window."""

    class Skips(SkipsBatches):
        pass

    Skips.skipped = skipped
    plain, fused = assert_equal_runs(Skips, max_steps=8, accumulate_grad_batches=accumulate)
    for p, q in zip(plain.module.parameters(), fused.module.parameters(), strict=True):
        assert float(plain.optimizer.state[p]["step"]) == float(fused.optimizer.state[q]["step"])


# ---------------------------------------------------------------- schedules


def schedule_cases() -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """Schedulers that change what a step reads: learning rate, momentum, betas."""
    return {
        "one_cycle_betas": ("adamw", partial(OneCycleLR, max_lr=1e-2, total_steps=25)),
        "one_cycle_momentum": ("sgd_nesterov", partial(OneCycleLR, max_lr=5e-2, total_steps=25)),
        "one_cycle_rmsprop": ("rmsprop_momentum", partial(OneCycleLR, max_lr=1e-3, total_steps=25)),
        "one_cycle_nadam": ("nadam", partial(OneCycleLR, max_lr=1e-2, total_steps=25)),
        "warm_up_from_zero": ("adamw", partial(LinearLR, start_factor=1e-8, total_iters=10)),
        "step": ("lion", partial(StepLR, step_size=5, gamma=0.1)),
    }


@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
@pytest.mark.parametrize("name", schedule_cases())
def test_schedules(name: str) -> None:
    """Every step reads the live parameter groups."""
    optimizer, schedule = schedule_cases()[name]
    make = partial(Module, optimizer=OPTIMIZERS[optimizer], schedule=schedule)
    plain, fused = assert_equal_runs(make)
    assert plain.optimizer.param_groups[0]["lr"] == fused.optimizer.param_groups[0]["lr"]


class Plateau(Module):
    """An epoch schedule that follows the training loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch)
        assert loss is not None
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.net.parameters())
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


def test_plateau() -> None:
    """ReduceLROnPlateau sees the same losses and takes the same decisions."""
    plain, fused = assert_equal_runs(Plateau, data=partial(tokens, 4), max_steps=-1, max_epochs=5)
    assert plain.optimizer.param_groups[0]["lr"] == fused.optimizer.param_groups[0]["lr"] < 3e-3


# ---------------------------------------------------------------- Trainer options and callbacks


class Validated(Plateau):
    """Logs a validation loss and counts what Lightning calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.net, batch))

    def val_dataloader(self) -> DataLoader[Any]:
        return tokens(2, seed=2)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net.parameters())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append("on_before_backward")

    def on_after_backward(self) -> None:
        self.calls.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"on_train_batch_end at {self.trainer.global_step}")

    def on_validation_epoch_end(self) -> None:
        self.calls.append("on_validation_epoch_end")


TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    "limit_batches": {"limit_train_batches": 4, "max_epochs": 3, "limit_val_batches": 1},
    "limit_fraction": {"limit_train_batches": 0.25, "max_epochs": 2},
    "overfit": {"overfit_batches": 2, "max_epochs": 4},
    "validation_inside_epoch": {"val_check_interval": 7, "max_epochs": 1},
    "accumulate_with_validation": {"accumulate_grad_batches": 4, "val_check_interval": 5, "max_epochs": 2},
    "max_steps_inside_epoch": {"max_steps": 13, "accumulate_grad_batches": 2},
    "detect_anomaly": {"detect_anomaly": True, "max_steps": 4},
    "fast_dev_run": {"fast_dev_run": 3},
    "barebones": {"barebones": True, "max_epochs": 1, "logger": None, "enable_checkpointing": None},
}


@pytest.mark.filterwarnings("ignore:.*barebones.*")
@pytest.mark.filterwarnings("ignore:.*You requested to overfit.*")
@pytest.mark.parametrize("name", TRAINER_OPTIONS)
def test_trainer_options(name: str) -> None:
    """Options that change which batches are seen: same weights, and the same hooks in the same order."""
    options = {"max_steps": -1} | TRAINER_OPTIONS[name]
    plain, fused = assert_equal_runs(Validated, **options)
    assert plain.module.calls == fused.module.calls
    assert "on_before_optimizer_step" in plain.module.calls


def callback_cases() -> dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]]:
    """Callbacks that change or copy weights, stop, or change the window."""
    return {
        "early_stopping": (
            lambda: [EarlyStopping("loss", patience=1, min_delta=0.05, check_on_train_epoch_end=True)],
            {"max_epochs": 10, "max_steps": -1, "limit_train_batches": 5},
        ),
        "ema": (lambda: [EMAWeightAveraging(decay=0.8)], {"max_epochs": 2, "max_steps": -1}),
        "swa": (
            lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=2, annealing_epochs=1)],
            {"max_epochs": 4, "max_steps": -1, "limit_train_batches": 5},
        ),
        "accumulation_schedule": (
            lambda: [GradientAccumulationScheduler({1: 2, 2: 5})],
            {"max_epochs": 4, "max_steps": -1, "limit_train_batches": 7},
        ),
    }


@pytest.mark.parametrize("name", callback_cases())
def test_callbacks(name: str) -> None:
    """Lightning's callbacks lead to the same weights."""
    callbacks, options = callback_cases()[name]
    plain, fused = assert_equal_runs(Validated, callbacks=callbacks, **options)
    assert plain.module.calls == fused.module.calls


def test_ema_copies_stay_apart() -> None:
    """A copy of the module that is taken while it trains is not updated with it."""

    class Copy(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                self.twin = copy.deepcopy(pl_module.net)
                self.weights = [p.detach().clone() for p in pl_module.net.parameters()]

    keep = Copy()
    run = fit(Module(), callbacks=[keep], max_steps=6)
    for copied, then, now in zip(keep.twin.parameters(), keep.weights, run.module.net.parameters(), strict=True):
        assert torch.equal(copied, then)
        assert not torch.equal(copied, now)


def test_learning_rate_monitor_and_logs(tmp_path: Any) -> None:
    """The logged learning rates and losses are those of the plain run, at the same steps."""

    def run(strategy: str) -> list[dict[str, float]]:
        logger = CSVLogger(tmp_path, strategy)
        fit(Plateau(), strategy, logger=logger, callbacks=[LearningRateMonitor()], log_every_n_steps=1)
        with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
            return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]

    plain, fused = run("auto"), run("forge")
    assert any("lr-AdamW" in row for row in plain) and any("loss_step" in row for row in plain)
    for expected, got in zip(plain, fused, strict=True):
        assert got == pytest.approx(expected, abs=1e-5)


def test_model_checkpoint(tmp_path: Any) -> None:
    """ModelCheckpoint writes the same files with the same weights."""

    def run(strategy: str) -> dict[str, dict[str, Tensor]]:
        folder = tmp_path / strategy
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1, save_last=True)
        fit(Module(), strategy, callbacks=[saver], enable_checkpointing=True, max_steps=10)
        return {path.name: torch.load(path)["state_dict"] for path in sorted(folder.iterdir())}

    plain, fused = run("auto"), run("forge")
    assert list(plain) == list(fused) and len(plain) == 3
    for name in plain:
        for key, value in plain[name].items():
            assert (value - fused[name][key]).abs().max() <= 1e-6


def test_learning_rate_finder() -> None:
    """Tuner.lr_find trains, restores and leaves a module that then trains as plainly."""

    class Tuned(Module):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=self.lr)

    def run(strategy: str) -> tuple[list[float], list[Tensor]]:
        module = Tuned()
        trainer = pl.Trainer(**(QUIET | {"max_steps": 5}), strategy=strategy)
        finder = Tuner(trainer).lr_find(module, tokens(), num_training=15, max_lr=0.1)
        assert finder is not None
        trainer.fit(module, tokens())
        return finder.results["loss"], [p.detach() for p in module.parameters()]

    (plain_losses, plain), (fused_losses, fused) = run("auto"), run("forge")
    assert fused_losses == pytest.approx(plain_losses, abs=1e-5)
    for p, q in zip(plain, fused, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- overridden module hooks


class OwnOptimizerStep(Module):
    """Lightning's documented patterns: warm-up inside `optimizer_step`, and a step every other batch."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer_closure()
            return
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (batch_idx + 1) / 10)
        optimizer.step(closure=optimizer_closure)


class OwnBackward(Module):
    """An overridden `backward` that scales the loss."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


class OwnBackwardInputs(Module):
    """An overridden `backward` that reaches only some of the weights."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(inputs=[self.net.up.weight, self.net.norm.weight])


class OwnZeroGrad(Module):
    """The override that Lightning's documentation shows."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)


class GradientInStep(Module):
    """Calls backward inside `training_step`, which `zero_grad` then forgets."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx).backward()
        assert all(p.grad is not None for p in self.net.parameters())
        return super().training_step(batch, batch_idx)


class LossInDictionary(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "more": batch_idx}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "module", [OwnOptimizerStep, OwnBackward, OwnBackwardInputs, OwnZeroGrad, GradientInStep, LossInDictionary]
)
def test_overridden_hooks(module: Callable[[], pl.LightningModule], accumulate: int) -> None:
    """Overrides of the module's own hooks keep their meaning."""
    assert_equal_runs(module, max_steps=8, accumulate_grad_batches=accumulate)


def test_step_every_other_batch_is_counted_once() -> None:
    """A closure that runs without the optimizer updates nothing."""
    run = fit(OwnOptimizerStep(), max_steps=6)
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {3.0}


class ZeroGrad(Module):
    """Uses layer `up` on even batches only; how gradients are zeroed is the subclass's."""

    set_to_none: bool | None = None

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.set_to_none is not None:
            optimizer.zero_grad(set_to_none=self.set_to_none)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 2:
            return self.net.embedding(batch[0]).square().mean()
        return super().training_step(batch, batch_idx)


class NeverZeroed(ZeroGrad):
    """Gradients add up over all steps."""


class ZeroedInPlace(ZeroGrad):
    """Unused parameters have zero gradients, so that their moments decay."""

    set_to_none = False


class SkipsAndZeroes(OwnOptimizerStep):
    """Gradients of a skipped step are dropped by the module's own zero_grad, not by the optimizer's."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad()


def test_zeroed_by_the_module() -> None:
    """Gradients of a step that was skipped do not come back in the next one."""
    assert_equal_runs(SkipsAndZeroes, max_steps=8)


class ScalesGradients(Module):
    """Changes gradients between backward and step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class FiltersGradients(Module):
    """Changes gradients after backward."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)


class LooksAtGradients(Module):
    """Reads gradients before they are dropped."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]


class CallbackLooks(pl.Callback):
    def on_before_zero_grad(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("callbacks", [[], [CallbackLooks()]], ids=["module", "callback"])
def test_hooks_without_gradients_hear_what_works(callbacks: list[Any]) -> None:
    """The warning names the two ways to what such hooks are for."""
    who = "CallbackLooks" if callbacks else "LooksAtGradients"
    with pytest.warns(match=rf"{who}: on_before_zero_grad finds no .*gradient_clip_val=.*callbacks\.GradNorm"):
        fit(Module() if callbacks else LooksAtGradients(), callbacks=callbacks, max_steps=1)


@pytest.mark.parametrize("module", [ScalesGradients, FiltersGradients])
def test_hooks_that_change_gradients(module: Callable[[], pl.LightningModule]) -> None:
    """A module's hook that treats gradients, which are not there, is refused or warned of by its name."""
    hook = "on_before_optimizer_step" if module is ScalesGradients else "on_after_backward"
    with pytest.warns(match=hook):
        try:
            fit(module(), max_steps=2)
        except memopt.MemOptError as error:
            warnings.warn(str(error), stacklevel=1)


@pytest.mark.parametrize("module", [NeverZeroed, ZeroedInPlace])
def test_zero_grad_override_is_exact_or_refused(module: Callable[[], pl.LightningModule]) -> None:
    """A `zero_grad` that keeps gradients is not silently replaced by one that drops them."""
    try:
        assert_equal_runs(module, max_steps=8)
    except memopt.MemOptError as error:
        assert "zero_grad" in str(error)


def test_step_without_closure_is_refused() -> None:
    """Calling the closure and then a bare `optimizer.step()` would step on ordinary gradients: refused by name."""

    class Bare(Module):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            optimizer.step()

    with pytest.raises(memopt.UnsupportedError, match="found gradients of a backward pass that was not fused"):
        fit(Bare(), max_steps=2)


# ---------------------------------------------------------------- parameters that come and go


class Finetuning(BaseFinetuning):
    """Lightning's own way to unfreeze: a frozen trunk joins the optimizer as a group in epoch 1."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.up)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.up, optimizer)


def test_unfreezing() -> None:
    """Parameters unfrozen in the middle of training are taken in, by the plain run's arithmetic."""

    def trainable(net: nn.Module) -> list[nn.Parameter]:
        return [p for p in net.parameters() if p.requires_grad]

    make = partial(Module, groups=trainable)
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 4}
    plain, fused = assert_equal_runs(make, callbacks=lambda: [Finetuning()], **options)
    for run in (plain, fused):
        assert len(run.optimizer.param_groups) == 2
        steps = [float(run.optimizer.state[p]["step"]) for p in run.module.net.up.parameters()]
        assert steps == [8.0, 8.0]


class Freezes(pl.Callback):
    """Freezes a layer that is in the optimizer for steps 3 to 5."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.net.up.requires_grad_(not 3 <= trainer.global_step <= 5)


def test_freezing_for_a_while() -> None:
    """requires_grad may change from step to step."""
    _, fused = assert_equal_runs(Module, callbacks=lambda: [Freezes()], max_steps=9)
    assert float(fused.optimizer.state[fused.module.net.up.weight]["step"]) == 6


class GoesBack(pl.Callback):
    """Starts the moments anew at step 4; goes back to those of step 6, and of an empty optimizer, later."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        optimizer, step = trainer.optimizers[0], trainer.global_step
        if step == 2:
            self.empty = {**copy.deepcopy(optimizer.state_dict()), "state": {}}
        elif step == 4:
            optimizer.state.clear()
        elif step == 6:
            self.saved = copy.deepcopy(optimizer.state_dict())
        elif step in (8, 10, 14):
            optimizer.load_state_dict(copy.deepcopy(self.empty if step == 14 else self.saved))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd_momentum", "nadam", "rmsprop_centered"])
def test_callbacks_that_replace_states(optimizer: str) -> None:
    make = partial(Module, optimizer=OPTIMIZERS[optimizer])
    plain, fused = assert_equal_runs(make, callbacks=lambda: [GoesBack()])
    for param, name in zip(plain.module.parameters(), plain.weights, strict=True):
        ours = fused.optimizer.state[fused.module.get_parameter(name)]
        theirs = plain.optimizer.state[param]
        assert all(ours[key] == theirs[key] for key in ("step", "mu_product") if key in theirs)


def test_loaded_moments_keep_their_precision() -> None:
    """torch casts what it loads to the dtype of the weights."""

    class Reload(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                trainer.optimizers[0].load_state_dict(copy.deepcopy(trainer.optimizers[0].state_dict()))

    strategy = memopt.ForgeStrategy(state_dtype="float32")
    run = fit(Module(), strategy, precision="bf16-true", callbacks=[Reload()])
    assert {state["exp_avg"].dtype for state in run.optimizer.state.values()} == {torch.float32}


def test_parameters_without_optimizer_accumulate() -> None:
    """What is in no optimizer keeps its gradients, as in the plain run."""

    def half(net: Any) -> list[nn.Parameter]:
        return [net.up.weight, net.embedding.weight]

    plain, fused = assert_equal_runs(partial(Module, groups=half), max_steps=4)
    for run in (plain, fused):
        assert torch.equal(run.weights["net.down.weight"], Module().net.down.weight)
    torch.testing.assert_close(plain.module.net.down.weight.grad, fused.module.net.down.weight.grad)


# ---------------------------------------------------------------- several fits, command line, other verbs


def test_fit_twice() -> None:
    """A second `fit` of the same Trainer goes on; a second Trainer starts anew; both as plainly."""

    def run(strategy: str) -> Any:
        module = Module()
        trainer = pl.Trainer(**(QUIET | {"max_steps": 5}), strategy=strategy)
        trainer.fit(module, tokens())
        trainer.fit_loop.epoch_loop.max_steps = 9
        trainer.fit(module, tokens())
        assert trainer.global_step == 9
        return fit(module, strategy, max_steps=4)

    assert difference(run("auto"), run("forge")) <= 1e-6


def test_other_verbs() -> None:
    """validate, test and predict work before and after fit, on a module that is then plain."""

    class Verbs(Validated):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(self.net, batch))

        def predict_step(self, batch: Any) -> Tensor:
            return self.net(batch[0])

    def run(strategy: str) -> list[float]:
        module = Verbs()
        trainer = pl.Trainer(**(QUIET | {"max_steps": 5}), strategy=strategy)
        out = [trainer.validate(module, verbose=False)[0]["val_loss"]]
        trainer.fit(module, tokens())
        out.append(trainer.test(module, tokens(2), verbose=False)[0]["test_loss"])
        predictions = trainer.predict(module, tokens(2))
        assert predictions is not None
        return [*out, float(torch.cat(list(predictions)).sum())]

    assert run("forge") == pytest.approx(run("auto"), abs=1e-4)


class CliModule(Module):
    """No `configure_optimizers`: the command line's optimizer block makes one."""

    def __init__(self) -> None:
        super().__init__()

    def train_dataloader(self) -> DataLoader[Any]:
        return tokens()

    configure_optimizers = pl.LightningModule.configure_optimizers


@pytest.mark.parametrize("schedule", [False, True])
def test_optimizer_of_the_command_line(schedule: bool) -> None:
    """LightningCLI's ``optimizer:`` and ``lr_scheduler:`` blocks give the same run under both strategies."""
    arguments = ["fit", "--optimizer=Adam", "--optimizer.lr=0.003", "--trainer.max_steps=6"]
    arguments += [f"--trainer.{key}={str(value).lower()}" for key, value in QUIET.items()]
    if schedule:
        arguments += ["--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.9"]

    def run(strategy: str) -> dict[str, Tensor]:
        args = [*arguments, f"--trainer.strategy={strategy}"]
        cli = LightningCLI(CliModule, args=args, save_config_callback=None, seed_everything_default=0)
        assert cli.trainer.global_step == 6
        return cli.model.state_dict()

    plain, fused = run("auto"), run("forge")
    for name, weight in CliModule().state_dict().items():
        assert (plain[name] - fused[name]).abs().max() <= 1e-6
        assert not torch.equal(plain[name], weight)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_two_seeds_two_roundings(precision: str) -> None:
    """The strategy's seed matters for stochastic rounding of bf16 weights, and for nothing else."""
    runs = [fit(Module(), memopt.ForgeStrategy(seed=seed), precision=precision, max_steps=4) for seed in (0, 0, 1)]
    assert difference(runs[0], runs[1]) == 0
    assert (difference(runs[0], runs[2]) == 0) == (precision == "32-true")


def test_stochastic_rounding_moves_what_nearest_cannot() -> None:
    """At a learning rate far below bf16's resolution, weights move on average by the float32 run's distance.

    To nearest they stand still.
    """

    def make() -> Module:
        return Module(
            lambda: nn.Linear(64, 64, bias=False),
            partial(torch.optim.SGD, lr=1e-4, maximize=True),
            lambda net, batch: net(batch[0]).sum() / batch[0].sum() * 64,
        )

    def moved(strategy: Any) -> Tensor:
        class Constant(pl.Callback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                pl_module.net.weight.data.fill_(1.0)

        data = DataLoader(torch.utils.data.TensorDataset(torch.ones(40, 64)), batch_size=2)
        run = fit(make(), strategy, data, precision="bf16-true", max_steps=20, callbacks=[Constant()])
        return run.weights["net.weight"].float() - 1.0

    assert torch.equal(moved(memopt.ForgeStrategy(rounding="nearest")), torch.zeros(64, 64))
    # 20 steps of lr * 0.5 each (the gradient of sum / sum * 64 is 1/128 * 64 per weight and token pair).
    drift = moved("forge")
    expected = 20 * 1e-4 * 64 * 2 / 128
    # One step is 2^-7 with probability p = 1e-4 / 2^-7 per update: the mean of 4096 * 20 draws has this deviation.
    p = expected / 20 * 2**7
    deviation = 20 * 2**-7 * (p * (1 - p) / (4096 * 20)) ** 0.5
    assert abs(float(drift.mean()) - expected) < 5 * deviation
    assert float(drift.max()) <= 20 * 2**-7


def test_gradient_norm_hook_sees_nothing() -> None:
    """What runs between backward and step finds no gradient to look at, also in bf16 and float64."""
    for precision in ("bf16-true", "bf16-mixed", "64-true"):
        check = NoGradientLeft()
        fit(Module(Net), precision=precision, callbacks=[check], max_steps=3)  # type: ignore[arg-type]
        assert check.checks == 3
