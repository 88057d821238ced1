"""SGD with momentum and Nesterov's variant (Sutskever et al. 2013, in ``torch.optim.SGD``'s form)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor
from torch.optim import SGD

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.rules.base import Group, Rule, State


class SGDRule(Rule):
    """b <- momentum b + g;  w <- w - lr b, or w - lr (g + momentum b) with Nesterov; w - lr g without momentum."""

    optimizer = SGD
    scalar_names = ("lr", "momentum", "nesterov")
    counts: ClassVar[Mapping[str, float]] = {}

    def check(self, group: Group) -> None:
        """Also refuse dampening: torch leaves it out of a buffer's first step only, which a zero buffer cannot tell."""
        super().check(group)
        if group["momentum"] and group["dampening"]:
            raise UnsupportedError("SGD(dampening != 0) cannot be fused; set dampening=0.")

    def moments(self, group: Group) -> tuple[str, ...]:
        """The momentum buffer, if there is one. Zero at set-up, which gives torch's first step exactly."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def tile(self, group: Group) -> str:
        """See `kernels.tiles`: with and without a buffer."""
        return "sgd_momentum" if group["momentum"] else "sgd"

    def scalars(self, group: Group, state: State) -> dict[str, float]:
        """Learning rate and momentum."""
        return {
            "lr": float(group["lr"]),
            "momentum": float(group["momentum"]),
            "nesterov": float(bool(group["nesterov"])),
        }

    def update(self, w: Tensor, g: Tensor, g2: Tensor, moments: Sequence[Tensor], s: Mapping[str, float]) -> None:
        """In place on w and, if there is one, momentum_buffer."""
        step = g
        if moments:
            (buffer,) = moments
            buffer.mul_(s["momentum"]).add_(g)
            step = g.add(buffer, alpha=s["momentum"]) if s["nesterov"] else buffer
        w.add_(step, alpha=-s["lr"])
