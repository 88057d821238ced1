"""Adagrad (Duchi et al. 2011, figure 1, diagonal case)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Adagrad

from lightning_memopt.rules.base import Group, Rule, State
from lightning_memopt.rules.storage import Dense, Storage


class AdagradRule(Rule):
    """v <- v + g²;  w <- w - lr / (1 + (t-1) lr_decay) · g / (sqrt(v) + eps)."""

    optimizer = Adagrad
    scalar_names = ("step_size", "eps")

    def moments(self, group: Group) -> tuple[str, ...]:
        """The sum of squares."""
        return ("sum",)

    def tile(self, group: Group) -> str:
        """See `kernels.tiles.adagrad`."""
        return "adagrad"

    def storage(self, param: Tensor, group: Group, dtype: torch.dtype) -> tuple[Storage, ...]:
        """The sum starts at ``initial_accumulator_value``."""
        return (Dense("sum", dtype, slow=True, init=float(group["initial_accumulator_value"])),)

    def scalars(self, group: Group, state: State) -> dict[str, float]:
        """The decayed learning rate at t = state["step"] + 1."""
        size = float(group["lr"]) / (1 + float(state["step"]) * group["lr_decay"])
        return {"step_size": size, "eps": float(group["eps"])}

    def update(self, w: Tensor, g: Tensor, g2: Tensor, moments: Sequence[Tensor], s: Mapping[str, float]) -> None:
        """In place on w and sum."""
        (v,) = moments
        v.add_(g2)
        w.addcdiv_(g, v.sqrt().add_(s["eps"]), value=-s["step_size"])
