"""The updater: decides when a parameter's gradient is complete and hands it to its rule.

Autograd itself says when. Each parameter has one AccumulateGrad node; the engine runs it once every use of the
parameter in the backward pass has delivered, whether by a gradient tensor or, from `FusedLinear`, by nothing. The
updater hooks that node: what `FusedLinear` queued (factors) plus what autograd summed (``.grad``) is the exact
gradient, all dX that need the old weight are formed, and the update may run. No counting of layers, no guess about
tied or reused weights.

The one exception is reentrant activation checkpointing, which runs a backward pass of its own for each segment, so
that a node may run before other segments have used the weight. There a weight is updated at once only if it was used
once in this step, and else at the end of the outer pass; so is every parameter that the outer pass itself uses.

Three kinds of backward pass:

    step, immediate    each parameter is updated when its node has run
    step, deferred     gradients wait, as factors where possible, until the clip coefficient is known
    queue              a micro-batch before the last: factors wait for the step, other gradients accumulate in ``.grad``

Everything else (a pass outside all of these, ``autograd.grad``, another optimizer's parameters) is plain autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from lightning_memopt.backward import engine
from lightning_memopt.backward.ages import StepAges
from lightning_memopt.backward.clipping import NO_CLIP, Clip, Norms, gradient_norms
from lightning_memopt.backward.keeper import by_device, options_of
from lightning_memopt.backward.nonfinite import NonFinite
from lightning_memopt.backward.scalars import StepScalars
from lightning_memopt.backward.slot import Slot
from lightning_memopt.backward.slot_updater import SlotUpdater
from lightning_memopt.compat import refusal
from lightning_memopt.errors import UpdateError
from lightning_memopt.kernels import Kernel, Rounding
from lightning_memopt.rules import Rule, rule_for

TOO_LATE = (
    "the optimizer's groups or states were changed within a fused step that has updated weights already. Change them "
    "before its backward pass, or between steps."
)


def _watched(group: Mapping[str, Any]) -> Iterator[Any]:
    """The learning rate, and all tensors among the options of a parameter group."""
    yield group["lr"]
    for value in options_of(group).values():
        parts = value if isinstance(value, tuple | list) else (value,)
        yield from (part for part in parts if isinstance(part, Tensor))


class Updater(SlotUpdater):
    """Applies optimizer rules inside backward, for all optimizers of a run.

    Args:
        rounding: How a bf16 weight is stored.
        kernel: Which kernels to use, see `lightning_memopt.kernels.dispatch`.
        nonfinite: What a non-finite gradient does: stop the run, or leave that update out.
        state_dtype: Precision of the moments of bf16 weights, and of gradients that wait: that of the weight (torch's
            own), or float32.
        seed: Seed of stochastic rounding.

    Attributes:
        in_backward: A backward pass of the strategy is running.
        queueing: It is of an earlier micro-batch, whose factors outlive it.
        norms: Gradient norms of the last step that clipped by norm.
    """

    def __init__(
        self,
        rounding: Rounding,
        kernel: Kernel,
        nonfinite: NonFinite,
        state_dtype: Literal["param", "float32"],
        seed: int,
    ) -> None:
        super().__init__(rounding, kernel, nonfinite, state_dtype)
        self.seed = seed
        self.in_backward = self.queueing = False
        self.norms: Norms | None = None
        self._clip = NO_CLIP
        self._deferred = False
        self._entered = False  # whether the open step had a backward pass, and has not been finished since
        self._through = True  # whether the engine came to the end of the step's last one
        self._broken = False
        self._task: int | None = None
        self._nested: int | None = None
        self._scalars: dict[torch.device, StepScalars] = {}
        self._ages: dict[torch.device, StepAges] = {}
        self._said_fold = False
        self._read: list[Any] = []

    def attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """As `SlotKeeper.attach`, for a run that begins."""
        self._broken, self._reentrant = False, None
        super().attach(module, optimizers)

    def _new_slot(
        self, name: str, param: nn.Parameter, optimizer: Optimizer, group: dict[str, Any], rule: Rule
    ) -> Slot:
        return Slot(self, name, param, optimizer, group, rule, get_gradient_edge(param).node)

    # ---------------------------------------------------------------- a step

    @contextmanager
    def armed(self, optimizer: Optimizer, step: int, clip: Clip = NO_CLIP, deferred: bool = False) -> Iterator[None]:
        """Backward passes inside update `optimizer`'s parameters; every gradient is consumed when the context ends.

        Args:
            optimizer: The optimizer that is stepping.
            step: Counter for the random bits of stochastic rounding; the same after a resume.
            clip: How gradients are clipped.
            deferred: Hold every update back until `finish`; implied by norm clipping.
        """
        if self._stepping is not None:
            raise UpdateError(
                "a fused step is already open; close it before opening another one. For one backward pass that updates "
                "all parameters, make them parameter groups of one optimizer."
            )
        self.reports.poll()
        self._ready_for(optimizer)
        self._stepping, self._step = optimizer, step
        self._deferred = deferred or clip.norm is not None
        self._entered, self._through = False, True
        self._set_clip(clip)
        complete = False
        try:
            yield
            self._refuse_broken_pass()
            self._finish()  # what is changed from here on holds for the next step, so it is not watched
            complete = True
        finally:
            if not complete:  # of a state that was cleared there is nothing to count
                self._taken = [slot for slot in self._taken if slot.state]
            self._count()
            mine = self._slots_of(optimizer)
            self._broken |= not complete and any(slot.updated for slot in mine)
            self._watch_flags(mine)
            for slot in mine:
                slot.clear()
            self._stepping, self._deferred = None, False

    def _ready_for(self, optimizer: Optimizer) -> None:
        """Take in the optimizer's groups and states for a step."""
        self._adopt(optimizer)
        rule_for(optimizer).prepare(optimizer)
        rule_for(optimizer).settle_all(self.filled_states(optimizer))
        self._note_storages()
        self._read = self._facts(optimizer)

    def _refuse_broken_pass(self) -> None:
        if not self._through:
            raise refusal("an error in the backward pass that the module catches", "backward")

    def _follow(self) -> None:
        """Read groups and states again if they were changed since: by `training_step`, or a hook before the update.

        Raises:
            UpdateError: It is too late, or a CUDA graph is being captured, which would hold what was read for good.
        """
        assert self._stepping is not None
        if self._as_read():
            return
        if any(slot.updated for slot in self._slots_of(self._stepping)):
            raise UpdateError(TOO_LATE)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UpdateError(
                "the optimizer's groups or states were changed in the training step, whose Python a captured step does "
                "not run again. Change them in a callback between steps, or leave cuda_graph out."
            )
        self._ready_for(self._stepping)
        self._set_clip(self._clip)

    def refuse_late_changes(self) -> None:
        """The step is finished, and what was changed since would hold for the next one only.

        Raises:
            UpdateError: The optimizer's groups or states were changed.
        """
        if self._stepping is not None and not self._as_read():
            raise UpdateError(TOO_LATE)

    def _as_read(self) -> bool:
        """Whether groups and states of the optimizer that steps are what they were when last read."""
        assert self._stepping is not None
        return not self._changed(self._stepping) and self._facts(self._stepping) == self._read

    @staticmethod
    def _facts(optimizer: Optimizer) -> list[Any]:
        """Learning rates and step counts, which change with every step and need no parameter to be taken in anew.

        And tensors among the other options, as one that was changed in place is equal to itself.
        """
        options = [value for group in optimizer.param_groups for value in _watched(group)]
        counts = [state.get("step") for state in optimizer.state.values()]
        # In-place changes of one count show in the version of all, as they are parts of one tensor.
        seen = [(id(x), x._version) if isinstance(x, Tensor) else x for x in (*options, *counts[:1])]
        return [seen, *map(id, counts), *map(len, optimizer.state.values())]

    @property
    def clip(self) -> Clip:
        """How the gradients of the open step, or of the last one, are clipped."""
        return self._clip

    @property
    def stepping(self) -> bool:
        """Whether a step is open."""
        return self._stepping is not None

    @property
    def dirty(self) -> bool:
        """Whether some weights are one update ahead of others: in the middle of a step, or since one broke off."""
        return self._broken or any(slot.updated for slot in self.slots.values())

    def mend(self) -> None:
        """Weights and states were loaded anew: nothing is half-updated any more."""
        self._broken = False

    def forget_uses(self) -> None:
        """Start counting the uses of weights anew: the step's own forward pass comes next."""
        for slot in self.slots.values():
            slot.uses = 0

    def drop_queue(self, optimizer: Optimizer | None = None) -> None:
        """Forget queued factors, of one optimizer or of all: its gradients were zeroed, or the run broke off."""
        for slot in self.slots.values():
            if optimizer is None or slot.optimizer is optimizer:
                slot.drop()

    @contextmanager
    def backward(self, loss: Tensor, queue: bool) -> Iterator[None]:
        """Wrap the backward pass of `loss`: inside an armed step, this is where parameters are updated.

        Args:
            loss: What ``backward`` is called on.
            queue: Outside an armed step: the pass is of an earlier micro-batch, whose factors the step will want.
        """
        handle = None
        if loss.grad_fn is not None:
            handle = loss.grad_fn.register_prehook(lambda *_: self._enter())
            if self._reentrant is None:
                self._reentrant = engine.holds(loss.grad_fn, "CheckpointFunctionBackward")
        for slot in self.slots.values():
            slot.ready = False
        self.in_backward = True
        self.queueing = queue and self._stepping is None
        try:
            yield
            self._refuse_broken_pass()
            self._end_pass()
        except BaseException as error:
            self.drop_queue()
            if "modified by an inplace operation" in str(error) and any(s.updated for s in self.slots.values()):
                raise UpdateError(
                    "a weight was updated in this fused step before another backward pass, or an operation outside "
                    "autograd's sight (a use of weight.detach()), was done with it. Run one backward pass per fused "
                    "step, and use weight.detach().clone() where a layer's weight enters without its gradient."
                ) from error
            raise
        finally:
            self.in_backward = self.queueing = self._checked = False
            self._task = self._nested = None
            if handle is not None:
                handle.remove()

    def _enter(self) -> None:
        """The engine starts on the loss."""
        self._task = engine.current_pass()
        if self._stepping is None:
            return
        self._follow()
        self._entered, self._through = True, False
        if not self._deferred:
            self._check_updates()
        small = [slot for slot in self._slots_of(self._stepping) if slot.small]
        before = {slot: (grad, grad._version) for slot in small if (grad := slot.param.grad) is not None}
        engine.at_the_end(lambda: self._small_ones(small, before))

    @torch.no_grad()
    def _small_ones(self, small: Sequence[Slot], before: Mapping[Slot, tuple[Tensor, int]]) -> None:
        """The engine is through: use the gradients of small parameters, except where they are those of `before`."""
        self._through = True
        reached = [slot for slot in small if slot.plain and slot.param.grad is not None]
        if self._deferred:
            for slot in reached:
                slot.hold_gradient()
            return
        same = {
            slot for slot, (grad, version) in before.items() if slot.param.grad is grad and grad._version == version
        }
        self._update_together([slot for slot in reached if slot not in same])

    def takes(self, slot: Slot) -> bool:
        """Whether the backward pass now running may keep the factors of this weight instead of its gradient.

        False for `autograd.grad`, ``backward(inputs=...)`` without this weight, double backward, another optimizer's
        step, a weight with gradient hooks of the user's, which must see a gradient, and one that was frozen since it
        was used.
        """
        if not self._owns(slot) or slot.param._backward_hooks or slot.param._post_accumulate_grad_hooks:
            return False
        if not slot.leaf.requires_grad or not engine.will_run(slot.node):
            return False
        nested = engine.current_pass()
        if nested not in (self._task, self._nested):  # the next segment's pass may add to this one's gradients
            self._nested = nested
            engine.at_the_end(self._keep_apart)
        return True

    def _owns(self, slot: Slot) -> bool:
        mine = slot.optimizer is self._stepping if self._stepping is not None else self.queueing
        return mine and self.in_backward and not torch.is_grad_enabled()

    def _ready(self, slot: Slot) -> None:
        """The engine ran the parameter's AccumulateGrad node."""
        if not self._owns(slot):
            return
        slot.ready = True
        if self.queueing:
            self._fold(slot)
        elif self._deferred:
            slot.hold_gradient()
            self._fold(slot)
        elif engine.current_pass() != self._task:
            self._reentrant = True
            if slot.uses == len(slot.factors) + len(slot.lookups) == 1 and slot.param.grad is None:
                self._update(slot)
        elif not (self._reentrant or (slot.small and slot.plain)):
            self._update(slot)

    @torch.no_grad()
    def _keep_apart(self) -> None:
        memory = {address for slot in self.slots.values() for address in slot.queued_memory()}
        for slot in self.slots.values() if memory else ():
            slot.keep_apart(memory)

    def _fold(self, slot: Slot) -> None:
        if slot.fold() and not self._said_fold:
            self._said_fold = True
            out, inputs = slot.param.shape
            rank_zero_info(
                f"{slot.name} [{out}, {inputs}] sees more tokens per step than its factors are worth keeping; its "
                "gradient is stored until the update instead, and so are those of other such layers."
            )

    def _end_pass(self) -> None:
        """The engine is through with a backward pass."""
        if self.queueing or self._deferred:
            self._keep_apart()
        if not self._deferred:
            self._update_pending(ready=True)

    def finish(self, clip: Clip | None = None) -> None:
        """Update everything that waits; with norm clipping, after its coefficient is known.

        Args:
            clip: Replaces what `armed` was given.

        Raises:
            UpdateError: The optimizer's groups or states were changed since the backward pass, which used them.
        """
        if self._stepping is None:
            return
        self._finish(clip)
        self._read = self._facts(self._stepping)

    def _finish(self, clip: Clip | None = None) -> None:
        assert self._stepping is not None
        if self._entered:
            self._entered = False
            self._follow()
        if clip is not None:
            self._set_clip(clip)
        waiting = [slot for slot in self._slots_of(self._stepping) if slot.pending]
        if waiting:
            coefficient = None
            if self._clip.norm is not None:
                self.norms = self._norms(waiting)
                if not self._finite_norm(self.norms, len(waiting)):
                    self.drop_queue(self._stepping)
                    return
                coefficient = self.norms.coefficient(self._clip.norm)
                for device, scalars in self._scalars.items():
                    scalars.scale(coefficient.to(device))
            self._check_updates()
            self._update_pending(coefficient)
            self._checked = False
        self._count()

    def captured(self) -> list[Any]:
        """What a capture of the step holds fast: how gradients are clipped, rules, where weights and states lie."""
        return [self._clip, *self.places()]

    @property
    def collecting(self) -> bool:
        """Whether the step looks for the largest gradients of inactive weights, whose number no graph knows ahead."""
        return any(slot.sparse is not None and slot.sparse.growth is not None for slot in self.slots.values())

    def _norms(self, waiting: Sequence[Slot]) -> Norms:
        return gradient_norms(waiting)

    def _finite_norm(self, norms: Norms, count: int) -> bool:
        """Whether the step may go on. Asking a GPU means waiting for it, so under "raise" its kernels tell later."""
        if norms.total.is_cuda and self.reports.mode == "raise":
            return True
        if torch.isfinite(norms.total):
            return True
        name = next(name for name, norm in norms.each.items() if not torch.isfinite(norm))
        self.reports.report(name, self._step, count)
        return False

    def _set_clip(self, clip: Clip) -> None:
        assert self._stepping is not None
        self._clip = clip
        for device, here in by_device(self._slots_of(self._stepping)).items():
            scalars = self._scalars.setdefault(device, StepScalars(device))
            scalars.fill(here, self.seed, self._step, clip.value)
            self._ages.setdefault(device, StepAges(device)).fill(here)

    def _watch_flags(self, slots: Sequence[Slot]) -> None:
        for device, here in by_device(slots).items():
            names = [slot.name for slot in here if slot.nonfinite is not None]
            scalars = self._scalars.get(device)
            if scalars is not None and scalars.nonfinite is not None and names:
                self.reports.watch(self._step, names, scalars.nonfinite[: len(names)])
