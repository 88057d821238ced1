"""NAdam (Dozat 2016, algorithm 2 with the momentum schedule of ``torch.optim.NAdam``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import NAdam

from lightning_memopt.rules.base import Group, Rule, State


def _mu(group: Group, t: float) -> float:
    return float(group["betas"][0]) * (1 - 0.5 * 0.96 ** (t * group["momentum_decay"]))


# Products of the momentum schedule over the first steps, by beta1 and decay; each list grows as weights age. In
# float32, as torch's running product is.
_PRODUCTS: dict[tuple[float, float], list[Tensor]] = {}


def _mu_product(group: Group, steps: int) -> Tensor:
    key = (float(group["betas"][0]), float(group["momentum_decay"]))
    products = _PRODUCTS.setdefault(key, [torch.ones((), dtype=torch.float32, device="cpu")])
    while len(products) <= steps and products[-1] > 0:
        products.append(products[-1] * _mu(group, len(products)))
    return products[min(steps, len(products) - 1)]


class NAdamRule(Rule):
    """Adam with Nesterov momentum: w <- w - (a g + b m) / (sqrt(v/c2) + eps)."""

    optimizer = NAdam
    scalar_names = (
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "g_step",
        "m_step",
        "inv_sqrt_bias2",
        "eps",
    )

    aged_scalars = ("g_step", "m_step", "inv_sqrt_bias2")
    counts: ClassVar[Mapping[str, float]] = {"step": 0.0, "mu_product": 1.0}

    def moments(self, group: Group) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def tile(self, group: Group) -> str:
        """See `kernels.tiles.nadam`."""
        return "nadam"

    def scalars(self, group: Group, state: State) -> dict[str, float]:
        """Step sizes of gradient and first moment at t = state["step"] + 1."""
        t, lr = float(state["step"]) + 1, float(group["lr"])
        beta1, beta2 = (float(b) for b in group["betas"])
        mu, mu_next = _mu(group, t), _mu(group, t + 1)
        product = float(state["mu_product"] * mu)  # in the tensor's float32, as torch does
        return {
            "one_minus_beta1": 1 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "g_step": lr * (1 - mu) / (1 - product),
            "m_step": lr * mu_next / (1 - product * mu_next),
            "inv_sqrt_bias2": (1 - beta2**t) ** -0.5,
            "eps": float(group["eps"]),
        }

    def aged(self, group: Group, state: State, age: int) -> Mapping[str, Any]:
        """The momentum schedule, too, starts anew with a weight."""
        return {"step": age - 1, "mu_product": _mu_product(group, age - 1)}

    def advance(self, group: Group, state: State) -> None:
        """Count the step and extend the momentum product."""
        super().advance(group, state)
        state["mu_product"] *= _mu(group, float(state["step"]))

    def advance_all(self, taken: Sequence[tuple[Group, State]]) -> None:
        """One by one, as each has a product of its own."""
        for group, state in taken:
            self.advance(group, state)

    def update(self, w: Tensor, g: Tensor, g2: Tensor, moments: Sequence[Tensor], s: Mapping[str, float]) -> None:
        """In place on w, exp_avg, exp_avg_sq."""
        m, v = moments
        m.lerp_(g, s["one_minus_beta1"])
        v.mul_(s["beta2"]).add_(g2, alpha=s["one_minus_beta2"])
        # torch's order of operations: near a large weight the two steps' roundings are what shows at all.
        denominator = v.sqrt().mul_(s["inv_sqrt_bias2"]).add_(s["eps"])
        w.addcdiv_(g, denominator, value=-s["g_step"]).addcdiv_(m, denominator, value=-s["m_step"])
