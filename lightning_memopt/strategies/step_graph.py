"""The whole training step as one CUDA graph: forward, backward and update, captured once and replayed.

At small batches a step is bound by kernel launches, not by the GPU. Since a fused backward leaves nothing to do after
it, the step is one sequence of kernels that read everything that changes from device memory: the batch (copied into
static tensors), learning rates, step counts and rounding keys (`StepScalars`), the ages of sparse weights (`StepAges`)
and their masks, and the random generator's state, which torch registers with the graph. So replaying it gives the bits
an eager step would have given.

The Python of `training_step` runs at capture only. What it logged is logged again at each replay, from the tensors the
replay has just written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_memopt.backward import Updater
from lightning_memopt.backward.clipping import Norms
from lightning_memopt.backward.slot import Slot
from lightning_memopt.errors import MemOptError

# Eager steps before a capture: lazy initialisation, kernel compilation and tuning happen in these.
EAGER_STEPS = 3
# Graphs kept, one for each combination of batch shapes; other shapes run eagerly.
MAX_GRAPHS = 4
# Steps after which it is said that a state that is not final yet keeps the steps eager.
PATIENCE = 50
# Captured steps dropped, after which it is said that something changes too often for them to be of use.
MANY = 5


class CaptureError(MemOptError, RuntimeError):
    """The step cannot be captured; the message says why, in one line."""


class StepGraph:
    """One captured step: static inputs, the graph, and what Python would have done besides launching kernels."""

    def __init__(self, updater: Updater, module: pl.LightningModule, batch: Any) -> None:
        self.updater, self.module = updater, module
        leaves, self.spec = pytree.tree_flatten(batch)
        self.static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.graph = torch.cuda.CUDAGraph()
        self.output: Any = None
        self.logs: list[tuple[str, Tensor, dict[str, Any]]] = []
        self.updated: list[Slot] = []
        self.norms: Norms | None = None

    def capture(self, step: Callable[[Any], Any], pool: Any) -> None:
        """Record `step`, which runs forward, backward and update on the static inputs. Nothing is executed.

        Raises:
            CaptureError: The step does something that a graph cannot hold. Weights, states and counts are as before.
        """
        before = {slot: slot.counters() for slot in self.updater.slots.values()}
        device = torch.cuda.current_device()
        random = torch.cuda.default_generators[device].clone_state()
        norms, self.updater.norms = self.updater.norms, None
        plain_log = self.module.log
        self.module.log = self._record  # type: ignore[method-assign]
        try:
            # Other threads (data loading) may allocate meanwhile, so only this one is watched for unsafe calls.
            with torch.cuda.graph(
                self.graph, pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                self.output = step(pytree.tree_unflatten(self.static, self.spec))
        except Exception as error:
            for slot, counters in before.items():
                slot.state.update(counters)
                slot.clear()
            self.updater.forget_taken()
            # torch leaves generator and allocator in their capturing state when a capture breaks off.
            torch.cuda.default_generators[device].graphsafe_set_state(random)
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device, self.graph.pool())
            cause: BaseException = error
            while cause.__context__ is not None:  # ending the capture raises again
                cause = cause.__context__
            reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
            raise CaptureError(f"the training step cannot be captured in a CUDA graph: {reason}") from error
        finally:
            del self.module.log
            assert self.module.log == plain_log
            captured, self.updater.norms = self.updater.norms, norms
        self.norms = captured
        self.updated = [slot for slot in self.updater.slots.values() if slot.updated]
        # The replay that follows counts the step; the capture executed nothing.
        for slot, counters in before.items():
            slot.state.update(counters)

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"self.log({name!r}, ...) logs a {type(value).__name__}, whose value would stay that of the captured "
                "step; log tensors, or log from a callback"
            )
        if args:
            names = ("prog_bar", "logger", "on_step", "on_epoch")
            options |= dict(zip(names, args, strict=False))
        self.logs.append((name, value, options))

    def replay(self, batch: Any) -> Any:
        """Run the step on a batch of the captured shapes; returns what `training_step` returned, detached."""
        for static, leaf in zip(self.static, pytree.tree_leaves(batch), strict=True):
            if isinstance(static, Tensor):
                static.copy_(leaf, non_blocking=True)
        self.graph.replay()
        self.updater.note_replay(self.updated)
        if self.norms is not None:
            self.updater.norms = Norms(self.norms.total.clone(), self.norms.each)
        for name, value, options in self.logs:
            self.module.log(name, value.clone(), **options)
        return pytree.tree_map_only(Tensor, torch.clone, self.output)


class StepGraphs:
    """The graphs of a run, by batch shapes, and the decision what runs eagerly.

    Args:
        updater: The run's updater.
        module: The module whose steps are captured.
        strict: Raise where a step cannot be captured; else say so once and go on eagerly.
    """

    def __init__(self, updater: Updater, module: pl.LightningModule, strict: bool) -> None:
        self.updater, self.module, self.strict = updater, module, strict
        self.reason: str | None = None
        self._seen: dict[Any, int] = {}
        self._waited = self._dropped = 0
        self._graphs: dict[Any, StepGraph] = {}
        self._params = list(module.parameters())
        self._captured: list[Any] = []

    def graph_for(self, batch: Any, step: Callable[[Any], Any]) -> StepGraph | None:
        """The graph for a batch like this one, captured now if it is time; None to run eagerly.

        Raises:
            CaptureError: `strict`, and the step cannot be captured.
        """
        if self.reason is not None or self.updater.collecting:
            return None
        try:
            key = self._key(batch)
            self._forget_if_changed()
            graph = self._graphs.get(key)
            if graph is None:
                if (name := self._unsettled()) is not None:
                    self._say_waiting(name)
                    return None
                self._seen[key] = self._seen.get(key, 0) + 1
                if self._seen[key] <= EAGER_STEPS or len(self._graphs) >= MAX_GRAPHS:
                    return None
                graph = StepGraph(self.updater, self.module, batch)
                graph.capture(step, next((g.graph.pool() for g in self._graphs.values()), None))
                self._graphs[key] = graph
            return graph
        except CaptureError as error:
            if self.strict:
                raise
            self.reason = str(error)
            return None

    def _forget_if_changed(self) -> None:
        """Drop graphs that would train other parameters than are trained now, or write where states once were.

        Callbacks freeze and unfreeze layers, load states and swap weights between steps.
        """
        captured = self.updater.captured()
        captured += [param.data_ptr() for param in self._params]
        captured += [param.requires_grad for param in self._params]
        if captured == self._captured:
            return
        if self._graphs:
            torch.cuda.synchronize()  # the last replay may still run
            self._dropped += 1
            if self._dropped == MANY:
                rank_zero_info(
                    f"cuda_graph: {MANY} captured steps were dropped, as weights or states moved, layers were "
                    f"frozen or unfrozen, or clipping changed. Each time, {EAGER_STEPS} steps run eagerly and the next "
                    "is captured anew. If that goes on, leave cuda_graph out."
                )
        self._graphs.clear()
        self._seen.clear()
        self._captured = captured

    def _unsettled(self) -> str | None:
        """A parameter whose state is still to be replaced; that of a frozen one waits until it is trained."""
        slots = self.updater.slots.values()
        waiting = (slot for slot in slots if slot.param.requires_grad and slot.rule.unsettled(slot.state))
        return next((slot.name for slot in waiting), None)

    def _say_waiting(self, name: str) -> None:
        """Once, where eager steps have gone on for longer than any optimizer takes to begin."""
        self._waited += 1
        if self._waited == PATIENCE:
            rank_zero_info(
                f"cuda_graph: steps run eagerly, as {name} has had no gradient yet and its optimizer state is not "
                "final before its first. Freeze it (requires_grad=False) if it is not to be trained."
            )

    def _key(self, batch: Any) -> Any:
        leaves, spec = pytree.tree_flatten(batch)
        parts: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if not leaf.is_cuda:
                    raise CaptureError("the batch holds a CPU tensor, which a CUDA graph cannot read; move it there")
                parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
            else:
                parts.append(leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf))
        return (spec, *parts)
