"""Fused updates in manual optimization."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from lightning.pytorch.core.optimizer import LightningOptimizer

from lightning_memopt.strategies.guards import make_clip
from lightning_memopt.strategies.mixin import ForgeMixin


@contextmanager
def fused_step(
    optimizer: LightningOptimizer,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: Literal["norm", "value"] = "norm",
) -> Iterator[None]:
    """Let the backward pass inside update the parameters of `optimizer`, which then steps as usual.

    For modules with ``automatic_optimization = False``::

        optimizer = self.optimizers()
        with memopt.fused_step(optimizer):
            self.manual_backward(loss)
        optimizer.step()

    Backward passes outside the context accumulate ordinary gradients, which the next fused step of their optimizer
    includes. Parameters of other optimizers get ordinary gradients inside the context as well. Under a strategy that
    does not fuse, the context does nothing, so that one module serves both.

    Args:
        optimizer: What ``self.optimizers()`` returns, or one of them.
        gradient_clip_val: Clip as ``self.clip_gradients`` would between backward and step, where it comes too late.
        gradient_clip_algorithm: By global ``"norm"`` or by ``"value"``.

    Raises:
        UpdateError: A weight would be updated twice, by two backward passes in the context.
        UnsupportedError: ``optimizer.step()`` was not called since the last fused step.
        TypeError: `optimizer` is not what ``self.optimizers()`` returns.
    """
    if not isinstance(optimizer, LightningOptimizer):
        raise TypeError(f"fused_step takes an optimizer from self.optimizers(), not {type(optimizer).__name__}.")
    if isinstance(gradient_clip_val, LightningOptimizer):
        raise TypeError(
            "fused_step takes one optimizer. For one backward pass that updates all parameters, make them parameter "
            "groups of one optimizer; for several passes, open one fused_step after the other."
        )
    strategy = optimizer._strategy
    if not isinstance(strategy, ForgeMixin):
        yield
        if gradient_clip_val and strategy is not None and strategy.lightning_module is not None:
            strategy.lightning_module.clip_gradients(optimizer.optimizer, gradient_clip_val, gradient_clip_algorithm)
        return
    with strategy.open_manual_step(optimizer.optimizer, make_clip(gradient_clip_val or 0.0, gradient_clip_algorithm)):
        yield
