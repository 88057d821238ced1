"""RMSprop (Tieleman & Hinton 2012; centred variant of Graves 2013), as ``torch.optim.RMSprop``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import RMSprop

from lightning_memopt.rules.base import Group, Rule, State


class RMSpropRule(Rule):
    """v <- a v + (1-a) g²;  w <- w - lr g / (sqrt(v - mean²) + eps), through a momentum buffer if asked for."""

    optimizer = RMSprop
    scalar_names = ("lr", "alpha", "one_minus_alpha", "momentum", "eps", "centered")

    def moments(self, group: Group) -> tuple[str, ...]:
        """Square average, then momentum buffer and gradient average where the group's options need them."""
        names = ["square_avg"]
        if group["momentum"] > 0:
            names.append("momentum_buffer")
        if group["centered"]:
            names.append("grad_avg")
        return tuple(names)

    def tile(self, group: Group) -> str:
        """See `kernels.tiles`: four variants by momentum and centring."""
        momentum = "_momentum" if group["momentum"] > 0 else ""
        return "rmsprop" + momentum + ("_centered" if group["centered"] else "")

    def scalars(self, group: Group, state: State) -> dict[str, float]:
        """No bias correction: nothing depends on the step."""
        alpha = float(group["alpha"])
        return {
            "lr": float(group["lr"]),
            "alpha": alpha,
            "one_minus_alpha": 1 - alpha,
            "momentum": float(group["momentum"]),
            "eps": float(group["eps"]),
            "centered": float(bool(group["centered"])),
        }

    def update(self, w: Tensor, g: Tensor, g2: Tensor, moments: Sequence[Tensor], s: Mapping[str, float]) -> None:
        """In place on w and the moments."""
        v, *rest = moments
        v.mul_(s["alpha"]).add_(g2, alpha=s["one_minus_alpha"])
        variance = v
        if s["centered"]:
            mean = rest[-1].lerp_(g, s["one_minus_alpha"])
            # Rounding can leave it below zero, where torch's root is NaN.
            variance = v.addcmul(mean, mean, value=-1).clamp_(min=0)
        denominator = variance.sqrt().add_(s["eps"])
        if s["momentum"]:
            w.add_(rest[0].mul_(s["momentum"]).addcdiv_(g, denominator), alpha=-s["lr"])
        else:
            w.addcdiv_(g, denominator, value=-s["lr"])
