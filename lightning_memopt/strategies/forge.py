"""``strategy="forge"``: the fused backward on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_memopt.backward import NonFinite
from lightning_memopt.compat import refusal
from lightning_memopt.kernels import Kernel, Rounding
from lightning_memopt.strategies.mixin import ForgeMixin


class ForgeStrategy(ForgeMixin, SingleDeviceStrategy):
    """Train on one device with each optimizer update fused into the backward pass.

    The optimizer stays the user's own and keeps torch's state keys, so checkpoints move between this strategy and plain
    Lightning. What cannot be done exactly is refused at set-up; ``docs/compatibility.md`` lists it.

    Args:
        rounding: How a bf16 weight is stored: ``"stochastic"`` (unbiased, reproducible) or to the ``"nearest"``.
        kernel: ``"auto"``, or one of ``"reference"``, ``"two_pass"``, ``"fused"`` for every parameter that allows it.
        nonfinite: What a NaN or infinite gradient does: ``"raise"`` an error that names parameter and step, or
            ``"skip"`` that update and count it in the logs. It never reaches a weight or a state.
        state_dtype: Moments of bf16 weights in the weight's precision (``"param"``, as torch) or in ``"float32"``.
        seed: Seed of stochastic rounding.
        checkpoint: Modules that run again in the backward pass instead of keeping their activations, by name pattern:
            ``["*.layers.*"]`` for the blocks of a transformer.
    """

    strategy_name = "forge"

    def __init__(
        self,
        rounding: Rounding = "stochastic",
        kernel: Kernel = "auto",
        nonfinite: NonFinite = "raise",
        state_dtype: Literal["param", "float32"] = "param",
        seed: int = 0,
        checkpoint: Sequence[str] = (),
    ) -> None:
        super().__init__(
            rounding=rounding,
            kernel=kernel,
            nonfinite=nonfinite,
            state_dtype=state_dtype,
            seed=seed,
            checkpoint=checkpoint,
            device="cpu",
        )
        self._parallel_devices: list[torch.device] = []

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices the Trainer chose: one. Lightning sets them after construction.

        Raises:
            UnsupportedError: The Trainer was given several devices.
        """
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise refusal("several devices", f"devices={len(devices)}")
        self._parallel_devices = devices
        if devices:
            self._root_device = devices[0]
