"""Adam and AdamW (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_memopt.rules.base import Group, Rule, State


class AdamRule(Rule):
    """m <- m + (1-b1)(g - m);  v <- b2 v + (1-b2) g²;  w <- w - lr/c1 · m / (sqrt(v)/sqrt(c2) + eps)."""

    optimizer: ClassVar[type[Optimizer]] = Adam
    scalar_names: ClassVar[tuple[str, ...]] = (
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "step_size",
        "inv_sqrt_bias2",
        "eps",
    )
    aged_scalars: ClassVar[tuple[str, ...]] = ("step_size", "inv_sqrt_bias2")

    def moments(self, group: Group) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def tile(self, group: Group) -> str:
        """One tile function serves Adam and AdamW: they differ in the common scalars only."""
        return "adam"

    def scalars(self, group: Group, state: State) -> dict[str, float]:
        """Bias corrections of step t = state["step"] + 1."""
        beta1, beta2 = (float(b) for b in group["betas"])
        t = float(state["step"]) + 1
        return {
            "one_minus_beta1": 1 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "step_size": float(group["lr"]) / (1 - beta1**t),
            "inv_sqrt_bias2": (1 - beta2**t) ** -0.5,
            "eps": float(group["eps"]),
        }

    def update(self, w: Tensor, g: Tensor, g2: Tensor, moments: Sequence[Tensor], s: Mapping[str, float]) -> None:
        """In place on w, exp_avg, exp_avg_sq."""
        m, v = moments
        m.lerp_(g, s["one_minus_beta1"])
        v.mul_(s["beta2"]).add_(g2, alpha=s["one_minus_beta2"])
        w.addcdiv_(m, v.sqrt().mul_(s["inv_sqrt_bias2"]).add_(s["eps"]), value=-s["step_size"])


class AdamWRule(AdamRule):
    """Adam with decoupled weight decay."""

    optimizer: ClassVar[type[Optimizer]] = AdamW
    decoupled = True
