"""RAdam (Liu et al. 2020, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import RAdam

from lightning_memopt.rules.base import Group, Rule, State


class RAdamRule(Rule):
    """w <- w - m (plain + rectified / (sqrt(v) + eps)); one of the two step sizes is zero at any step."""

    optimizer = RAdam
    scalar_names = ("one_minus_beta1", "beta2", "one_minus_beta2", "plain_step", "rectified_step", "eps")
    aged_scalars = ("plain_step", "rectified_step")

    def moments(self, group: Group) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def tile(self, group: Group) -> str:
        """See `kernels.tiles.radam`."""
        return "radam"

    def scalars(self, group: Group, state: State) -> dict[str, float]:
        """The variance is rectified once its approximated length rho_t exceeds 5, as in torch."""
        beta1, beta2 = (float(b) for b in group["betas"])
        t = float(state["step"]) + 1
        bias2 = 1 - beta2**t
        size = float(group["lr"]) / (1 - beta1**t)
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 * t * beta2**t / bias2
        plain, rectified = size, 0.0
        if rho > 5:
            length = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
            plain, rectified = 0.0, size * (bias2 * length) ** 0.5
        return {
            "one_minus_beta1": 1 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "plain_step": plain,
            "rectified_step": rectified,
            "eps": float(group["eps"]),
        }

    def update(self, w: Tensor, g: Tensor, g2: Tensor, moments: Sequence[Tensor], s: Mapping[str, float]) -> None:
        """In place on w, exp_avg, exp_avg_sq."""
        m, v = moments
        m.lerp_(g, s["one_minus_beta1"])
        v.mul_(s["beta2"]).add_(g2, alpha=s["one_minus_beta2"])
        if s["rectified_step"]:
            w.addcdiv_(m, v.sqrt().add_(s["eps"]), value=-s["rectified_step"])
        else:
            w.add_(m, alpha=-s["plain_step"])
