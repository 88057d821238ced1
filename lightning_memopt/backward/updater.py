"""The updater: decides when a parameter's gradient is complete and hands it to its rule.

Autograd itself says when. Each parameter has one AccumulateGrad node; the engine runs it once every use of the
parameter in the backward pass has delivered, whether by a gradient tensor or, from `FusedLinear`, by nothing. The
updater hooks that node: what `FusedLinear` queued (factors) plus what autograd summed (``.grad``) is the exact
gradient, all dX that need the old weight are formed, and the update may run. No counting of layers, no guess about
tied or reused weights.

The one exception is reentrant activation checkpointing, which runs a backward pass of its own for each segment, so
that a node may run before other segments have used the weight. There a weight is updated at once only if it was used
once in this step, and else at the end of the outer pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memopt.backward.linear import SLOT, install, remove
from lightning_memopt.backward.scalars import StepScalars
from lightning_memopt.errors import NonFiniteError, UnsupportedError, UpdateError
from lightning_memopt.kernels import Factors, Kernel, Rounding, Update, apply_factors, apply_gradient
from lightning_memopt.rules import Rule, rule_for
from lightning_memopt.rules.storage import Dense, Storage

NonFinite = Literal["raise", "skip"]


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter of one optimizer, and what the current step knows of it."""

    updater: Updater
    name: str
    param: nn.Parameter
    optimizer: Optimizer
    group: dict[str, Any]
    rule: Rule
    node: Node
    handle: RemovableHandle | None = None
    uses: int = 0
    factors: list[Factors] = field(default_factory=list)
    updated: bool = False
    scalars: Mapping[str, float] = field(default_factory=dict)
    key: int = 0
    row: Tensor | None = None
    row_key: Tensor | None = None
    nonfinite: Tensor | None = None

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's own state of this parameter; looked up, as loading a checkpoint replaces it."""
        return self.optimizer.state[self.param]

    def count_use(self) -> None:
        """Called by the layer's forward. Recomputation inside backward is not another use."""
        if not self.updater.in_backward:
            self.uses += 1

    def take(self, dy: Tensor, x: Tensor) -> bool:
        """Queue the factors of one use, dY [tokens, out] and x [tokens, in], if this pass updates the parameter."""
        if not self.updater.takes(self):
            return False
        self.factors.append((dy, x))
        return True

    def clear(self) -> None:
        """Forget the step."""
        self.uses, self.updated = 0, False
        self.factors.clear()


