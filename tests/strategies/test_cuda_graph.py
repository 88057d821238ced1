"""The captured step gives the bits of the eager one; what cannot be captured is refused or runs eagerly."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, Module, fit, next_token_loss, tokens
from torch import nn

import lightning_memopt as memopt
from lightning_memopt.callbacks import GradNorm
from lightning_memopt.strategies.step_graph import CaptureError, StepGraph

GRAPH_RULES = {
    **OPTIMIZERS,
    "adamw8bit": partial(memopt.AdamW8bit, lr=3e-3),
    "gefen": partial(memopt.Gefen, lr=3e-3),
}


class Blocks(nn.Module):
    """An embedding, linear layers with dropout, LayerNorm and a head; wide enough for blocks of codes."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 128)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        self.norm, self.dropout = nn.LayerNorm(128), nn.Dropout(dropout)
        self.head = nn.Linear(128, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return self.head(x)


class Logged(Module):
    """Also logs its loss, as tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


@pytest.mark.parametrize("graph", [True, "auto"])
def test_needs_a_gpu(graph: Any) -> None:
    """On a CPU, True is refused with a sentence that names the way out; "auto" trains eagerly."""
    strategy = memopt.ForgeStrategy(cuda_graph=graph)
    if graph == "auto":
        plain = fit(Module(), "forge", max_steps=3)
        assert all(torch.equal(w, plain.weights[n]) for n, w in fit(Module(), strategy, max_steps=3).weights.items())
        return
    with pytest.raises(memopt.UnsupportedError, match=r"cuda_graph=True needs a CUDA GPU.*'auto'"):
        fit(Module(), strategy)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule that changes the learning rate at every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))


def run(optimizer: Any, graph: Any, **options: Any) -> Any:
    """50 steps on the GPU with dropout, a warm-up, and norm clipping."""
    torch.manual_seed(3)
    module = Logged(net=Blocks, optimizer=optimizer, schedule=warm_up, loss=options.pop("loss", next_token_loss))
    options = {
        "max_steps": 50,
        "max_epochs": 9,
        "accelerator": "gpu",
        "precision": "bf16-true",
        "gradient_clip_val": 0.5,
    } | options
    return fit(module, memopt.ForgeStrategy(cuda_graph=graph), tokens(25, 64), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16-true", "32-true", "bf16-mixed"])
@pytest.mark.parametrize("rule", GRAPH_RULES)
def test_same_bits(rule: str, precision: str) -> None:
    """Weights, states, logs and step counts of 50 steps, for every rule."""
    eager = run(GRAPH_RULES[rule], False, precision=precision)
    graphed = run(GRAPH_RULES[rule], True, precision=precision)
    assert all(torch.equal(w, graphed.weights[name]) for name, w in eager.weights.items())
    states = zip(eager.optimizer.state.values(), graphed.optimizer.state.values(), strict=True)
    for ours, theirs in states:
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(ours[k]), torch.as_tensor(theirs[k])) for k in ours)
    assert eager.trainer.global_step == graphed.trainer.global_step == 50
    assert eager.trainer.callback_metrics["loss_epoch"] == graphed.trainer.callback_metrics["loss_epoch"]


@pytest.mark.gpu
def test_replays_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first steps are replays, and none of them waits for the GPU."""
    replays = []
    plain = StepGraph.replay

    def replay(self: StepGraph, batch: Any) -> Any:
        replays.append(self)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(self, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(StepGraph, "replay", replay)
    run(OPTIMIZERS["adamw"], True, callbacks=[GradNorm()])
    assert len(replays) == 47 and len(set(map(id, replays))) == 1


@pytest.mark.gpu
def test_validation_and_checkpoints_between_replays(tmp_path: Any) -> None:
    """A run that validates, saves and is resumed ends with the bits of one that does not."""
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=25, save_top_k=-1)
    whole = run(OPTIMIZERS["adamw"], True, callbacks=[checkpoint], enable_checkpointing=True)
    torch.manual_seed(3)
    plain = run(OPTIMIZERS["adamw"], True)
    assert all(torch.equal(w, plain.weights[name]) for name, w in whole.weights.items())
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, "auto"])
def test_what_cannot_be_captured(graph: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A loss that waits for the GPU: refused by name, or run eagerly with the bits of an eager run."""

    def waits(net: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = next_token_loss(net, batch)
        return loss * (2.0 if loss.item() > 0 else 1.0)

    if graph is True:
        with pytest.raises(CaptureError, match="cannot be captured"):
            run(OPTIMIZERS["adamw"], True, loss=waits)
        return
    automatic, eager = run(OPTIMIZERS["adamw"], "auto", loss=waits), run(OPTIMIZERS["adamw"], False, loss=waits)
    assert all(torch.equal(w, automatic.weights[name]) for name, w in eager.weights.items())
