"""What a kernel needs to know of one parameter's update besides its gradient."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from lightning_memopt.kernels.active import Active, Entries
from lightning_memopt.kernels.memory import Memory
from lightning_memopt.rules.base import Rule
from lightning_memopt.rules.storage import Storage

Rounding = Literal["stochastic", "nearest"]
Beside = Literal["nothing", "barriers", "collectives"]


@dataclass(slots=True)
class Update:
    """One parameter, its state, and the scalars of the step; consumed by `lightning_memopt.kernels`.

    Attributes:
        name: Parameter name, for messages.
        weight: The tensor written in place: float32, bf16 or float64; any shape.
        state: The optimizer's state of this parameter, written in place.
        rule: Its rule.
        tile: Name of the rule's Triton tile function for this group's options.
        storage: How each moment of `rule` lies in `state`.
        scalars: Common and rule scalars of this step, float64 on the host.
        row: The same scalars as float32 on the weight's device, in the order ``COMMON_SCALARS + rule.scalar_names``
            (None where the reference runs). Kernels read these, so that neither a schedule nor a CUDA graph replay
            needs a new launch argument.
        key: Rounding key of this parameter and step; on the device in `row_key` (int32, the same bits).
        row_key: See `key`.
        rounding: How a bf16 weight, and a bf16 second moment, is stored; 8-bit ones do not ask.
        coefficient: Clip coefficient of the step, a 0-dimensional tensor on the weight's device, or None. In `row` it
            is part of the scale already.
        offset: Index of the weight's first element in the full parameter (not 0 on a shard).
        nonfinite: int32 device scalar set to 1 by a kernel that met a non-finite gradient element and left it out.
        active: For a sparse weight, which of its elements to update; its moments in `state` are compact, [1, active].
        memory: Where kernels keep what they need not find out again, or None. Not for parts of the weight.
        beside: What may run on the device meanwhile: barriers between devices, each of which takes room on one
            multiprocessor for as long as it waits, or collectives, which hold many.
        standing: Whoever holds this object for several steps sees to it that nothing changes but `scalars`, `key` and
            `coefficient`, and of the scalars not whether there is coupled decay. So `memory` need not compare it again.
        compared: State of `memory` that this update was compared with.
        entries: Set where `weight` holds the gathered active elements of a sparse one, [1, count].
    """

    name: str
    weight: Tensor
    state: MutableMapping[str, Any]
    rule: Rule
    tile: str
    storage: tuple[Storage, ...]
    scalars: Mapping[str, float]
    key: int
    rounding: Rounding
    coefficient: Tensor | None = None
    offset: int = 0
    row: Tensor | None = None
    row_key: Tensor | None = None
    nonfinite: Tensor | None = None
    active: Active | None = None
    entries: Entries | None = None
    memory: Memory | None = None
    beside: Beside = "nothing"
    standing: bool = field(default=False, init=False)
    compared: int = field(default=-1, init=False)

    def rows(self, start: int, stop: int) -> Update:
        """The same update restricted to rows [start, stop) of weight and state, by views."""
        if start == 0 and stop == self.weight.shape[0]:
            return self
        state = {key: value for storage in self.storage for key, value in storage.rows(self.state, start, stop).items()}
        offset = self.offset + start * self.weight[0].numel()
        return replace(self, weight=self.weight[start:stop], state=state, offset=offset, memory=None)
