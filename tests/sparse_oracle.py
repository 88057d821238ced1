"""Dense masked Adam with an age for every weight, in float64: what a run with SMET must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


class Oracle(pl.Callback):
    """Trains a float64 copy of the network on the same batches, by plain autograd and formulas of its own.

    Masks and ages are read from the callback under test before each step; everything else is computed here.

    Args:
        smet: The callback under test.
        loss: As the module's.
        scale: Factor of the learning rate of sparse weights.
        warmup: W.
        clip: Value of norm clipping.
        accumulate: Batches per step.
        by_age: Whether bias correction of sparse weights goes by age.

    Attributes:
        worst: Largest difference of a sparse weight so far, and of any other parameter in `worst_dense`.
        events: Changes of any mask.
    """

    def __init__(
        self,
        smet: Any,
        loss: Callable[[nn.Module, Any], Tensor],
        scale: float,
        warmup: int,
        clip: float | None = None,
        accumulate: int = 1,
        by_age: bool = True,
    ) -> None:
        self.smet, self.loss, self.scale, self.warmup = smet, loss, scale, warmup
        self.clip, self.accumulate, self.by_age = clip, accumulate, by_age
        self.net: nn.Module | None = None
        self.moments: dict[str, list[Tensor]] = {}
        self.steps = 0
        self.worst = self.worst_dense = 0.0
        self.events = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        import copy

        self.net = copy.deepcopy(pl_module.net).double()
        for name, param in self.net.named_parameters():
            self.moments["net." + name] = [torch.zeros_like(param), torch.zeros_like(param)]
        self.masks = self.smet.masks

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        masks, ages = self.smet.masks, self.smet.ages
        self.follow(masks)
        batch = [part.double() if part.is_floating_point() else part for part in batch]
        (self.loss(self.net, batch) / self.accumulate).backward()
        if (batch_idx + 1) % self.accumulate:
            return
        self.steps += 1
        group = trainer.optimizers[0].param_groups[0]
        self.step(masks, ages, group)

    def follow(self, masks: dict[str, Tensor]) -> None:
        """Weights that left the mask are zero; those that joined start without moments."""
        params = {"net." + name: param for name, param in self.net.named_parameters()}
        for name, mask in masks.items():
            self.events += int(not torch.equal(mask, self.masks[name]))
            fresh = mask & ~self.masks[name]
            with torch.no_grad():
                params[name][~mask] = 0
                for moment in self.moments[name]:
                    moment[fresh] = 0
        self.masks = masks

    @torch.no_grad()
    def step(self, masks: dict[str, Tensor], ages: dict[str, Tensor], group: dict[str, Any]) -> None:
        params = {"net." + name: param for name, param in self.net.named_parameters() if param.grad is not None}
        grads = {name: p.grad * masks[name] if name in masks else p.grad for name, p in params.items()}
        if self.clip is not None:
            norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
            grads = {name: g * min(1.0, float(self.clip / (norm + 1e-6))) for name, g in grads.items()}
        (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        for name, param in params.items():
            m, v = self.moments[name]
            lr, ramp, age = group["lr"], 1.0, self.steps
            if name in masks:
                lr = lr * self.scale
                shown = ages[name].double().clamp(min=1)
                ramp = (shown / self.warmup).clamp(max=1.0) if self.warmup else 1.0
                age = shown if self.by_age else self.steps
            g = grads[name]
            param.mul_(1 - lr * decay)
            m.mul_(beta1).add_(g * (1 - beta1))
            v.mul_(beta2).add_(g * g * (1 - beta2))
            update = lr * ramp * (m / (1 - beta1**age)) / ((v / (1 - beta2**age)).sqrt() + eps)
            param.sub_(update * masks[name] if name in masks else update)
            param.grad = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.accumulate:
            return
        masks = self.smet.masks
        for name, param in self.net.named_parameters():
            mine, full = dict(pl_module.net.named_parameters())[name].detach().double(), param.detach()
            if "net." + name in masks:  # a topology update that came before this hook
                full = full * (masks["net." + name] & self.masks["net." + name])
            error = float((mine - full).abs().max())
            if "net." + name in masks:
                self.worst = max(self.worst, error)
            else:
                self.worst_dense = max(self.worst_dense, error)
