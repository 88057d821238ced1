"""The Lightning strategies, and their names in Lightning's registry."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_memopt.strategies.forge import ForgeStrategy
from lightning_memopt.strategies.fused_step import fused_step

__all__ = ["ForgeStrategy", "fused_step", "register"]


def register() -> None:
    """Make ``Trainer(strategy="forge")`` known to Lightning; again is harmless."""
    if ForgeStrategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            ForgeStrategy.strategy_name,
            ForgeStrategy,
            description="Optimizer update fused into the backward pass",
        )
