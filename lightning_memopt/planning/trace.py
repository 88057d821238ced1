"""Running one training step on the meta device, and what it holds at its peak."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_memopt.backward import embedding, linear
from lightning_memopt.backward.linear import SLOT
from lightning_memopt.backward.traffic import Way
from lightning_memopt.errors import MemOptError
from lightning_memopt.kernels import Factors
from lightning_memopt.kernels.reference import kept_dtype
from lightning_memopt.planning.exchanged import Exchanged
from lightning_memopt.planning.live import Bytes, LiveBytes
from lightning_memopt.planning.stand_ins import stand_ins
from lightning_memopt.run_config import default_dtype
from lightning_memopt.strategies import checkpointing, sharding

# What becomes of gradients: stored until the step; each consumed when it is complete; never formed, but consumed from
# their factors; or kept as factors until a norm is known.
Route = Literal["stored", "released", "fused", "deferred"]


@dataclass(frozen=True)
class Trace:
    """What was alive over one forward and backward pass of a batch.

    Attributes:
        samples: Candidates for the peak.
        end: What is left for the optimizer step.
    """

    samples: tuple[Bytes, ...]
    end: Bytes

    def peak(self, scale: float = 1.0) -> Bytes:
        """The most alive at a time, for a batch `scale` times as large."""
        return max((sample.scaled(scale) for sample in self.samples), key=sum)


class Slots:
    """Plays the updater's part for all parameters: takes what layers hand over, and drops or keeps it.

    Args:
        live: Counts what is kept.
        keep: Until the end, as under norm clipping.
        exchanged: Where factors come from, if several devices share the module.
        earlier: Micro-batches before the traced one, whose gradients wait for its.
        wide: Gradients of bf16 weights wait in float32.

    Attributes:
        held: What these have left.
    """

    queueing = False  # the traced pass is that of a step

    def __init__(self, live: LiveBytes, keep: bool, exchanged: Exchanged | None, earlier: int, wide: bool) -> None:
        self.live, self.keep, self.exchanged, self.earlier, self.wide = live, keep, exchanged, earlier, wide
        self.kept: list[Any] = []
        self.held = Bytes()
        self._inputs: set[int] = set()

    def give(self, param: nn.Parameter) -> None:
        """Make `param` known to its layers."""
        setattr(param, SLOT, _Slot(self, param))

    def hold(self, factors: Sequence[Tensor] = (), gradient: int = 0) -> None:
        """What each earlier micro-batch has left of such factors, an input that several layers share once; or a sum."""
        size = 0
        for tensor in factors:
            storage = tensor.untyped_storage()._cdata
            size += tensor.nbytes * (storage not in self._inputs)
            self._inputs.add(storage)
        factors_held = self.held.factors + self.earlier * size
        self.held = self.held._replace(factors=factors_held, gradients=self.held.gradients + gradient)

    def will_write(self, x: Tensor) -> bool:
        """Inputs that are parameters are few and small: their copies are not counted."""
        return False


@dataclass
class _Slot:
    updater: Slots
    param: nn.Parameter
    folded: bool = False

    def count_use(self, x: Tensor) -> None:
        """Uses do not matter here."""

    def take(self, dy: Tensor, x: Tensor) -> bool:
        """Keep the pair, or hand it on to where those of all devices meet."""
        if self.updater.exchanged is None:
            self._keep((dy, x), self._gradient_bytes)
        else:
            self.updater.exchanged.send(self, dy, x)
        return True

    def arrive(self, pair: Factors | None) -> None:
        """Keep the factors of this device's rows, or the gradient of these rows where that is what arrives."""
        assert self.updater.exchanged is not None
        self._keep(pair, self._gradient_bytes // self.updater.exchanged.ranks)

    def _keep(self, pair: Factors | None, most: int) -> None:
        """Keep the pair, or where those of all micro-batches take more bytes than `most`, the gradient."""
        earlier = self.updater.earlier
        if not self.updater.keep and not earlier:
            return
        if self.folded or pair is None or (earlier + 1) * sum(t.nbytes for t in pair) > most:
            if not self.folded:
                self._fold()
            return
        self.updater.hold(pair)
        if not self.updater.keep:
            return
        for tensor in pair:
            self.updater.live.relabel(tensor, "factors")
        self.updater.kept.append(pair)

    @property
    def _dtype(self) -> torch.dtype:
        """Of a gradient that waits."""
        return kept_dtype(self.param, self.updater.wide)

    @property
    def _gradient_bytes(self) -> int:
        return self.param.numel() * self._dtype.itemsize

    def _fold(self) -> None:
        """Keep the gradient from now on; that of micro-batches has been there all along."""
        self.folded = True
        if self.updater.earlier:
            self.updater.hold(gradient=self._gradient_bytes)
            return
        gradient = torch.empty(self.param.shape, dtype=self._dtype, device="meta")
        self.updater.live.relabel(gradient, "gradients")
        self.updater.kept.append(gradient)

    def take_lookup(self, dy: Tensor, indices: Tensor, padding_idx: int) -> bool:
        """Keep the looked-up rows' gradient."""
        self.updater.hold([dy])
        if self.updater.keep:
            self.updater.live.relabel(dy, "factors")
            self.updater.kept.append(dy)
        return True


def trace(
    module: pl.LightningModule,
    batch: Any,
    route: Route = "stored",
    autocast: torch.dtype | None = None,
    checkpoint: Sequence[str] = (),
    vocab_size: int | None = None,
    ranks: int = 1,
    wrap: Sequence[str] | str = "auto",
    way: Way = "auto",
    micro_batches: int = 1,
    wide: bool = False,
) -> Trace:
    """Run ``training_step`` and backward on the meta device.

    Args:
        module: Its parameters lie on the meta device, in the dtype they train in.
        batch: As the data loader's; only shapes and dtypes matter.
        route: What becomes of gradients.
        autocast: The lower precision of mixed precision.
        checkpoint: Name patterns of modules that run again in backward, see `lightning_memopt.ForgeStrategy`.
        vocab_size: By which logits are told from other activations.
        ranks: Devices that share the module, of which one is traced.
        wrap: What they gather together, see `lightning_memopt.strategies.sharding.find_blocks`.
        way: How they sum gradients, see `lightning_memopt.ForgeFSDPStrategy`.
        micro_batches: Batches of a step, of which the last is traced.
        wide: Gradients of bf16 weights wait in float32.

    Raises:
        MemOptError: The module does something that needs values or a Trainer.
    """
    batch = tree_map_only(Tensor, lambda t: t.to("meta"), batch)
    weights = [*module.parameters(), *module.buffers()]
    batch_tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    live = LiveBytes([*weights, *batch_tensors], vocab_size)
    exchanged = Exchanged(sharding.parts(module, wrap), ranks, way, live) if ranks > 1 else None
    slots = Slots(live, route == "deferred", exchanged, micro_batches - 1, wide)
    changed: list[nn.Module] = []
    handles = []
    if route in ("fused", "deferred"):
        changed = [*linear.install(module), *embedding.install(module)]
    again = checkpointing.install(module, checkpoint)
    try:
        for param in module.parameters():
            if param.requires_grad:
                if route in ("fused", "deferred"):
                    slots.give(param)
                handles.append(param.register_post_accumulate_grad_hook(_hook(live, route, slots)))
        dtype = next((w.dtype for w in weights if w.is_floating_point()), torch.float32)
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            # As Lightning's bf16-true: new tensors are bf16 in training_step.
            stack.enter_context(default_dtype(dtype if dtype.is_floating_point else torch.float32))
            with torch.device("meta"), live, stand_ins(autocast):
                with torch.autocast("meta"):
                    loss = _loss(module.training_step(batch, 0))
                live.sample()
                forward = len(live.samples)
                loss.backward()
                if exchanged is not None:
                    exchanged.flush()
                del loss
            live.sample()
            window = exchanged.window if exchanged is not None else 0
            held = slots.held._replace(factors=slots.held.factors + window)
            *samples, end = (_shared(sample, ranks, held) for sample in (*live.samples, live.now))
            if route == "stored":
                samples = list(_with_old_gradients(samples, forward, end))
            return Trace(tuple(samples), end)
    except (NotImplementedError, RuntimeError, AttributeError, TypeError) as error:
        raise MemOptError(
            f"{type(module).__name__}.training_step cannot be traced without data: {type(error).__name__}: {error}"
        ) from error
    finally:
        checkpointing.remove(again)
        linear.remove(changed)
        for handle in handles:
            handle.remove()
        for param in module.parameters():
            param.grad = None
            param.__dict__.pop(SLOT, None)


def _shared(sample: Bytes, ranks: int, held: Bytes) -> Bytes:
    """What one of several devices has of gradients, and what was held all along."""
    gradients = -(-(sample.gradients + held.gradients) // ranks)
    return sample._replace(gradients=gradients, factors=sample.factors + held.factors)


def _with_old_gradients(samples: Sequence[Bytes], forward: int, end: Bytes) -> Iterator[Bytes]:
    """Samples of a step that is not the first: Lightning frees old gradients between forward and backward."""
    for i, sample in enumerate(samples):
        yield sample._replace(gradients=sample.gradients + end.gradients) if i < forward else sample


def _hook(live: LiveBytes, route: Route, slots: Slots) -> Any:
    def complete(param: Tensor) -> None:
        if param.grad is None:  # its layers handed over all of it
            return
        if slots.earlier and route in ("fused", "deferred"):
            slots.hold(gradient=param.grad.nbytes)
            param.grad = None  # added to what is held
            return
        live.relabel(param.grad, "gradients")
        if route in ("released", "fused"):
            live.sample()
            param.grad = None

    return complete


def _loss(output: Any) -> Tensor:
    if isinstance(output, dict):
        output = output.get("loss")
    if not isinstance(output, Tensor):
        raise MemOptError("training_step returned no loss: manual optimization cannot be planned.")
    return output
