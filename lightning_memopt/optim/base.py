"""What this package's optimizers share: checks of their options, a closure around the step, and loading."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_memopt.optim.shards import is_flat_shard

if TYPE_CHECKING:
    from lightning_memopt.rules.base import Rule


class CheckedOptimizer(Optimizer, ABC):
    """A torch optimizer with checked options; a subclass says what a step is, and by which rule.

    Args:
        params: Parameters or parameter groups.
        defaults: Options of a group, under their usual names.

    Raises:
        ValueError: An option out of range, of the optimizer or of a group.
    """

    _warned = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self.check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.

        Raises:
            ValueError: An option out of range.
        """
        self.check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """See to it that the options of a group are in range.

        Raises:
            ValueError: They are not.
        """
        name = type(self).__name__
        numbers = {key: options[key] for key in ("lr", "betas", "eps", "weight_decay") if key in options}
        if min(value for key, value in numbers.items() if key != "betas") < 0 or not all(
            0 <= beta < 1 for beta in options["betas"]
        ):
            raise ValueError(f"{name}: {', '.join(f'{key}={value}' for key, value in numbers.items())}: out of range.")
        if options.get("rounding", "nearest") not in ("stochastic", "nearest"):
            raise ValueError(f"{name}: rounding={options['rounding']!r}; use 'stochastic' or 'nearest'.")

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

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch, but codes and scales keep their dtype.

        Moments that another optimizer of the family has kept whole (``torch.optim.AdamW``) are encoded where this one
        has codes; options of the groups that choose between torch's implementations are left out.

        Raises:
            UnsupportedError: It is the state of another optimizer, or of active weights only, or has codes without what
                they mean. The optimizer is then as it was.
            ValueError: An option of a group is out of range; likewise.
        """
        from lightning_memopt.optim.apply import load_exactly

        load_exactly(self, self._rule(), state_dict, super().load_state_dict)

    @property
    def on_flat_shards(self) -> bool:
        """Whether any parameter is a piece of one that FSDP1 has flattened."""
        return any(is_flat_shard(param) for group in self.param_groups for param in group["params"])

    def _warn_on_flat_shards(self, message: str) -> None:
        """Say once what becomes of flat shards, if there are any."""
        if not self._warned and self.on_flat_shards:
            self._warned = True
            warnings.warn(message, stacklevel=4)

    @abstractmethod
    def _rule(self) -> Rule:
        """The rule of its steps; imported when called, as rules import the optimizers they stand for."""

    @abstractmethod
    def _take_step(self) -> None:
        """The step itself; gradients are not recorded."""
