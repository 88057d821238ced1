"""Checkpoints move between plain and fused runs, resume bit for bit, and never hold half an update."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, Module, Net, Run, difference, fit, tokens
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import lightning_memopt as memopt

# Epochs of 10 batches: Lightning's loader starts over on resume, so runs are cut between epochs.
BATCHES = 10


def make(optimizer: str, **options: Any) -> Module:
    """A module with a schedule, so that resuming restores learning rates as well."""
    schedule = partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + 0.1 * step))
    return Module(optimizer=OPTIMIZERS[optimizer], schedule=schedule, **options)


def train(optimizer: str, strategy: Any, epochs: int, resume: Path | None = None, **options: Any) -> Run:
    """Train up to `epochs` epochs in all."""
    return fit(make(optimizer), strategy, tokens(BATCHES), resume, max_steps=-1, max_epochs=epochs, **options)


@pytest.mark.parametrize("order", [("auto", "forge"), ("forge", "auto")], ids=["plain_fused", "fused_plain"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moves_between_strategies(optimizer: str, order: tuple[str, str], tmp_path: Path) -> None:
    """A run cut in two, one half plain and one fused, equals the plain run in one piece."""
    first = train(optimizer, order[0], 1)
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = train(optimizer, order[1], 2, tmp_path / "half.ckpt")
    assert second.trainer.global_step == 2 * BATCHES
    assert difference(second, train(optimizer, "auto", 2)) <= 1e-6
    assert difference(second, first) > 1e-3


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd_nesterov", "rmsprop_momentum_centered", "nadam", "lion"])
def test_resume_is_bitwise(optimizer: str, precision: str, accumulate: int, tmp_path: Path) -> None:
    """An interrupted and resumed fused run equals the uninterrupted one in every bit, stochastic rounding included.

    Not under ``64-true``: Lightning restores weights while the module is still float32.
    """
    options = {"precision": precision, "accumulate_grad_batches": accumulate}
    half = train(optimizer, "forge", 1, **options)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = train(optimizer, "forge", 2, tmp_path / "half.ckpt", **options)
    whole = train(optimizer, "forge", 2, **options)
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name
    for p, q in zip(whole.module.parameters(), resumed.module.parameters(), strict=True):
        for key, value in whole.optimizer.state[p].items():
            assert torch.equal(value, resumed.optimizer.state[q][key]), key


def test_resume_keeps_wide_moments(tmp_path: Path) -> None:
    """Float32 moments of bf16 weights survive a resume, which torch alone would narrow."""
    strategy = partial(memopt.ForgeStrategy, state_dtype="float32")
    half = train("adamw", strategy(), 1, precision="bf16-true")
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = train("adamw", strategy(), 2, tmp_path / "half.ckpt", precision="bf16-true")
    whole = train("adamw", strategy(), 2, precision="bf16-true")
    assert difference(resumed, whole) == 0
    state = resumed.optimizer.state[resumed.module.net.up.weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_torchs_own(optimizer: str) -> None:
    """The optimizer's state has torch's keys, shapes, dtypes and values."""

    def states(precision: Any) -> list[dict[str, Any]]:
        runs = (train(optimizer, strategy, 1, precision=precision) for strategy in ("auto", "forge"))
        return [run.optimizer.state_dict() for run in runs]

    plain, fused = states("32-true")
    assert plain["param_groups"] == fused["param_groups"]

    def layout(state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {
            i: {key: (value.shape, value.dtype) for key, value in entries.items() if value is not None}
            for i, entries in state.items()
            if any(value is not None for value in entries.values())
        }

    assert layout(plain["state"]) == layout(fused["state"])
    # Quotients of sums that nearly cancel differ by processor in float32.
    plain, fused = states("64-true")
    for i, entries in plain["state"].items():
        for key, value in entries.items():
            if value is not None:
                torch.testing.assert_close(fused["state"][i][key], value, rtol=1e-9, atol=1e-12)


def test_new_parameters_of_a_longer_optimizer(tmp_path: Path) -> None:
    """A parameter that had no state in a plain checkpoint, as it never got a gradient, is given one."""

    class Half(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 0:
                return self.net.head(self.net.embedding(batch[0])).square().mean()
            return super().training_step(batch, batch_idx)

    def run(strategy: str, epochs: int, resume: Path | None = None) -> Run:
        return fit(Half(), strategy, tokens(BATCHES), resume, max_steps=-1, max_epochs=epochs)

    run("auto", 1).trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert difference(run("forge", 2, tmp_path / "half.ckpt"), run("auto", 2)) <= 1e-6


# ---------------------------------------------------------------- interrupted steps


class Breaks(Module):
    """Raises in step 3, at a place of the subclass's choice."""

    def at(self, place: str, step: int) -> None:
        if place == self.place and step == 3:
            raise self.error(f"broken at {place}")

    place, error = "", RuntimeError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("training_step", batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.at("forward", batch_idx)
        return loss

    def on_after_backward(self) -> None:
        self.at("after_backward", self.global_step)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("before_optimizer_step", self.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("batch_end", batch_idx)


class BreaksInBackward(Breaks):
    """Raises when the gradient of the embedding arrives: the layers behind it are updated already."""

    place = "backward"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def check(gradient: Tensor) -> None:
            self.at("backward", batch_idx)

        logits = self.net.embedding(batch[0])
        logits.register_hook(check)
        for layer in (self.net.up, torch.tanh, self.net.down, self.net.head):
            logits = layer(logits)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def interrupted(module: Breaks, folder: Path, saver: Callback, strategy: str = "forge") -> list[Path]:
    """The checkpoints that a broken run leaves."""
    with pytest.raises((RuntimeError, SystemExit), match=r"broken at|^1$"):
        fit(module, strategy, callbacks=[saver], enable_checkpointing=True, max_steps=6)
    return sorted(folder.rglob("*.ckpt"))


def savers(folder: Path) -> list[Callback]:
    """Both of Lightning's ways to save when something breaks."""
    return [
        ModelCheckpoint(folder, save_on_exception=True, every_n_epochs=100),
        OnExceptionCheckpoint(folder),
    ]


@pytest.mark.parametrize("saver", [0, 1], ids=["ModelCheckpoint", "OnExceptionCheckpoint"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_half_updated_weights_are_not_saved(error: Any, saver: int, tmp_path: Path) -> None:
    """After an exception inside backward, no resumable checkpoint is written, and a warning says so."""
    module = BreaksInBackward(lambda: Net(tied=False))
    module.error = error
    with pytest.warns(match="was not written: the last step broke off"):
        assert interrupted(module, tmp_path, savers(tmp_path)[saver]) == []


@pytest.mark.parametrize("place", ["training_step", "forward", "batch_end"])
def test_whole_steps_are_saved(place: str, tmp_path: Path) -> None:
    """After an exception outside of an update the checkpoint is written and resumes exactly."""
    module = Breaks()
    module.place = place
    (path,) = interrupted(module, tmp_path, savers(tmp_path)[0])
    steps = 4 if place == "batch_end" else 3
    saved = torch.load(path)
    assert saved["global_step"] == steps
    for name, weight in fit(Module(), max_steps=steps).weights.items():
        assert torch.equal(saved["state_dict"][name], weight)
    assert fit(Module(), ckpt_path=path, max_steps=6).trainer.global_step == 6


@pytest.mark.parametrize("place", ["after_backward", "before_optimizer_step"])
def test_uncounted_steps_are_not_saved(place: str, tmp_path: Path) -> None:
    """After backward all weights are one update ahead of Lightning's step count: not saved either."""
    module = Breaks()
    module.place = place
    with pytest.warns(match="was not written"):
        assert interrupted(module, tmp_path, savers(tmp_path)[0]) == []


@pytest.mark.parametrize("place", ["training_step", "after_backward"])
def test_exception_between_micro_batches(place: str, tmp_path: Path) -> None:
    """An exception in an earlier micro-batch of a window, where nothing was updated, leaves a checkpoint."""

    class Window(Breaks):
        def on_after_backward(self) -> None:
            self.seen = getattr(self, "seen", -1) + 1
            self.at("after_backward", self.seen)

    module = Window()
    module.place = place
    with pytest.raises(RuntimeError, match="broken"):
        fit(
            module,
            callbacks=savers(tmp_path)[:1],
            enable_checkpointing=True,
            max_steps=6,
            accumulate_grad_batches=3,
        )
    (path,) = tmp_path.rglob("*.ckpt")
    for name, weight in fit(Module(), max_steps=1, accumulate_grad_batches=3).weights.items():
        assert torch.equal(torch.load(path)["state_dict"][name], weight)


def test_load_after_a_broken_step(tmp_path: Path) -> None:
    """Restoring a checkpoint after a broken step makes the run whole again."""
    fit(Module(), max_steps=2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, max_steps=6, strategy="forge", enable_progress_bar=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(BreaksInBackward(), tokens())
    with pytest.warns(match=r"half\.ckpt was not written"):
        trainer.save_checkpoint(tmp_path / "half.ckpt")
    trainer.fit(Module(), tokens(), ckpt_path=tmp_path / "two.ckpt")
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    assert (tmp_path / "whole.ckpt").exists() and not (tmp_path / "half.ckpt").exists()


def test_half_updates_are_real() -> None:
    """The premise of the tests above: breaking in backward leaves some weights updated and others not."""
    module = BreaksInBackward(lambda: Net(tied=False))
    with pytest.raises(RuntimeError, match="broken"):
        fit(module, max_steps=6)

    class Whole(BreaksInBackward):
        place = ""

    whole = fit(Whole(lambda: Net(tied=False)), max_steps=3).weights
    assert torch.equal(module.net.embedding.weight, whole["net.embedding.weight"])
    assert not torch.equal(module.net.head.weight, whole["net.head.weight"])


# ---------------------------------------------------------------- saving at unusual times


class SavesInside(Module):
    """Saves from `training_step`, before anything was updated."""

    path = Path()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.trainer.save_checkpoint(self.path)
        return super().training_step(batch, batch_idx)


def test_save_inside_training_step(tmp_path: Path) -> None:
    """A checkpoint may be taken inside a step as long as no weight has moved, as in the plain run."""
    module = SavesInside()
    module.path = tmp_path / "inside.ckpt"
    fit(module, max_steps=4)
    for name, weight in fit(Module(), max_steps=2).weights.items():
        assert torch.equal(torch.load(module.path)["state_dict"][name], weight)


class WithNetwork(pl.LightningModule):
    """Keeps an nn.Module among its hyperparameters, which Lightning pickles into every checkpoint."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance of `nn.Module`")
def test_module_in_hyperparameters(tmp_path: Path) -> None:
    """Checkpoints of such a module are written and loaded, by the plain run and by the fused one."""
    torch.manual_seed(0)
    net = Net()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    fit(WithNetwork(net), callbacks=[saver], enable_checkpointing=True, max_steps=2)
    loaded = WithNetwork.load_from_checkpoint(tmp_path / "step=2.ckpt", weights_only=False)
    assert torch.equal(loaded.net.head.weight, net.head.weight)
    assert loaded.net(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 11)


def test_state_dict_is_plain(tmp_path: Path) -> None:
    """`state_dict` and the optimizer's state can be saved at any time, and hold tensors only."""

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            buffer = io.BytesIO()
            torch.save([pl_module.state_dict(), trainer.optimizers[0].state_dict()], buffer)
            buffer.seek(0)
            self.loaded = torch.load(buffer, weights_only=True)

    saves = Saves()
    run = fit(Module(), callbacks=[saves], max_steps=2)
    assert torch.equal(saves.loaded[0]["net.up.weight"], run.weights["net.up.weight"])
    assert float(saves.loaded[1]["state"][0]["step"]) == 2
