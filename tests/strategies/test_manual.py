"""Manual optimization with `fused_step`: one module serves both strategies, and misuse is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, NoGradientLeft, assert_equal_runs, fit, vectors
from torch import Tensor, nn

import lightning_memopt as memopt


class Manual(pl.LightningModule):
    """A network trained by hand; subclasses write the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))

    def loss_of(self, batch: Any, scale: float = 1.0) -> Tensor:
        return (self.net(batch[0] * scale) - scale).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)


class Simple(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss_of(batch)
        with memopt.fused_step(optimizer):
            self.manual_backward(loss)
        optimizer.step()


class ForwardInside(Manual):
    """Forward pass, zero_grad and step inside the context."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with memopt.fused_step(optimizer):
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(batch))
            optimizer.step()


class PlainBackward(Manual):
    """``loss.backward()`` instead of ``self.manual_backward(loss)``."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with memopt.fused_step(optimizer):
            self.loss_of(batch).backward()
        optimizer.step()


class Accumulates(Manual):
    """Two ordinary backward passes, then the fused one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for scale in (0.5, 2.0):
            self.manual_backward(self.loss_of(batch, scale))
            assert all(p.grad is not None for p in self.parameters())
        with memopt.fused_step(optimizer):
            self.manual_backward(self.loss_of(batch))
        optimizer.step()


class AccumulatesOverBatches(Manual):
    """A step every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if (batch_idx + 1) % 3:
            self.manual_backward(self.loss_of(batch))
            return
        with memopt.fused_step(optimizer):
            self.manual_backward(self.loss_of(batch))
        optimizer.step()
        optimizer.zero_grad()


class ClipsOutside(Manual):
    """Gradients of the passes outside are ordinary ones, which may be clipped."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch, 2.0))
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        with memopt.fused_step(optimizer):
            self.manual_backward(self.loss_of(batch))
        optimizer.step()


class Clips(Manual):
    """The same clipping under both strategies."""

    algorithm: Any = "value"

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch, 2.0))
        with memopt.fused_step(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm=self.algorithm):
            self.manual_backward(self.loss_of(batch))
        optimizer.step()


class ClipsByNorm(Clips):
    algorithm = "norm"


class NoBackward(Manual):
    """A context without a backward pass consumes what was accumulated before."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx % 2:
            self.manual_backward(self.loss_of(batch))
        with memopt.fused_step(optimizer):
            pass
        optimizer.step()


class Closure(Manual):
    """``optimizer.step(closure)`` in manual optimization."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss_of(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Scheduled(Manual):
    """A scheduler stepped by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        with memopt.fused_step(optimizer):
            self.manual_backward(self.loss_of(batch))
        optimizer.step()
        schedule.step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class SeparateLosses(Manual):
    """Two backward passes in one fused step that share no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        first, second = self.loss_of(batch), self.other(batch[0]).square().mean()
        with memopt.fused_step(optimizer):
            self.manual_backward(first)
            self.manual_backward(second)
        optimizer.step()


class SeparateLossesAccumulated(SeparateLosses):
    """As before, after an ordinary pass that reached all weights."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss_of(batch, 2.0) + self.other(batch[0]).mean())
        optimizer = self.optimizers()
        first, second = self.loss_of(batch), self.other(batch[0]).square().mean()
        with memopt.fused_step(optimizer):
            self.manual_backward(first)
            self.manual_backward(second)
        optimizer.step()


MODULES: list[type[Manual]] = [
    Simple,
    ForwardInside,
    PlainBackward,
    Accumulates,
    AccumulatesOverBatches,
    ClipsOutside,
    Clips,
    ClipsByNorm,
    NoBackward,
    Closure,
    Scheduled,
    SeparateLosses,
    SeparateLossesAccumulated,
]


@pytest.mark.parametrize("module", MODULES)
def test_one_module_serves_both_strategies(module: Callable[[], pl.LightningModule]) -> None:
    """The same module under the plain and the fused strategy: same weights and the same global step."""
    plain, fused = assert_equal_runs(module, data=vectors, max_steps=7)
    assert fused.trainer.global_step == plain.trainer.global_step == 7
    for p, q in zip(plain.module.parameters(), fused.module.parameters(), strict=True):
        a, b = plain.optimizer.state[p], fused.optimizer.state[q]
        assert float(a["step"]) == float(b["step"])


def test_gradients_are_consumed() -> None:
    """After the context no parameter holds a gradient."""
    check = NoGradientLeft()
    fit(Accumulates(), data=vectors(), callbacks=[check], max_steps=3)
    assert check.checks == 3


# ---------------------------------------------------------------- several optimizers


class Gan(pl.LightningModule):
    """Generator and discriminator with an optimizer each, as in Lightning's documentation."""

    toggle = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 1))

    def update(self, optimizer: Any, loss: Callable[[], Tensor]) -> None:
        if self.toggle:
            self.toggle_optimizer(optimizer)
        value = loss()
        optimizer.zero_grad()
        with memopt.fused_step(optimizer):
            self.manual_backward(value)
        optimizer.step()
        if self.toggle:
            self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generate, discriminate = self.optimizers()
        real, noise = batch[0], batch[0].flip(0).cos()
        target = partial(nn.functional.binary_cross_entropy_with_logits)

        def generator_loss() -> Tensor:
            score = self.discriminator(self.generator(noise))
            return target(score, torch.ones_like(score))

        def discriminator_loss() -> Tensor:
            good, bad = self.discriminator(real), self.discriminator(self.generator(noise).detach())
            return target(good, torch.ones_like(good)) + target(bad, torch.zeros_like(bad))

        self.update(generate, generator_loss)
        self.update(discriminate, discriminator_loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.9)),
            torch.optim.SGD(self.discriminator.parameters(), lr=1e-2, momentum=0.5),
        ]


