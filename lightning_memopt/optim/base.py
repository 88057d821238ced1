"""What this package's optimizers share: checks of their options, and a closure around the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class CheckedOptimizer(Optimizer, ABC):
    """A torch optimizer with checked options; a subclass says what a step is.

    Args:
        params: Parameters or parameter groups.
        defaults: Options of a group, under their usual names.

    Raises:
        ValueError: An option out of range.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        name = type(self).__name__
        numbers = {key: defaults[key] for key in ("lr", "betas", "eps", "weight_decay") if key in defaults}
        if min(value for key, value in numbers.items() if key != "betas") < 0 or not all(
            0 <= beta < 1 for beta in defaults["betas"]
        ):
            raise ValueError(f"{name}: {', '.join(f'{key}={value}' for key, value in numbers.items())}: out of range.")
        if defaults.get("rounding", "nearest") not in ("stochastic", "nearest"):
            raise ValueError(f"{name}: rounding={defaults['rounding']!r}; use 'stochastic' or 'nearest'.")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on every parameter that holds a gradient.

        Args:
            closure: Computes the loss anew, and its gradients.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    @abstractmethod
    def _take_step(self) -> None:
        """The step itself; gradients are not recorded."""
