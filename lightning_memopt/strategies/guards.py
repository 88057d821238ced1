"""What acts on gradients beside the optimizer, and finds none here: clipping, zeroing, hooks."""

from __future__ import annotations

from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_memopt.backward import Clip, Updater
from lightning_memopt.compat import refusal


class GradientGuards(Strategy):
    """A strategy whose module, optimizers and precision plugin know that backward passes consume gradients."""

    updater: Updater

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Whether the module clips in its own way, and has in this step.
        self._clips_itself = self._clip_called = False
        # Optimizers with a fused step that is not closed yet.
        self._fused_optimizers: set[int] = set()

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _trainer_clip(self) -> Clip:
        return make_clip(self._trainer.gradient_clip_val or 0.0, self._trainer.gradient_clip_algorithm)

    def _warn_of_hooks(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Say which of the user's hooks will find no gradients."""
        for hook in ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"):
            holders = [module, *trainer.callbacks]  # type: ignore[attr-defined]
            names = [type(h).__name__ for h in holders if _is_users_own(h, hook)]
            if names:
                rank_zero_warn(
                    f"{', '.join(names)}: {hook} finds no gradients, and weights that are updated already, as both "
                    "happens in the backward pass. To clip gradients, pass Trainer(gradient_clip_val=...); to log "
                    "their norms, add the callback lightning_memopt.callbacks.GradNorm as well "
                    "(gradient_clip_val=float('inf') clips nothing)."
                )

    def _guard(self) -> None:
        """Replace what would act on gradients that are not there: clipping and zeroing.

        Lightning clips through the precision plugin, the last thing before the optimizer's own step. In automatic
        optimization that call now finishes a deferred step; after `fused_step` it comes too late. Zeroing an
        optimizer's gradients also drops its queued factors.
        """
        precision, module = self.precision_plugin, self.lightning_module
        assert module is not None
        self._clips_itself = any(is_overridden(h, module) for h in ("configure_gradient_clipping", "clip_gradients"))
        plain = type(precision).clip_gradients

        def clip_gradients(
            optimizer: Optimizer,
            clip_val: int | float = 0.0,
            gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
        ) -> None:
            if module.automatic_optimization:
                if self._clips_itself:
                    if self._clip_called:
                        raise refusal("self.clip_gradients called twice in one step", type(module).__name__)
                    self._clip_called = True
                    self.updater.finish(make_clip(clip_val, gradient_clip_algorithm))
                elif (clip := make_clip(clip_val, gradient_clip_algorithm)) != self.updater.clip:
                    changed = clip == self._trainer_clip()
                    feature = (
                        "gradient_clip_val changed in a step" if changed else "self.clip_gradients in another hook"
                    )
                    raise refusal(feature, type(module).__name__)
                else:
                    self.updater.refuse_late_changes()
            elif clip_val > 0 and (
                self.updater.stepping or id(getattr(optimizer, "optimizer", optimizer)) in self._fused_optimizers
            ):
                raise refusal("clip_gradients after fused_step", type(module).__name__)
            else:
                plain(precision, optimizer, clip_val, gradient_clip_algorithm)

        precision.clip_gradients = clip_gradients  # type: ignore[method-assign]
        for optimizer in self.optimizers:
            self._guard_zero_grad(optimizer, optimizer)
        for wrapper in self._lightning_optimizers:
            self._guard_zero_grad(wrapper, wrapper.optimizer)
        if is_overridden("optimizer_zero_grad", module):
            module.optimizer_zero_grad = MethodType(optimizer_zero_grad, module)  # type: ignore[method-assign]
        module.zero_grad = MethodType(zero_grad, module)  # type: ignore[method-assign]

    def _guard_zero_grad(self, holder: Any, optimizer: Optimizer) -> None:
        def zero_grad(set_to_none: bool = True) -> None:
            if not set_to_none:
                raise refusal("zero_grad(set_to_none=False)")
            self.updater.drop_queue(optimizer)
            type(optimizer).zero_grad(optimizer, set_to_none)

        holder.zero_grad = zero_grad

    def _unguard(self) -> None:
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        for holder in (*self.optimizers, *self._lightning_optimizers, self.lightning_module):
            holder.__dict__.pop("zero_grad", None)
        if self.lightning_module is not None:
            self.lightning_module.__dict__.pop("optimizer_zero_grad", None)


# The names under which bound methods pickle: an unpickled module finds its class's own.
def zero_grad(self: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
    """``LightningModule.zero_grad`` that also drops queued factors."""
    strategy = getattr(self._trainer, "strategy", None)
    if isinstance(strategy, GradientGuards) and strategy.lightning_module is self:  # not a copy of it
        if not kwargs.get("set_to_none", args[0] if args else True):
            raise refusal("zero_grad(set_to_none=False)")
        strategy.updater.drop_queue()
    type(self).zero_grad(self, *args, **kwargs)


def optimizer_zero_grad(self: pl.LightningModule, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
    """The module's own, which must not keep gradients over steps: a step that consumes them could not.

    A gradient of zeros shows whether it does.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    param = min(params, key=torch.Tensor.numel, default=None)
    if param is None or param.grad is not None:
        return type(self).optimizer_zero_grad(self, epoch, batch_idx, optimizer)
    param.grad = mark = torch.zeros_like(param)
    try:
        type(self).optimizer_zero_grad(self, epoch, batch_idx, optimizer)
        if param.grad is mark:
            raise refusal("optimizer_zero_grad that keeps gradients", type(self).__name__)
    finally:
        if param.grad is mark:
            param.grad = None


def _is_users_own(holder: object, hook: str) -> bool:
    """Whether the method, or what stands in its place, comes from outside Lightning and this package."""
    module = getattr(getattr(holder, hook), "__module__", None) or ""
    return module.partition(".")[0] not in ("lightning", "lightning_memopt")


def make_clip(clip_val: float, algorithm: str | None) -> Clip:
    """Lightning's two arguments as one; a value of 0 clips nothing, and no algorithm means the norm."""
    if clip_val <= 0:
        return Clip()
    if algorithm == GradClipAlgorithmType.VALUE:
        return Clip(value=float(clip_val))
    return Clip(norm=float(clip_val))
