"""The Lightning strategies, and their names in Lightning's registry."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_memopt.strategies.forge import ForgeStrategy
from lightning_memopt.strategies.forge_fsdp import ForgeFSDPStrategy
from lightning_memopt.strategies.fused_step import fused_step

__all__ = ["ForgeFSDPStrategy", "ForgeStrategy", "fused_step", "register"]


def register() -> None:
    """Make the strategies' names known to Lightning's Trainer; again is harmless."""
    described: dict[type[ForgeStrategy] | type[ForgeFSDPStrategy], str] = {
        ForgeStrategy: "Optimizer update fused into the backward pass",
        ForgeFSDPStrategy: "Optimizer update fused into the backward pass, sharded over devices by FSDP2",
    }
    for strategy, description in described.items():
        if strategy.strategy_name not in StrategyRegistry:
            StrategyRegistry.register(strategy.strategy_name, strategy, description=description)
