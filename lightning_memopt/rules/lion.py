"""Lion (Chen et al. 2023, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from lightning_memopt.optim.lion import Lion
from lightning_memopt.rules.base import Group, Rule, State


class LionRule(Rule):
    """w <- w - lr sign(m + (1-b1)(g - m));  m <- m + (1-b2)(g - m)."""

    optimizer = Lion
    scalar_names = ("lr", "one_minus_beta1", "one_minus_beta2")
    counts: ClassVar[Mapping[str, float]] = {}
    decoupled = True

    def moments(self, group: Group) -> tuple[str, ...]:
        """The momentum."""
        return ("exp_avg",)

    def tile(self, group: Group) -> str:
        """See `kernels.tiles.lion`."""
        return "lion"

    def scalars(self, group: Group, state: State) -> dict[str, float]:
        """Nothing depends on the step."""
        beta1, beta2 = (float(b) for b in group["betas"])
        return {"lr": float(group["lr"]), "one_minus_beta1": 1 - beta1, "one_minus_beta2": 1 - beta2}

    def update(self, w: Tensor, g: Tensor, g2: Tensor, moments: Sequence[Tensor], s: Mapping[str, float]) -> None:
        """In place on w and exp_avg."""
        (m,) = moments
        w.add_(m.lerp(g, s["one_minus_beta1"]).sign_(), alpha=-s["lr"])
        m.lerp_(g, s["one_minus_beta2"])
