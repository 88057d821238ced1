"""Log the norm of the gradient, also where no gradient is ever stored."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.strategies.mixin import ForgeMixin


class GradNorm(pl.Callback):
    """Logs ``grad_norm``, the global 2-norm of an optimizer's gradients before clipping, after each step.

    Under a fused strategy the norm is a by-product of norm clipping, so it costs no further pass; with
    ``gradient_clip_val=.inf`` it is measured and nothing is clipped. Under other strategies it is read off the
    gradients.

    Args:
        per_parameter: Also log ``grad_norm/NAME`` for each parameter.
    """

    def __init__(self, per_parameter: bool = False) -> None:
        self.per_parameter = per_parameter
        self._seen: object = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a fused run that never forms the norm.

        Raises:
            UnsupportedError: Automatic optimization under a fused strategy without norm clipping.
        """
        self._seen = None
        if not isinstance(trainer.strategy, ForgeMixin) or not pl_module.automatic_optimization:
            return
        if not trainer.gradient_clip_val or trainer.gradient_clip_algorithm == "value":
            raise UnsupportedError(
                "GradNorm: under a fused strategy the norm is formed for norm clipping only. Set gradient_clip_val; "
                "gradient_clip_val=.inf (float('inf') in Python) measures the norm and clips nothing."
            )

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Under a plain strategy, gradients are complete and unclipped now."""
        if isinstance(trainer.strategy, ForgeMixin):
            return
        mine = {param for group in optimizer.param_groups for param in group["params"]}
        each = {n: p.grad.norm() for n, p in pl_module.named_parameters() if p in mine and p.grad is not None}
        if each:
            self._log(pl_module, torch.linalg.vector_norm(torch.stack(list(each.values()))), each)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Under a fused strategy, log what the step found, once for each step."""
        if not isinstance(trainer.strategy, ForgeMixin):
            return
        norms = trainer.strategy.updater.norms
        if norms is not None and norms is not self._seen:
            self._seen = norms
            self._log(pl_module, norms.total, norms.each)

    def _log(self, module: pl.LightningModule, total: torch.Tensor, each: dict[str, torch.Tensor]) -> None:
        module.log("grad_norm", total)
        if self.per_parameter:
            module.log_dict({f"grad_norm/{name}": norm for name, norm in each.items()})
