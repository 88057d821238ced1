"""What the tests of the fused strategies share: a tiny model, its data, and runs through a real ``Trainer.fit``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.utils.data import DataLoader, TensorDataset

import lightning_memopt as memopt

MakeOptimizer = Callable[..., Optimizer]

# Every rule, with each option that changes its arithmetic. Learning rates are such that 20 steps amplify nothing.
OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "adamw": partial(AdamW, lr=3e-3, weight_decay=0.1),
    "adam": partial(Adam, lr=3e-3, weight_decay=0.1),
    "adam_decoupled": partial(Adam, lr=3e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "sgd": partial(SGD, lr=0.05, weight_decay=0.1),
    "sgd_momentum": partial(SGD, lr=0.02, momentum=0.9),
    "sgd_nesterov": partial(SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_maximize": partial(SGD, lr=0.01, momentum=0.5, maximize=True, weight_decay=0.1),
    "rmsprop": partial(RMSprop, lr=1e-3, eps=1e-3, weight_decay=0.1),
    "rmsprop_centered": partial(RMSprop, lr=1e-3, eps=1e-3, centered=True),
    "rmsprop_momentum": partial(RMSprop, lr=3e-4, eps=1e-3, momentum=0.9),
    "rmsprop_momentum_centered": partial(RMSprop, lr=3e-4, eps=1e-3, momentum=0.9, centered=True),
    "adagrad": partial(Adagrad, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1, weight_decay=0.1),
    "nadam": partial(NAdam, lr=3e-3, weight_decay=0.1),
    "nadam_decoupled": partial(NAdam, lr=3e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": partial(RAdam, lr=2e-2, weight_decay=0.1),
    "radam_decoupled": partial(RAdam, lr=2e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "lion": partial(memopt.Lion, lr=1e-3, weight_decay=0.1),
}


class Net(nn.Module):
    """Embedding, linear layers with and without bias, one of them used twice, LayerNorm, a tied head."""

    def __init__(self, tied: bool = True, vocab: int = 11, width: int = 8, hidden: int = 17) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)  # below 1, where 1e-6 is several float32 steps
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = x + self.down(torch.tanh(self.norm(self.up(x))))
        return self.head(x)


def next_token_loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
    """Cross-entropy of the second tensor of the batch under the model's logits of the first."""
    return nn.functional.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())


class Module(pl.LightningModule):
    """A network trained on what `loss` says, with the optimizer that `optimizer` makes of its parameters."""

    def __init__(
        self,
        net: Callable[[], nn.Module] = Net,
        optimizer: MakeOptimizer = OPTIMIZERS["adamw"],
        loss: Callable[[Any, Any], Tensor | None] = next_token_loss,
        groups: Callable[[nn.Module], Any] = lambda net: net.parameters(),
        schedule: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.loss = net(), loss
        self.make_optimizer, self.groups, self.schedule = optimizer, groups, schedule

    def forward(self, *inputs: Any) -> Any:
        return self.net(*inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.groups(self.net))
        if self.schedule is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"},
        }


def tokens(batches: int = 25, batch_size: int = 2, seed: int = 1) -> DataLoader[Any]:
    """Random token pairs, in a fixed order."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 11, (2, batches * batch_size, 5), generator=generator)
    return DataLoader(TensorDataset(*pairs), batch_size=batch_size)


def vectors(size: int = 8, batches: int = 25, batch_size: int = 4, seed: int = 1) -> DataLoader[Any]:
    """Random input vectors."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(batches * batch_size, size, generator=generator)
    return DataLoader(TensorDataset(data), batch_size=batch_size)


def square_loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean square of the outputs: a loss for any network on vectors."""
    return net(batch[0]).float().square().mean()


@dataclass
class Run:
    """A finished run."""

    module: Any
    trainer: pl.Trainer
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def optimizer(self) -> Optimizer:
        return self.trainer.optimizers[0]


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fit(
    module: pl.LightningModule,
    strategy: Any = "forge",
    data: Iterable[Any] | None = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Run:
    """Train `module` with a real Trainer on the CPU; `options` are the Trainer's."""
    options = QUIET | {"max_steps": 20} | options
    trainer = pl.Trainer(strategy=strategy, **options)
    trainer.fit(module, data if data is not None else tokens(), ckpt_path=ckpt_path)
    return Run(module, trainer, {name: p.detach().clone() for name, p in module.named_parameters()})


def difference(a: Run, b: Run) -> float:
    """Largest difference of any weight between two runs."""
    assert a.weights.keys() == b.weights.keys()
    pairs = [(weight.double(), b.weights[name].double()) for name, weight in a.weights.items() if weight.numel()]
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def assert_equal_runs(
    make: Callable[[], pl.LightningModule],
    tolerance: float = 1e-6,
    data: Callable[[], Iterable[Any]] = tokens,
    callbacks: Callable[[], list[Any]] = list,
    strategy: Any = None,
    **options: Any,
) -> tuple[Run, Run]:
    """Train the same module plainly and fused, and compare weights and step count.

    Returns:
        The plain and the fused run, for further checks.
    """
    plain = fit(make(), "auto", data(), callbacks=callbacks(), **options)
    fused = fit(make(), strategy or memopt.ForgeStrategy(rounding="nearest"), data(), callbacks=callbacks(), **options)
    start = make().to(next(plain.module.parameters()).dtype).parameters()
    assert any(not torch.equal(w, p.detach()) for w, p in zip(plain.weights.values(), start, strict=True))
    assert difference(plain, fused) <= tolerance
    assert plain.trainer.global_step == fused.trainer.global_step
    return plain, fused


class NoGradientLeft(pl.Callback):
    """Fails if a parameter of the stepping optimizer holds a gradient once the fused backward is through."""

    def __init__(self) -> None:
        self.checks = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.checks += 1
        held = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        assert not held, f"{len(held)} parameters hold a gradient after the fused backward"
