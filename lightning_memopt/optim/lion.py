"""Lion as a torch optimizer, so that it also works without the fused strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import ParamsT

from lightning_memopt.optim.base import CheckedOptimizer
from lightning_memopt.optim.shards import placed_as

if TYPE_CHECKING:
    from lightning_memopt.rules.base import Rule


class Lion(CheckedOptimizer):
    """Sign of an interpolated momentum with decoupled decay (Chen et al. 2023, algorithm 2).

    State: ``exp_avg``, shape and dtype of the weight.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate; a third to a tenth of AdamW's is usual.
        betas: Interpolation for the update and decay of the momentum.
        weight_decay: Decoupled weight decay; three to ten times AdamW's is usual.

    Raises:
        ValueError: An argument out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _rule(self) -> Rule:
        from lightning_memopt.rules.lion import LionRule

        return LionRule()

    def _take_step(self) -> None:
        from lightning_memopt.optim.apply import check_steppable

        rule = self._rule()
        for group in self.param_groups:
            rule.check(group)
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                check_steppable(self, repr(tuple(param.shape)), param)
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                momentum = state["exp_avg"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                grad = placed_as(param, param.grad)
                grad = -grad if group.get("maximize") else grad
                param.add_(momentum.lerp(grad, 1 - beta1).sign_(), alpha=-group["lr"])
                momentum.lerp_(grad, 1 - beta2)
