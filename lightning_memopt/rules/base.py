"""What an optimizer rule is: which state it keeps, its scalars for a step, and its element-wise update.

A rule is written once and launched in many ways (fused into the weight-gradient matmul, on a stored gradient,
or by plain torch on any device). It therefore knows nothing of autograd, Lightning or shapes: `update` sees tensors
in compute precision that broadcast together, and the kernels call the Triton tile function of the same name.

What every optimizer of ``torch.optim`` does around its own formula is done once, outside the rules
(`lightning_memopt.kernels.reference.apply_gradient` and its Triton twins):

    g <- clamp(scale * g, -clip, clip) + l2 * w        gradient scale and sign, value clipping, coupled decay
    g <- column_scale * g                              where moments are kept in other units: `optim.gefen_columns`
    w <- decay * w                                     decoupled weight decay
    w, moments <- rule.update(w, g, g2, moments)       g2 = g * g, or its mean over a block for shared moments
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.rules.storage import Dense, Storage

Group = dict[str, Any]
State = dict[str, Any]

# Columns shared by all rules in a parameter's row of device scalars; a rule's own scalars follow.
COMMON_SCALARS = ("scale", "clip", "l2", "decay")
# Moments that bf16 to nearest would freeze; see `Dense.slow`.
SLOW_MOMENTS = ("exp_avg_sq", "square_avg", "sum")


class Rule:
    """The update of one optimizer class. Stateless: one instance serves every parameter.

    Attributes:
        optimizer: The optimizer class this rule stands for.
        scalar_names: Names of the rule's own per-step scalars, in the order the kernels read them.
        counts: State entries that count steps, 0-dimensional float32, with their values before the first one.
        aged_scalars: Those of them that correct for how many steps the moments have seen. Moments of weights that were
            regrown (`lightning_memopt.sparsity`) have seen fewer than the parameter's others.
        decoupled: Whether weight decay multiplies the weight (AdamW) instead of joining the gradient (Adam).
        limit: Gradient elements of this magnitude or more are treated as those that are not finite.
        refused: Group options that must be falsy, each with what to do instead.
    """

    optimizer: ClassVar[type[Optimizer]]
    scalar_names: ClassVar[tuple[str, ...]]
    aged_scalars: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[Mapping[str, float]] = {"step": 0.0}
    decoupled: ClassVar[bool] = False
    limit: ClassVar[float] = float("inf")
    refused: ClassVar[Mapping[str, str]] = {
        "amsgrad": "set amsgrad=False (the running maximum is a third moment this rule does not keep)",
        "capturable": "set capturable=False (the step count is handled by the strategy)",
        "differentiable": "set differentiable=False (a fused update is not recorded by autograd)",
    }

    def check(self, group: Group) -> None:
        """Refuse options that would change the result if ignored.

        Raises:
            UnsupportedError: An option of `refused` is set in this parameter group.
        """
        for option, remedy in self.refused.items():
            if group.get(option):
                raise UnsupportedError(f"{self.optimizer.__name__}({option}=True) cannot be fused; {remedy}.")

    def prepare(self, optimizer: Optimizer) -> None:
        """Called before every step of `optimizer`; may replace the tensors of its states where they are `unsettled`."""

    def unsettled(self, state: State) -> bool:
        """Whether `prepare` is still to replace tensors of this state; later it may write to them only."""
        return False

    def moments(self, group: Group) -> tuple[str, ...]:
        """Names of the state tensors, torch's own keys, in the order `update` takes them."""
        raise NotImplementedError

    def tile(self, group: Group) -> str:
        """Name of the Triton tile function in `lightning_memopt.kernels.tiles` for this group's options."""
        raise NotImplementedError

    def storage(self, param: Tensor, group: Group, dtype: torch.dtype) -> tuple[Storage, ...]:
        """How each moment of `param` is stored; the default is a dense tensor of `dtype` with the weight's shape."""
        return tuple(Dense(name, dtype, slow=name in SLOW_MOMENTS) for name in self.moments(group))

    def init_state(self, param: Tensor, group: Group, storage: Sequence[Storage]) -> State:
        """The state torch's optimizer would hold before its first step on `param`."""
        state: State = {
            key: torch.tensor(value, dtype=torch.float32, device="cpu") for key, value in self.counts.items()
        }
        for moment in storage:
            state.update(moment.create(param))
        return state

    def settle_counters(self, state: State) -> None:
        """Bring entries that count steps back where a checkpoint or Lightning moved or cast them.

        They live on the CPU in float32, where `scalars` reads them without waiting for a device.
        """
        for key in self.counts:
            count = state[key]
            if count.dtype != torch.float32 or not count.is_cpu:
                state[key] = count.to("cpu", torch.float32)

    def settle_all(self, states: Sequence[State]) -> None:
        """`settle_counters` of many parameters, whose step counts become views of one tensor.

        Reading them all and counting a step of each then take one operation. A state that someone else gave a count of
        its own is found by the next call.
        """
        base = _base_of(states) if "step" in self.counts else None
        settled = base is not None and base.dtype == torch.float32 and base.is_cpu
        # States may have been exchanged between parameters, and their counts with them.
        settled = settled and [state["step"].storage_offset() for state in states] == list(range(len(states)))
        if settled and len(self.counts) == 1:
            return
        for state in states:
            self.settle_counters(state)
        if "step" in self.counts and not settled and states:
            together = torch.stack([state["step"] for state in states])
            for i, state in enumerate(states):
                state["step"] = together[i]

    def counters(self, state: State) -> State:
        """Copies of the entries that count steps."""
        return {key: state[key].clone() for key in self.counts}

    def scalars(self, group: Group, state: State) -> dict[str, float]:
        """The rule's own scalars for the update about to be taken, in float64, under `scalar_names`."""
        raise NotImplementedError

    def aged(self, group: Group, state: State, age: int) -> Mapping[str, Any]:
        """What `scalars` reads from the state, for a weight about to take its `age`-th update (the first is 1)."""
        return {**state, "step": age - 1}

    def cache_key(self, state: State) -> tuple[float, ...]:
        """What `scalars` reads from the state: parameters of one group with equal keys share their scalars."""
        return tuple([state[key].item() for key in self.counts])

    def cache_keys(self, states: Sequence[State]) -> list[tuple[float, ...]]:
        """`cache_key` of each state."""
        base = _base_of(states) if tuple(self.counts) == ("step",) else None
        if base is None:
            return [Rule.cache_key(self, state) for state in states]
        return [(step,) for step in base.tolist()]

    def advance(self, group: Group, state: State) -> None:
        """Count one update that was taken."""
        if "step" in self.counts:
            state["step"] += 1

    def advance_all(self, taken: Sequence[tuple[Group, State]]) -> None:
        """`advance` for many parameters, each with its group: one call into torch in place of one each."""
        if "step" in self.counts and taken:
            base = _base_of([state for _, state in taken])
            if base is not None:
                base.add_(1)
            else:
                torch._foreach_add_([state["step"] for _, state in taken], 1)

    def update(self, w: Tensor, g: Tensor, g2: Tensor, moments: Sequence[Tensor], s: Mapping[str, float]) -> None:
        """Take one step in place on `w` and `moments`: the reference every kernel is tested against.

        Args:
            w: Weight after decay, float32 or float64.
            g: Gradient after clipping and coupled decay, same shape and dtype.
            g2: Square of `g`, averaged over blocks where the second moment is shared.
            moments: In the order of `moments`, decoded to the dtype of `w`.
            s: `scalars` of this step.
        """
        raise NotImplementedError

    def common_scalars(self, group: Group) -> dict[str, float]:
        """Scalars every rule shares, without gradient scale and clip value, which belong to the step."""
        lr, weight_decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
        if self.decouples(group):
            return {"l2": 0.0, "decay": 1.0 - lr * weight_decay}
        return {"l2": weight_decay, "decay": 1.0}

    def decouples(self, group: Group) -> bool:
        """Whether this group's weight decay is decoupled (``decoupled_weight_decay`` of newer torch classes)."""
        return bool(group.get("decoupled_weight_decay", self.decoupled))


def _base_of(states: Sequence[State]) -> Tensor | None:
    """The tensor of which the step counts of these states are the elements, if there is one."""
    base: Tensor | None = states[0]["step"]._base if states else None
    if base is None or base.dim() != 1 or len(base) != len(states):
        return None
    bases = [state["step"]._base for state in states]
    return base if all(map(is_, bases, repeat(base))) else None
