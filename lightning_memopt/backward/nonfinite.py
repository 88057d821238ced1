"""Non-finite gradients: raising or counting, without waiting for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_memopt.errors import NonFiniteError

NonFinite = Literal["raise", "skip"]


class NonFiniteReports:
    """Turns "this update was left out" into an error or a count.

    The reference tells at once. GPU kernels set a flag on the device, which is copied to the host without waiting and
    looked at when a later step begins, so the error may come a step or two late; the weights are sound either way.

    Args:
        mode: Raise or count.
        together: Look at a step's flags two steps later, whether they have arrived or not: ranks that share flags must
            not raise at different steps.
    """

    def __init__(self, mode: NonFinite, together: bool = False) -> None:
        self.mode, self.together = mode, together
        self.skipped = 0
        self._spare: list[tuple[Tensor | None, torch.cuda.Event]] = []
        self._flags: deque[tuple[int, Sequence[str], Tensor, torch.cuda.Event]] = deque()

    def report(self, name: str, step: int, count: int = 1) -> None:
        """`count` updates, `name`'s among them, were left out at `step`.

        Raises:
            NonFiniteError: In mode ``"raise"``.
        """
        if self.mode == "raise":
            raise NonFiniteError(
                f"the gradient of {name} is not finite at step {step}; its weight and optimizer state were left as "
                "they were. Lower the learning rate, clip, or pass nonfinite='skip' to leave such updates out."
            )
        self.skipped += count

    def watch(self, step: int, names: Sequence[str], flags: Tensor) -> None:
        """Start copying the device's `flags` (int32, one for each name) to the host."""
        host, event = self._spare.pop() if self._spare else (None, torch.cuda.Event())
        if host is None or host.shape != flags.shape:
            host = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
        host.copy_(flags, non_blocking=True)
        event.record(torch.cuda.current_stream(flags.device))
        self._flags.append((step, names, host, event))

    def poll(self, wait: bool = False) -> None:
        """Report the flags that have arrived; with `wait`, all of them."""
        while self._flags and (wait or self._due()):
            step, names, host, event = self._flags.popleft()
            event.synchronize()
            told = host.tolist()
            self._spare.append((host, event))
            for name, flag in zip(names, told, strict=True):
                if flag:
                    self.report(name, step)

    def _due(self) -> bool:
        return len(self._flags) > 1 if self.together else self._flags[0][3].query()

    def clear(self) -> None:
        """Forget flags that have not arrived."""
        self._flags.clear()