class GanWithoutToggle(Gan):
    """The generator's loss also leaves gradients on the discriminator, which its own zero_grad forgets."""

    toggle = False


class GanJoint(Gan):
    """Both losses in one graph: the discriminator's gradient of the generator's loss counts as well."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generate, discriminate = self.optimizers()
        generate.zero_grad()
        discriminate.zero_grad()
        fake = self.generator(batch[0])
        self.manual_backward(self.discriminator(fake.detach()).square().mean())
        with memopt.fused_step(generate):
            self.manual_backward(self.discriminator(fake).mean())
        assert isinstance(self.trainer.strategy, memopt.ForgeStrategy) == all(
            p.grad is None for p in self.generator.parameters()
        )
        assert all(p.grad is not None for p in self.discriminator.parameters())
        with memopt.fused_step(discriminate):
            pass
        generate.step()
        discriminate.step()


class GanUneven(Gan):
    """The generator steps on every third batch only."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generate, discriminate = self.optimizers()
        if batch_idx % 3 == 0:
            self.update(generate, lambda: -self.discriminator(self.generator(batch[0])).mean())
        self.update(discriminate, lambda: self.discriminator(batch[0]).square().mean())


@pytest.mark.parametrize("module", [Gan, GanWithoutToggle, GanJoint, GanUneven])
def test_several_optimizers(module: Callable[[], pl.LightningModule]) -> None:
    """Each fused step updates its own optimizer's parameters only, and each step is counted."""
    plain, fused = assert_equal_runs(module, data=vectors, max_steps=10)
    assert fused.trainer.global_step == plain.trainer.global_step >= 10


# ---------------------------------------------------------------- misuse


class Forgotten(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch))
        optimizer.step()


class SecondContext(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            with memopt.fused_step(optimizer):
                self.manual_backward(self.loss_of(batch))


class NestedContext(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        with memopt.fused_step(one), memopt.fused_step(two):
            self.manual_backward(self.loss_of(batch))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[3])]


class ClippedTooLate(Manual):
    algorithm: Any = "value"

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with memopt.fused_step(optimizer):
            self.manual_backward(self.loss_of(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm=self.algorithm)


class NormClippedTooLate(ClippedTooLate):
    algorithm = "norm"


class TwoBackwards(Manual):
    """Two passes that touch the same weights, the second forward after the first backward."""

    early = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        second = self.loss_of(batch, 2.0) if self.early else None
        with memopt.fused_step(optimizer):
            self.manual_backward(self.loss_of(batch))
            self.manual_backward(self.loss_of(batch, 2.0) if second is None else second)


class TwoBackwardsEarly(TwoBackwards):
    """Both forwards before the first backward."""

    early = True


class Retained(Manual):
    """The same graph twice."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), self.loss_of(batch)
        with memopt.fused_step(optimizer):
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)


class RawOptimizer(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        with memopt.fused_step(self.optimizers(use_pl_optimizer=False)):
            self.manual_backward(self.loss_of(batch))


EARLY = "a weight was updated in this fused step before another backward pass"
LATE = "ClippedTooLate: .*Pass gradient_clip_val to"
AGAIN = "received another gradient after its update"


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (Forgotten, memopt.UnsupportedError, "Forgotten: .*with memopt.fused_step"),
        (SecondContext, memopt.UnsupportedError, "call optimizer.step.. after each"),
        (NestedContext, memopt.UpdateError, "already open; .* parameter groups of one optimizer"),
        (ClippedTooLate, memopt.UnsupportedError, LATE),
        (NormClippedTooLate, memopt.UnsupportedError, LATE),
        (TwoBackwards, memopt.UpdateError, AGAIN),
        (TwoBackwardsEarly, memopt.UpdateError, EARLY),
        (Retained, memopt.UpdateError, EARLY),
        (RawOptimizer, TypeError, "self.optimizers.., not AdamW"),
    ],
)
def test_misuse(module: type[Manual], error: type[Exception], message: str) -> None:
    """What cannot be exact is refused in words that name the way out."""
    with pytest.raises(error, match=message):
        fit(module(), data=vectors(), max_steps=2)


class SkipsBatch(Manual):
    """Goes on after an error that came before the backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with contextlib.suppress(MemoryError), memopt.fused_step(optimizer):
            if batch_idx == 1:
                raise MemoryError
            self.manual_backward(self.loss_of(batch))
        if batch_idx != 1:
            optimizer.step()


def test_an_error_before_the_backward_pass_leaves_the_step_open_to_another() -> None:
    skipping = fit(SkipsBatch(), data=vectors(), max_steps=3)
    assert skipping.trainer.global_step == 3


class NeverSteps(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        with memopt.fused_step(self.optimizers()):
            self.manual_backward(self.loss_of(batch))


def test_a_run_that_ends_without_its_step_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"ended without optimizer\.step\(\) after its last fused_step"):
        fit(NeverSteps(), data=vectors(), max_steps=-1, max_epochs=1, limit_train_batches=1)


def test_a_broken_run_does_not_haunt_the_next(tmp_path: Path) -> None:
    """A Trainer that saw an exception inside the context trains another module as a fresh one does."""
    trainer = pl.Trainer(**(QUIET | {"max_steps": 3}), strategy="forge")
    with pytest.raises(memopt.UpdateError):
        trainer.fit(TwoBackwards(), vectors())
    module = Simple()
    trainer.fit(module, vectors())
    for name, weight in fit(Simple(), "forge", vectors(), max_steps=3).weights.items():
        assert torch.equal(weight, module.get_parameter(name))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert (tmp_path / "after.ckpt").exists()