class Updater:
    """Applies optimizer rules inside backward, for all optimizers of a run.

    Args:
        rounding: How a bf16 weight is stored.
        kernel: Which kernels to use, see `lightning_memopt.kernels.dispatch`.
        nonfinite: What a non-finite gradient does: stop the run, or leave that update out.
        state_dtype: Precision of the moments of bf16 weights: that of the weight (torch's own), or float32.
        seed: Seed of stochastic rounding.
    """

    def __init__(
        self,
        rounding: Rounding,
        kernel: Kernel,
        nonfinite: NonFinite,
        state_dtype: Literal["param", "float32"],
        seed: int,
    ) -> None:
        self.rounding, self.kernel, self.nonfinite = rounding, kernel, nonfinite
        self.state_dtype, self.seed = state_dtype, seed
        self.slots: dict[nn.Parameter, Slot] = {}
        self.dirty = False
        self.skipped = 0
        self.in_backward = False
        self._stepping: Optimizer | None = None
        self._step = 0
        self._task: int | None = None
        self._names: dict[nn.Parameter, str] = {}
        self._modules: list[nn.Module] = []
        self._scalars: dict[torch.device, StepScalars] = {}
        self._flags: deque[tuple[int, list[Slot], Tensor, torch.cuda.Event]] = deque()

    # ---------------------------------------------------------------- set-up

    def attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Check every parameter group, fill the optimizers' states and hook module and parameters.

        Raises:
            UnsupportedError: An optimizer, an option or a parameter that cannot be updated exactly.
        """
        self._names = {param: name for name, param in module.named_parameters()}
        for optimizer in optimizers:
            self._adopt(optimizer)
        self._modules = install(module)

    def detach(self) -> None:
        """Undo `attach`; weights and optimizer states stay."""
        remove(self._modules)
        for slot in self.slots.values():
            if slot.handle is not None:
                slot.handle.remove()
            if getattr(slot.param, SLOT, None) is slot:
                delattr(slot.param, SLOT)
        self.slots.clear()
        self._flags.clear()

    def _adopt(self, optimizer: Optimizer) -> None:
        """Take in the optimizer's trainable parameters, also those added or unfrozen since the last step."""
        rule = rule_for(optimizer)
        for group in optimizer.param_groups:
            rule.check(group)
            for param in group["params"]:
                slot = self.slots.get(param)
                if slot is None and param.requires_grad:
                    self._add(param, optimizer, group, rule)
                elif slot is not None and slot.optimizer is not optimizer:
                    raise UnsupportedError(
                        f"{slot.name} belongs to two optimizers; give each parameter to one of them only."
                    )
                elif slot is not None and slot.group is not group:
                    slot.group = group  # load_state_dict replaces the group dictionaries

    def _add(self, param: nn.Parameter, optimizer: Optimizer, group: dict[str, Any], rule: Rule) -> None:
        name = self._names.get(param, f"parameter of shape {tuple(param.shape)} (not in the module)")
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise UnsupportedError(
                f"{name} is {str(param.dtype).removeprefix('torch.')}; fused updates need float32, bfloat16 or float64 "
                "weights. Use precision='bf16-true', 'bf16-mixed', '32-true' or '64-true'."
            )
        node = get_gradient_edge(param).node
        slot = Slot(self, name, param, optimizer, group, rule, node)
        slot.handle = node.register_hook(lambda *_: self._ready(slot))
        self.slots[param] = slot
        setattr(param, SLOT, slot)
        self.fill_state(slot)

    def fill_state(self, slot: Slot) -> None:
        """Create the state entries that are missing, as torch would before the first step."""
        state, storage = slot.state, self.storage(slot)
        wanted = [key for moment in storage for key in moment.keys()]
        if not state or any(state.get(key) is None for key in wanted):
            for key, value in slot.rule.init_state(slot.param, slot.group, storage).items():
                if state.get(key) is None:
                    state[key] = value

    def restore(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Complete what ``optimizer.load_state_dict(saved)`` left.

        torch casts every moment to the weight's dtype, so moments kept in another precision are taken from `saved`
        again, and parameters that `saved` knows nothing of get a fresh state.
        """
        self._adopt(optimizer)
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for i, param in zip(ids, params, strict=True):
            slot = self.slots.get(param)
            if slot is None:
                continue
            for storage in self.storage(slot):
                value = saved["state"].get(i, {}).get(storage.name)
                if isinstance(storage, Dense) and value is not None:
                    slot.state[storage.name] = value.to(device=param.device, dtype=storage.dtype)
            self.fill_state(slot)

    def storage(self, slot: Slot) -> tuple[Storage, ...]:
        """How each moment of the slot's parameter lies in its state."""
        return slot.rule.storage(slot.param, slot.group, self._moment_dtype(slot.param))

    def _moment_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.state_dtype == "float32" and param.dtype == torch.bfloat16 else param.dtype

    # ---------------------------------------------------------------- a step

    @contextmanager
    def armed(self, optimizer: Optimizer, step: int, clip_value: float | None) -> Iterator[None]:
        """Backward passes inside update `optimizer`'s parameters; every gradient is consumed when the context ends.

        Args:
            optimizer: The optimizer that is stepping.
            step: Counter for the random bits of stochastic rounding; the same after a resume.
            clip_value: Clamp each gradient element to this magnitude, or None.
        """
        if self._stepping is not None:
            raise UpdateError("a fused step is already open; close it before opening another one.")
        self._report_nonfinite(wait=False)
        self._adopt(optimizer)
        mine = self._slots_of(optimizer)
        for device in {slot.param.device for slot in mine}:
            scalars = self._scalars.setdefault(device, StepScalars(device))
            scalars.fill([slot for slot in mine if slot.param.device == device], self.seed, step, clip_value)
        self._stepping, self._step = optimizer, step
        was_dirty, self.dirty = self.dirty, True
        complete = False
        try:
            yield
            self.flush()
            complete = True
        finally:
            # Weights are half-updated if, and only if, the step broke off after its first update.
            self.dirty = was_dirty or (not complete and any(slot.updated for slot in mine))
            self._collect_flags(mine)
            for slot in mine:
                slot.clear()
            self._stepping = None

    def forget_uses(self) -> None:
        """Start counting the uses of weights anew: the step's own forward pass comes next."""
        for slot in self.slots.values():
            slot.uses = 0

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Wrap the backward pass of `loss`: inside an armed step, this is where parameters are updated."""
        handle = None
        if loss.grad_fn is not None:
            handle = loss.grad_fn.register_prehook(lambda *_: self._enter())
        self.in_backward = True
        try:
            yield
            self.flush()
        finally:
            self.in_backward, self._task = False, None
            if handle is not None:
                handle.remove()

    def _enter(self) -> None:
        self._task = torch._C._current_graph_task_id()

    def takes(self, slot: Slot) -> bool:
        """Whether the backward pass now running will run the slot's node and then its update.

        False for `autograd.grad`, ``backward(inputs=...)`` without this weight, double backward, another optimizer's
        step, and a weight with gradient hooks of the user's, which must see a gradient.
        """
        if slot.optimizer is not self._stepping or not self.in_backward or torch.is_grad_enabled():
            return False
        if slot.param._backward_hooks or slot.param._post_accumulate_grad_hooks:
            return False
        try:
            return torch._C._will_engine_execute_node(slot.node)
        except RuntimeError:  # autograd.grad with this weight among its inputs
            return False

    def _ready(self, slot: Slot) -> None:
        """The engine ran the parameter's AccumulateGrad node."""
        if slot.optimizer is not self._stepping or not self.in_backward or torch.is_grad_enabled():
            return
        nested = torch._C._current_graph_task_id() != self._task
        if nested and not (slot.uses == len(slot.factors) == 1 and slot.param.grad is None):
            return
        self._update(slot)

    def flush(self) -> None:
        """Update what still waits: gradients of earlier passes, weights of reentrant segments."""
        if self._stepping is None:
            return
        for slot in self._slots_of(self._stepping):
            if slot.factors or slot.param.grad is not None:
                self._update(slot)

    @torch.no_grad()
    def _update(self, slot: Slot) -> None:
        factors, slot.factors = slot.factors, []
        grad, slot.param.grad = slot.param.grad, None
        if not factors and grad is None:
            return
        if slot.updated:
            raise UpdateError(
                f"{slot.name} received another gradient after its update in step {self._step}. "
                "Only one backward pass may run in a fused step: add the losses, or run the others before it, outside "
                "`fused_step`."
            )
        if grad is not None and grad.layout != torch.strided:
            raise UpdateError(f"{slot.name} has a sparse gradient; build its layer with sparse=False.")
        slot.updated = True
        update = Update(
            name=slot.name,
            weight=slot.param.detach(),
            state=slot.state,
            rule=slot.rule,
            tile=slot.rule.tile(slot.group),
            storage=self.storage(slot),
            scalars=slot.scalars,
            key=slot.key,
            rounding=self.rounding,
            row=slot.row,
            row_key=slot.row_key,
            nonfinite=slot.nonfinite,
        )
        if factors:
            finite = apply_factors(update, factors, grad, self.kernel)
        else:
            assert grad is not None
            finite = apply_gradient(update, grad, self.kernel)
        if finite:
            slot.rule.advance(slot.group, slot.state)
        else:
            self._refuse_nonfinite(slot.name, self._step)

    def _slots_of(self, optimizer: Optimizer) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.optimizer is optimizer]

    # ---------------------------------------------------------------- non-finite gradients

    def _refuse_nonfinite(self, name: str, step: int) -> None:
        if self.nonfinite == "raise":
            raise NonFiniteError(
                f"the gradient of {name} is not finite at step {step}; weight and optimizer state were left as they "
                "were. Lower the learning rate, clip, or pass nonfinite='skip' to leave such updates out."
            )
        self.skipped += 1

    def _collect_flags(self, slots: list[Slot]) -> None:
        """Start copying the kernels' non-finite flags to the host, without waiting for them."""
        updated = [slot for slot in slots if slot.nonfinite is not None]
        for device, scalars in self._scalars.items():
            here = [slot for slot in updated if slot.param.device == device]
            if scalars.nonfinite is None or not here:
                continue
            host = torch.empty(scalars.nonfinite.shape, dtype=torch.int32, pin_memory=True)
            host.copy_(scalars.nonfinite, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._flags.append((self._step, here, host, event))

    def report_nonfinite(self) -> None:
        """Wait for the device and raise or count what it reported; for the end of a run and before a checkpoint."""
        self._report_nonfinite(wait=True)

    def _report_nonfinite(self, wait: bool) -> None:
        while self._flags and (wait or self._flags[0][3].query()):
            step, slots, host, event = self._flags.popleft()
            event.synchronize()
            for slot, flag in zip(slots, host.tolist(), strict=False):
                if flag:
                    self._refuse_nonfinite(slot.name, step)
