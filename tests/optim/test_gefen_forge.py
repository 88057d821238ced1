"""Gefen inside the backward pass equals Gefen after it, and works through Lightning's Trainer, YAML and checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Module, Net, Run, assert_equal_runs, difference, fit, next_token_loss, tokens
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from torch import Tensor

import lightning_memopt as memopt

# Layers large enough for codes.
Wide = partial(Net, vocab=64, width=72, hidden=150)

# Matmuls in another order may round a code the other way. Its values are 1.6 % of the scale apart, and the error decays
# as the moment does, so a weight moves by at most this share of its way, lr 3e-3 at a time.
FLIP = 1e-4


def assert_few_differ(a: Run, b: Run) -> None:
    for name, weight in a.weights.items():
        assert ((weight - b.weights[name]).abs() > 1e-6).float().mean() < 0.01, name


def make(dtype: torch.dtype = torch.float32, **options: Any) -> Module:
    optimizer = partial(memopt.Gefen, **({"lr": 3e-3, "weight_decay": 0.1, "rounding": "nearest"} | options))
    return Module(lambda: Wide().to(dtype), optimizer, next_token_loss)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 0.1},
    ],
    ids=["plain", "accumulation", "clip_value", "clip_norm"],
)
def test_fused_runs_equal_plain_ones(options: dict[str, Any]) -> None:
    plain, fused = assert_equal_runs(make, tolerance=FLIP, max_steps=8, **options)
    assert_few_differ(plain, fused)
    for a, b in zip(plain.optimizer.state.values(), fused.optimizer.state.values(), strict=True):
        assert a.keys() == b.keys() and a["step"] == b["step"] == 8
        if "codebook" in a:
            assert torch.equal(a["codebook"], b["codebook"])
            codes = (a["exp_avg"].view(torch.int8).int() - b["exp_avg"].view(torch.int8).int()).abs()
            # Sums over micro-batches and norms have another order, by processor: rarely a code tips twice.
            assert codes.max() <= (2 if options and "gradient_clip_algorithm" not in options else 1)
            assert codes.float().mean() < 0.01


@pytest.mark.parametrize("kernel", ["reference", "two_pass"])
@pytest.mark.parametrize("codebook", ["curve", "table"])
def test_every_kernel_and_codebook(kernel: Any, codebook: str) -> None:
    strategy = memopt.ForgeStrategy(rounding="nearest", kernel=kernel)
    assert_equal_runs(partial(make, codebook=codebook), tolerance=FLIP, max_steps=6, strategy=strategy)


def test_bf16_weights_train_under_forge() -> None:
    run = fit(make(torch.bfloat16), "forge", precision="bf16-true", max_steps=20)
    assert all(torch.isfinite(weight).all() for weight in run.weights.values())
    states = [state for state in run.optimizer.state.values() if "codebook" in state]
    assert len(states) == 3 and all(state["exp_avg_sq"].dtype == torch.float32 for state in states)


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_resuming_under_forge_is_exact(tmp_path: Path, stop: int) -> None:
    # Lightning's loader starts over on resume, so the cut is between epochs.
    train = partial(fit, strategy="forge", data=tokens(stop), max_steps=-1)
    whole = train(make(), max_epochs=3)
    first = train(make(), max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = train(make(), max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
    assert difference(whole, resumed) == 0


def test_checkpoints_move_between_plain_and_fused_runs(tmp_path: Path) -> None:
    train = partial(fit, data=tokens(4), max_steps=-1)
    whole = train(make(), "auto", max_epochs=2)
    first = train(make(), memopt.ForgeStrategy(rounding="nearest"), max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = train(make(), "auto", max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert difference(whole, resumed) <= FLIP
    assert_few_differ(whole, resumed)


@pytest.mark.parametrize("strategy", ["auto", "forge"])
def test_a_run_goes_on_from_an_adamw_checkpoint(tmp_path: Path, strategy: str) -> None:
    adamw = Module(Wide, partial(torch.optim.AdamW, lr=3e-3), next_token_loss)
    fit(adamw, "auto", max_steps=5).trainer.save_checkpoint(tmp_path / "last.ckpt")
    run = fit(make(), strategy, max_steps=10, ckpt_path=tmp_path / "last.ckpt")
    assert all(int(state["step"]) == 10 for state in run.optimizer.state.values())
    assert sum("codebook" in state for state in run.optimizer.state.values()) == 3


def test_a_checkpoint_without_its_codebook_is_refused(tmp_path: Path) -> None:
    run = fit(make(), max_steps=3)
    run.trainer.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state.pop("codebook", None)
    torch.save(checkpoint, tmp_path / "lost.ckpt")
    with pytest.raises(memopt.UnsupportedError, match="no 'codebook'"):
        fit(make(), max_steps=5, ckpt_path=tmp_path / "lost.ckpt")


def test_a_layer_unfrozen_during_the_run() -> None:
    class Unfreeze(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.net.up.weight.requires_grad_(batch_idx >= 3)

    plain, fused = assert_equal_runs(make, tolerance=FLIP, max_steps=8, callbacks=lambda: [Unfreeze()])
    for run in (plain, fused):
        assert run.optimizer.state[run.module.net.up.weight]["step"] == 5


# ----------------------------------------------------------------------------------------------------------------- YAML
class Configurable(pl.LightningModule):
    """A module whose optimizer the command line chooses."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self.net, self.make_optimizer = Wide(), optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return next_token_loss(self.net, batch)

    def train_dataloader(self) -> Any:
        return tokens(batches=3)


def run_cli(tmp_path: Path, text: str, module: type[pl.LightningModule]) -> pl.Trainer:
    config = tmp_path / "config.yaml"
    trainer = "trainer: {accelerator: cpu, devices: 1, max_steps: 3, logger: false, enable_checkpointing: false, "
    config.write_text(trainer + "enable_progress_bar: false, strategy: forge}\n" + text)
    return LightningCLI(module, args=["fit", "--config", str(config)], save_config_callback=None).trainer


def test_yaml_optimizer(tmp_path: Path) -> None:
    text = "optimizer: {class_path: lightning_memopt.Gefen, init_args: {lr: 0.002, betas: [0.8, 0.99], block: 64}}\n"
    (optimizer,) = run_cli(tmp_path, text, Configurable).optimizers
    assert type(optimizer) is memopt.Gefen
    (group,) = optimizer.param_groups
    assert (group["lr"], tuple(group["betas"]), group["block"]) == (0.002, (0.8, 0.99), 64)


class Called(Configurable):
    """A module that is given its optimizer."""

    def __init__(self, optimizer: OptimizerCallable = memopt.Gefen) -> None:
        super().__init__(optimizer)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def test_yaml_optimizer_callable(tmp_path: Path) -> None:
    text = "model: {optimizer: {class_path: lightning_memopt.Gefen, init_args: {codebook: table}}}\n"
    (optimizer,) = run_cli(tmp_path, text, Called).optimizers
    assert type(optimizer) is memopt.Gefen and optimizer.param_groups[0]["codebook"] == "table"
