"""A non-finite gradient reaches no weight and no state."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, Module, fit, tokens, vectors
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

import lightning_memopt as memopt

BAD_STEP = 2


class Poison(Module):
    """In step 2, the gradient that reaches the output of one layer is poisoned."""

    layer, value = "down", float("nan")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        handle = None
        if self.global_step == BAD_STEP:
            handle = getattr(self.net, self.layer).register_forward_hook(self.poison)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            if handle is not None:
                handle.remove()

    def poison(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        def spoil(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[3] = self.value
            return gradient

        output.register_hook(spoil)


def make(layer: str, value: float, optimizer: str = "adamw") -> Poison:
    module = Poison(optimizer=OPTIMIZERS[optimizer])
    module.layer, module.value = layer, value
    return module


def states(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: value.clone() for key, value in trainer.optimizers[0].state[p].items()}
        for name, p in module.named_parameters()
    }


# Poisoned layer -> the parameter whose gradient is complete first. Layers of the loop are used twice: what is spoilt at
# the second use of `norm` reaches `down` through its first.
LAYERS = {
    "down": "net.down.weight",
    "embedding": "net.embedding.weight",
    "norm": r"net.(down.weight|norm.(weight|bias))",
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
@pytest.mark.parametrize("layer", LAYERS)
def test_raise(layer: str, precision: str, value: float) -> None:
    """The error names the parameter and the step; nothing in the module or its optimizer is non-finite."""
    module = make(layer, value)
    with pytest.raises(memopt.NonFiniteError, match=rf"gradient of {LAYERS[layer]} is not finite at step 2") as error:
        fit(module, precision=precision)
    named = str(error.value).split("gradient of ")[1].split(" ")[0]
    before = fit(make(layer, value), precision=precision, max_steps=BAD_STEP)
    assert torch.equal(module.get_parameter(named), before.weights[named])
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skip(optimizer: str) -> None:
    """Under "skip" exactly the poisoned parameters stay as they are, state and step count included."""

    class Record(pl.Callback):
        def __init__(self) -> None:
            self.seen: dict[int, Any] = {}

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
            self.seen[trainer.global_step] = weights, states(trainer, pl_module)

    record = Record()
    strategy = memopt.ForgeStrategy(nonfinite="skip")
    with pytest.warns(match="Non-finite gradients at step"):
        run = fit(make("down", float("nan"), optimizer), strategy, callbacks=[record], max_steps=5)
    (before, old), (after, new) = record.seen[BAD_STEP], record.seen[BAD_STEP + 1]
    # The gradient is spoilt on its way out of `down`: head lies behind it, everything else in front.
    untouched = {name for name in before if torch.equal(before[name], after[name])}
    assert "net.down.weight" in untouched and "net.up.weight" in untouched
    for name in untouched:
        for key, value in old[name].items():
            assert torch.equal(value, new[name][key]), (name, key)
    for weights, state in record.seen.values():
        assert all(torch.isfinite(w).all() for w in weights.values())
        assert all(torch.isfinite(v).all() for s in state.values() for v in s.values())
    assert not torch.equal(run.weights["net.down.weight"], after["net.down.weight"])
    assert float(run.trainer.callback_metrics["skipped_updates"]) == len(untouched)


def test_skips_are_logged(tmp_path: Path) -> None:
    """The count of left-out updates is in the logs, at the step of the first one."""
    logger = CSVLogger(tmp_path)
    with pytest.warns(match="Non-finite"):
        fit(make("embedding", float("inf")), memopt.ForgeStrategy(nonfinite="skip"), logger=logger, max_steps=5)
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        counts = [float(row["skipped_updates"]) for row in csv.DictReader(file) if row.get("skipped_updates")]
    assert counts and counts[-1] == 1


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("layer", ["down", "embedding"])
def test_accumulated(layer: str, accumulate: int) -> None:
    """A poisoned gradient of an earlier micro-batch spoils the sum, and is refused at the step."""
    with pytest.raises(memopt.NonFiniteError, match=f"{LAYERS[layer]} is not finite at step 2"):
        fit(make(layer, float("nan")), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("algorithm", ["value", "norm"])
def test_clipping_does_not_hide_it(algorithm: str) -> None:
    """Clamping would turn infinity into a number: it is refused before."""
    with pytest.raises(memopt.NonFiniteError, match="not finite at step 2"):
        fit(make("down", float("inf")), gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)


class Rows(Module):
    """A weight of two slabs; in step 1 the gradient of one output, in the second slab, is poisoned."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(512, 1024, bias=False), partial(torch.optim.AdamW, lr=0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.net(batch[0])
        if batch_idx == 1:
            y.register_hook(lambda g: g.index_fill(1, torch.tensor([1000]), float("nan")))
        return y.square().mean()


@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_nothing_written_across_slabs(mode: Any) -> None:
    """A weight that is updated in several parts is left out as a whole."""
    module = Rows()
    try:
        run = fit(module, memopt.ForgeStrategy(nonfinite=mode), vectors(512), max_steps=2)
        assert float(run.optimizer.state[module.net.weight]["step"]) == 1
    except memopt.NonFiniteError:
        assert mode == "raise"
    assert torch.equal(module.net.weight, fit(Rows(), data=vectors(512), max_steps=1).weights["net.weight"])


def test_finite_runs_are_silent(recwarn: pytest.WarningsRecorder) -> None:
    """Without a non-finite gradient there is neither a warning nor a metric."""
    run = fit(Module(), memopt.ForgeStrategy(nonfinite="skip"), tokens(), max_steps=3)
    assert "skipped_updates" not in run.trainer.callback_metrics
    assert not [w for w in recwarn if "finite" in str(w.message)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_overflow_of_the_weight_gradient(optimizer: str) -> None:
    """Finite factors whose product overflows float32 are refused as well."""

    class Huge(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            y = self.net(batch[0] * 1e30)
            y.register_hook(lambda g: torch.full_like(g, 1e30))
            return y.sum()

    make_net: Callable[[], nn.Module] = partial(nn.Linear, 8, 8)
    module = Huge(make_net, OPTIMIZERS[optimizer])
    with pytest.raises(memopt.NonFiniteError, match=r"net\.weight is not finite at step 0"):
        fit(module, data=vectors(), max_steps=1)
    assert torch.equal(module.net.weight, Huge(make_net).net.weight)
