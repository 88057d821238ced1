"""Norm clipping and accumulation without stored gradients equal the plain run's."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, Module, Net, assert_equal_runs, fit, square_loss, tokens, vectors
from torch import nn
from torch.optim import AdamW

import lightning_memopt as memopt
from lightning_memopt.backward.slot import Slot
from lightning_memopt.callbacks import GradNorm
from lightning_memopt.kernels import norms
from lightning_memopt.kernels.norms import best_way, squared_norm, squared_norm_lookup, squared_norms

ALWAYS, NEVER = 0.05, 100.0
SHORT_WINDOW = {"accumulate_grad_batches": 3, "max_epochs": 9}  # 25 batches: the last window of an epoch holds one


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay, vectors with another rate and none."""
    params = list(net.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "lr": 1e-3, "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("options", [{}, SHORT_WINDOW], ids=["each_batch", "accumulate"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_rule(optimizer: str, options: dict[str, Any]) -> None:
    """A clip value that binds on every step, tied and reused weights, in float32 and float64."""
    make = partial(Module, optimizer=OPTIMIZERS[optimizer])
    assert_equal_runs(make, 1e-6, gradient_clip_val=ALWAYS, **options)
    assert_equal_runs(make, 1e-12, gradient_clip_val=ALWAYS, precision="64-true", **options)


@pytest.mark.parametrize("binds", ["always", "sometimes", "never", "infinite"])
@pytest.mark.parametrize("options", [{}, SHORT_WINDOW], ids=["each_batch", "accumulate"])
def test_clip_values(binds: str, options: dict[str, Any]) -> None:
    """Whether the norm exceeds the value on every step, on some, or on none; two parameter groups and a schedule."""
    sometimes = 1.0 if options else 1.6  # near the median norm of these runs
    clip = {"always": ALWAYS, "sometimes": sometimes, "never": NEVER, "infinite": float("inf")}[binds]
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    make = partial(Module, groups=two_groups, schedule=schedule)
    norms = Norms()
    assert_equal_runs(make, 1e-6, gradient_clip_val=clip, callbacks=lambda: [norms], **options)
    assert_equal_runs(make, 1e-12, gradient_clip_val=clip, precision="64-true", **options)
    exceeded = [norm > clip for norm in norms.seen]
    assert all(exceeded) == (binds == "always") and any(exceeded) == (binds in ("always", "sometimes"))


class Norms(pl.Callback):
    """Collects the norm of the fused run."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        norms = getattr(getattr(trainer.strategy, "updater", None), "norms", None)
        if norms is not None:
            self.seen.append(float(norms.total))


@pytest.mark.parametrize("per_parameter", [False, True])
def test_grad_norm_is_that_of_the_plain_run(per_parameter: bool) -> None:
    """The callback logs the same numbers under both strategies, without clipping anything."""

    def run(strategy: Any) -> dict[str, float]:
        ran = fit(
            Module(),
            strategy,
            max_steps=3,
            gradient_clip_val=float("inf"),
            callbacks=[GradNorm(per_parameter)],
            precision="64-true",
        )
        return {k: float(v) for k, v in ran.trainer.logged_metrics.items() if k.startswith("grad_norm")}

    plain, fused = run("auto"), run("forge")
    assert plain.keys() == fused.keys() and (len(plain) > 1) == per_parameter
    assert fused == pytest.approx(plain, rel=1e-7)


def test_grad_norm_without_clipping_is_refused() -> None:
    """The message names the way out."""
    with pytest.raises(memopt.UnsupportedError, match=r"gradient_clip_val=\.inf"):
        fit(Module(), callbacks=[GradNorm()])


class Layers(nn.Module):
    """Layers small enough that the tokens of a step pass the break-even in some and not in others."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 300)
        self.narrow = nn.Linear(300, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


@pytest.mark.parametrize("clip", [None, ALWAYS])
def test_break_even(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with more tokens than its factors are worth turns to one buffer, the other keeps factors: both exact."""
    folded: set[str] = set()
    plain_fold = Slot.fold

    def fold(self: Slot) -> bool:
        first = plain_fold(self)
        if self.buffer is not None:
            folded.add(self.name)
        return first

    monkeypatch.setattr(Slot, "fold", fold)
    make = partial(Module, net=Layers, loss=square_loss, optimizer=partial(AdamW, lr=1e-3))
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": clip}
    assert_equal_runs(make, 1e-12, data=partial(vectors, batch_size=2), precision="64-true", **options)
    assert folded == {"net.narrow.weight"}


@pytest.mark.parametrize("state_dtype", ["param", "float32"])
@pytest.mark.parametrize("passes", ["one", "accumulated", "used_twice"])
def test_precision_of_a_gradient_that_waits(passes: str, state_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the break-even, one product is stored as autograd stores it, to the bit; of sums less is rounded."""
    stored: list[torch.Tensor] = []
    plain_collect = Slot.collect

    def collect(self: Slot) -> Any:
        if self.name == "net.narrow.weight":
            assert self.buffer is not None
            stored.append(self.buffer)
        return plain_collect(self)

    class Twice(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.wide(x))
            return self.narrow(hidden) + self.narrow(hidden.square())

    class Plain(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            self.grad = module.net.narrow.weight.grad

    make = partial(Module, net=Twice if passes == "used_twice" else Layers, loss=square_loss)
    batches = 3 if passes == "accumulated" else 1
    options = {"max_steps": 1, "accumulate_grad_batches": batches, "precision": "bf16-true"}
    plain = Plain()
    fit(make(), "auto", data=vectors(), callbacks=[plain], **options)
    monkeypatch.setattr(Slot, "collect", collect)
    strategy = memopt.ForgeStrategy(state_dtype=state_dtype)
    fit(make(), strategy, data=vectors(), gradient_clip_val=ALWAYS, **options)
    (grad,) = stored
    assert grad.dtype == (torch.bfloat16 if state_dtype == "param" else torch.float32)
    if passes == "one":
        assert torch.equal(grad.bfloat16(), plain.grad)
    else:
        torch.testing.assert_close(grad.float(), plain.grad.float(), rtol=0, atol=2**-7 * float(plain.grad.abs().max()))


def test_what_does_not_wait_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied table's look-ups go into the same update as its factors: in float32, also where weights are bf16."""
    stored: list[torch.Tensor | None] = []
    plain_collect = Slot.collect

    def collect(self: Slot) -> Any:
        factors, grad = plain_collect(self)
        stored.append(grad if self.name == "net.embedding.weight" else None)
        return factors, grad

    monkeypatch.setattr(Slot, "collect", collect)
    fit(Module(), memopt.ForgeStrategy(), max_steps=2, precision="bf16-true")
    assert [grad.dtype for grad in stored if grad is not None] == [torch.float32] * 2


def test_queue_does_not_outlive_the_step() -> None:
    """No factor, buffer or held gradient is left after a step, an exception, or a step without loss."""

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            held = [slot.pending for slot in trainer.strategy.updater.slots.values()]
            assert any(held) == (trainer.fit_loop._should_accumulate())

    fit(Module(), callbacks=[Watch()], gradient_clip_val=ALWAYS, **SHORT_WINDOW)

    class Broken(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 4:
                raise RuntimeError("no more")
            return super().training_step(batch, batch_idx)

    strategy = memopt.ForgeStrategy()
    with pytest.raises(RuntimeError, match="no more"):
        fit(Broken(), strategy, gradient_clip_val=ALWAYS, **SHORT_WINDOW)
    assert not strategy.updater.slots


def test_step_without_loss_uses_the_earlier_micro_batches() -> None:
    """No loss for the last micro-batch of a window: plain Lightning steps on the others' gradient."""

    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 6 == 5 else super().training_step(batch, batch_idx)

    assert_equal_runs(Skips, 1e-12, gradient_clip_val=ALWAYS, precision="64-true", **SHORT_WINDOW)


def test_zero_grad_drops_the_queue() -> None:
    """A hook that zeroes the gradients in the middle of a window drops the factors with them."""

    class Zeroes(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 3 == 0:
                self.optimizers().zero_grad()

    assert_equal_runs(Zeroes, 1e-12, precision="64-true", **SHORT_WINDOW)


def test_input_changed_in_place_is_refused() -> None:
    """An activation that is refilled between micro-batches would change queued factors."""
    buffer = torch.zeros(4, 8)

    class Refills(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            buffer.copy_(batch[0])
            return self.net(buffer.detach().requires_grad_()).square().mean()

    module = Refills(net=lambda: nn.Linear(8, 80), loss=square_loss)
    with pytest.raises(memopt.UpdateError, match=r"net\.weight was changed in place"):
        fit(module, data=vectors(), accumulate_grad_batches=2)


class Override(Module):
    """Clips through the hook, to another value on odd steps."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        odd = self.trainer.global_step % 2
        self.clip_gradients(
            optimizer, gradient_clip_val=0.05 if odd else 0.01, gradient_clip_algorithm="norm" if odd else "value"
        )


def test_override_that_calls_clip_gradients() -> None:
    """The call inside the hook decides value and algorithm of a deferred step."""
    assert_equal_runs(Override, 1e-12, precision="64-true")
    assert_equal_runs(Override, 1e-12, precision="64-true", **SHORT_WINDOW)


def test_override_that_does_not_is_refused() -> None:
    """It would look for gradients that are not there; nothing is updated before the error."""

    class Silent(Module):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    module = Silent()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(memopt.UnsupportedError, match=r"Silent.*did not call Lightning's self\.clip_gradients"):
        fit(module)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_manual_optimization(algorithm: str) -> None:
    """`fused_step` clips as self.clip_gradients does under a plain strategy, earlier unfused passes included."""

    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(0.5 * self.loss(self.net, batch))
            with memopt.fused_step(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm):  # type: ignore[arg-type]
                self.manual_backward(self.loss(self.net, [t.flip(0) for t in batch]))
            optimizer.step()

    assert_equal_runs(Manual, 1e-12, precision="64-true")


def test_skipped_step_leaves_everything_untouched() -> None:
    """With a norm at hand, one bad gradient skips the whole step: weights, moments and step counts."""

    class Bad(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 3 else loss

    class Good(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 3 else super().training_step(batch, batch_idx)

    skipping = memopt.ForgeStrategy(nonfinite="skip")
    bad = fit(Bad(), skipping, tokens(8), max_epochs=1, gradient_clip_val=ALWAYS)
    good = fit(Good(), "forge", tokens(8), max_epochs=1, gradient_clip_val=ALWAYS)
    assert all(torch.equal(bad.weights[name], good.weights[name]) for name in good.weights)
    steps = {float(state["step"]) for state in bad.optimizer.state.values()}
    assert steps == {7.0} and bad.trainer.callback_metrics["skipped_updates"] > 0

    module = Bad()
    with pytest.raises(memopt.NonFiniteError, match=r"net\..* is not finite at step 3"):
        fit(module, gradient_clip_val=ALWAYS)
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments(reentrant: bool) -> None:
    """Recomputation is not a second use, and a weight shared by two segments is updated once."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for _ in range(2):
                x = x + checkpoint(lambda x: self.down(self.norm(self.up(x)).tanh()), x, use_reentrant=reentrant)
            return self.head(x)

    make = partial(Module, net=Checkpointed)
    assert_equal_runs(make, 1e-12, precision="64-true", gradient_clip_val=ALWAYS)
    assert_equal_runs(make, 1e-12, precision="64-true", **SHORT_WINDOW)
    assert_equal_runs(make, 1e-12, precision="64-true")


@pytest.mark.parametrize(("tokens", "out", "inputs"), [(3, 40, 30), (50, 4, 7), (5, 1, 1), (1, 9, 2), (0, 3, 2)])
@pytest.mark.parametrize("parts", [1, 3])
def test_squared_norm(tokens: int, out: int, inputs: int, parts: int) -> None:
    """Gram products, slabs, and a stored part, against the norm of the matrix itself."""
    generator = torch.Generator().manual_seed(tokens)
    factors = [
        (
            torch.randn(tokens, out, dtype=torch.float64, generator=generator),
            torch.randn(tokens, inputs, dtype=torch.float64, generator=generator),
        )
        for _ in range(parts)
    ]
    stored = torch.randn(out, inputs, dtype=torch.float64, generator=generator)
    gradient = sum(dy.t() @ x for dy, x in factors)
    assert isinstance(gradient, torch.Tensor)
    for grad, whole in ((None, gradient), (stored, gradient + stored)):
        result = squared_norm(factors, grad, torch.float64, best_way(factors, grad, torch.float64))
        torch.testing.assert_close(result, whole.square().sum(), rtol=1e-12, atol=1e-12)


def test_squared_norms_of_several_layers() -> None:
    """Some of them with the same input."""
    torch.manual_seed(0)
    x, other = torch.randn(5, 40, dtype=torch.float64), torch.randn(5, 30, dtype=torch.float64)
    pairs = [(torch.randn(5, n, dtype=torch.float64), x if n != 20 else other) for n in (30, 40, 20, 50, 60)]
    expected = torch.stack([(dy.t() @ x).square().sum() for dy, x in pairs])
    torch.testing.assert_close(squared_norms(pairs, torch.float64, "gram"), expected, rtol=1e-12, atol=0)


def test_layers_that_the_kernel_does_not_take_are_formed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only they: of others, as many as there are go into its launches. Each layer is asked about once in a step."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(40, n, bias=False) for n in (32, 7, 48, 64, 9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([layer(x) for layer in self.layers], 1)

    fused, asked = list[int](), list[int]()

    def fake_kernel(pairs: Any) -> torch.Tensor:
        fused.append(len(pairs))
        return torch.stack([(dy.t() @ x).square().sum() for dy, x in pairs])

    def in_kernel(dy: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> bool:
        asked.append(dy.shape[1])
        return dy.shape[1] % 8 == 0

    monkeypatch.setattr(norms, "_in_kernel", in_kernel)
    monkeypatch.setattr(norms, "_fused", fake_kernel)
    make = partial(Module, Mixed, loss=square_loss)
    assert_equal_runs(make, 1e-6, partial(vectors, 40), gradient_clip_val=ALWAYS, max_steps=3)
    assert fused == [3] * 3
    assert sorted(asked) == sorted([32, 7, 48, 64, 9] * 3)


def test_the_kernel_s_gain_counts_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between both limits, one pair of factors that the kernel takes, and no others."""
    pair = torch.zeros(24, 40), torch.zeros(24, 40)
    assert best_way([pair], None, torch.float32) == "slabs"
    monkeypatch.setattr(norms, "_in_kernel", lambda dy, x, dtype: True)
    assert best_way([pair], None, torch.float32) == "kernel"
    assert best_way([(dy[:12], x[:12]) for dy, x in [pair] * 2], None, torch.float32) == "slabs"
    assert best_way([pair], torch.zeros(40, 40), torch.float32) == "slabs"


@pytest.mark.parametrize("padding", [-1, 2])
def test_squared_norm_of_a_look_up(padding: int) -> None:
    """Tokens that share a row add up before they are squared; the padding row counts nothing."""
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(20, 3, dtype=torch.float64, generator=generator)
    indices = torch.randint(0, 6, (20,), generator=generator)
    gradient = torch.zeros(6, 3, dtype=torch.float64).index_add_(0, indices, dy)
    if padding >= 0:
        gradient[padding] = 0
    result = squared_norm_lookup(dy, indices, padding, torch.float64)
    torch.testing.assert_close(result, gradient.square().sum(), rtol=1e-12, atol=0)
    assert squared_norm_lookup(dy[:0], indices[:0], padding, torch.float64) == 0


def test_tokens_that_cancel_have_no_negative_square() -> None:
    """Rounding may leave their sum of products below zero, whose root is NaN, which a finite gradient has not."""
    for seed in range(50):
        dy = torch.randn(24, 4, 8, generator=torch.Generator().manual_seed(seed))
        dy = (dy - dy.mean(0)).flatten(0, 1)  # tokens of each row add up to zero, but for rounding
        assert 0 <= squared_norm_lookup(dy, torch.arange(96) % 4, -1, torch.float32) < 1e-3


class Tables(nn.Module):
    """Embeddings: looked up twice, with a padding row, tied to the head, and with options that fall back."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Embedding(11, 8)
        self.padded = nn.Embedding(11, 8, padding_idx=3)
        self.by_frequency = nn.Embedding(11, 8, scale_grad_by_freq=True)
        self.tied = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.twice(ids) + self.twice(ids.flip(0)) + self.padded(ids) + self.by_frequency(ids) + self.tied(ids)
        return self.head(x)


@pytest.mark.parametrize("options", [{}, SHORT_WINDOW, {"gradient_clip_val": ALWAYS}], ids=str)
def test_embeddings(options: dict[str, Any]) -> None:
    """A table's gradient is never formed, and its rows move as under a dense optimizer, decay included."""
    formed: list[tuple[int, ...]] = []
    make = partial(Module, net=Tables)
    assert_equal_runs(make, 1e-12, precision="64-true", **options)
    assert_equal_runs(make, 1e-6, **options)

    class Watch(pl.Callback):
        def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            table = module.net.twice.weight
            formed.extend([tuple(table.shape)] if table.grad is not None else [])

    fit(make(), callbacks=[Watch()], **options)
    assert not formed
