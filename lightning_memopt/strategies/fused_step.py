"""Fused updates in manual optimization."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.core.optimizer import LightningOptimizer

from lightning_memopt.strategies.mixin import ForgeMixin


@contextmanager
def fused_step(optimizer: LightningOptimizer, clip_value: float | None = None) -> Iterator[None]:
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
        clip_value: Clamp each element of the gradient to this magnitude (what ``self.clip_gradients`` would do with
            the ``"value"`` algorithm).

    Raises:
        UpdateError: A weight would be updated twice, by two backward passes in the context.
        UnsupportedError: ``optimizer.step()`` was not called since the last fused step.
        TypeError: `optimizer` is not what ``self.optimizers()`` returns.
    """
    if not isinstance(optimizer, LightningOptimizer):
        raise TypeError(f"fused_step takes an optimizer from self.optimizers(), not {type(optimizer).__name__}.")
    strategy = optimizer._strategy
    if not isinstance(strategy, ForgeMixin):
        yield
        return
    with strategy.open_manual_step(optimizer.optimizer, clip_value):
        yield
