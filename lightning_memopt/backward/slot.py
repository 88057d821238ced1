"""One parameter of one optimizer, and the parts of its gradient that wait for its update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memopt.errors import UpdateError
from lightning_memopt.kernels import Factors, Update
from lightning_memopt.kernels.active import Ages
from lightning_memopt.kernels.embedding import embedding_gradient
from lightning_memopt.kernels.memory import Memory
from lightning_memopt.kernels.reference import compute_dtype, kept_dtype
from lightning_memopt.kernels.slabs import slab_rows, slabs
from lightning_memopt.rules import Rule
from lightning_memopt.rules.storage import Storage

if TYPE_CHECKING:
    from lightning_memopt.backward.updater import Updater
    from lightning_memopt.sparsity.layer import SparseLayer

Lookup = tuple[Tensor, Tensor, int]  # dY [tokens, dim], indices [tokens], padding index or -1
Versions = tuple[int, ...]  # of tensors, see `versions_of`


@dataclass(slots=True, eq=False)
class Slot:
    """What the updater knows of a parameter.

    The parts of its gradient are summed exactly, whichever are present: factors of `FusedLinear` uses, look-ups of
    `FusedEmbedding` uses, a `buffer` that older ones were folded into, and autograd's own ``param.grad``.

    Attributes:
        tile: Name of the rule's tile function for the group's options.
        uses: Forward calls of its layers in this step.
        factors: (dY, x) of uses whose backward has run; x by reference.
        versions: Of each pair of factors, how often they had been changed in place when they were queued.
        lookups: (dY, indices, padding index or -1) of look-ups whose backward has run.
        lookup_versions: The same of each dY of these.
        buffer: What factors were folded into, shape of the weight; where it waits for more, in `kept_dtype`.
        ready: The backward pass now running has delivered all of its uses.
        updated: The step's update has been taken.
        entire: The weight is dense and not a shard.
        small: A gradient that autograd stores waits for those of other small parameters, to be used with them.
        mean: What the sum of the parts is multiplied by: not 1 where it is a sum over ranks.
        offset: Index of `weight`'s first element in the whole parameter.
        sparse: For a sparse weight, its mask and ages; its state then holds active weights only.
        storage: How the moments lie in the state of a weight of that dtype, once asked for (`Updater.storage`).
        update: What the kernels are given for an `entire` weight, in the pass or step for which it was checked
            (`Updater.standing`).
        placed: Address of the weight for which `update` was built.
        scalars, key, row, row_key, nonfinite, memory: See `lightning_memopt.kernels.Update`.
        ages: Of a sparse weight, the scalars of the step that go by age.
    """

    updater: Updater
    name: str
    param: nn.Parameter
    optimizer: Optimizer
    group: dict[str, Any]
    rule: Rule
    node: Node
    handle: RemovableHandle | None = None
    tile: str = ""
    uses: int = 0
    factors: list[Factors] = field(default_factory=list)
    versions: list[Versions] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    lookup_versions: list[Versions] = field(default_factory=list)
    buffer: Tensor | None = None
    grad: Tensor | None = None
    ready: bool = False
    updated: bool = False
    entire: bool = False
    small: bool = False
    sparse: SparseLayer | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)
    key: int = 0
    ages: Ages | None = None
    row: Tensor | None = None
    row_key: Tensor | None = None
    nonfinite: Tensor | None = None
    mean: float = 1.0
    offset: int = 0
    storage: tuple[torch.dtype, tuple[Storage, ...]] | None = None
    memory: Memory = field(default_factory=Memory)
    update: Update | None = None
    placed: int = 0

    @property
    def leaf(self) -> nn.Parameter:
        """What layers and autograd use: the parameter itself, unless the optimizer holds a shard of it."""
        return self.param

    @property
    def weight(self) -> Tensor:
        """What an update writes."""
        return self.param.detach()

    @property
    def address(self) -> int:
        """Where the weight begins in memory."""
        return self.param.data_ptr()

    @property
    def update_state(self) -> MutableMapping[str, Any]:
        """The state as an update of `weight` sees it."""
        return self.state

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's own state of this parameter; looked up, as loading a checkpoint replaces it."""
        return self.optimizer.state[self.param]

    def counters(self) -> dict[str, Any]:
        """Copies of the state's entries that count steps."""
        sparse = {} if self.sparse is None else self.sparse.counters()
        return {**self.rule.counters(self.state), **sparse}

    def whole(self, rows: Tensor) -> Tensor:
        """A tensor with a row for each row of the whole weight, from one with those of `weight`."""
        return rows

    @property
    def pending(self) -> bool:
        """Whether any part of a gradient waits."""
        if self.factors or self.lookups or self.buffer is not None or self.grad is not None:
            return True
        return self.param.grad is not None or (self.sparse is not None and self.sparse.buffer is not None)

    @property
    def plain(self) -> bool:
        """Whether nothing can wait of a `entire` weight's gradient but what autograd stored."""
        return self.entire and not self.factors and not self.lookups and self.buffer is None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """A slot belongs to a run: a pickled parameter leaves it behind."""
        return type(None), ()

    def count_use(self, x: Tensor) -> None:
        """Called by the layer's forward with its input. Recomputation inside backward is not another use.

        Raises:
            UpdateError: Recomputation came after the weight's update and would see its new value.
        """
        if not self.updater.in_backward:
            self.uses += 1
        elif self.updated:
            raise UpdateError(
                f"{self.name} is used again after its update, within the same backward pass: activation checkpointing "
                "recomputes a segment in which its value is used without its gradient (move that use out of the "
                "segment), or a hook computes and differentiates a loss of its own (do so in another step)."
            )

    def take(self, dy: Tensor, x: Tensor) -> bool:
        """Queue the factors of one use, dY [tokens, out] and x [tokens, in], if this pass may hand them over."""
        if not self.updater.takes(self):
            return False
        self.updater.watch(self)
        self.factors.append((dy, x))
        self.versions.append(versions_of(dy, x))
        return True

    def take_lookup(self, dy: Tensor, indices: Tensor, padding_idx: int) -> bool:
        """Queue the gradient dY [*indices.shape, dim] of one look-up, if this pass may hand it over."""
        if not self.updater.takes(self):
            return False
        self.updater.watch(self)
        # A copy: indices are small, and often a view of a batch that someone refills.
        self.queue_lookup((dy.reshape(-1, dy.shape[-1]), indices.reshape(-1).clone(), padding_idx))
        return True

    def queue_lookup(self, lookup: Lookup) -> None:
        """Keep a look-up until it is a part of the update."""
        self.lookups.append(lookup)
        self.lookup_versions.append(versions_of(lookup[0]))

    def only_lookup(self) -> Lookup | None:
        """All look-ups as one, if they are the whole gradient; they stay queued."""
        if not self.lookups or self.factors or self.sparse is not None:
            return None
        if self.buffer is not None or self.grad is not None or len({padding for *_, padding in self.lookups}) != 1:
            return None
        self._check_lookups()
        dy, indices, padding = self.lookups[0]
        if len(self.lookups) > 1:
            dy, indices = (torch.cat(parts) for parts in list(zip(*self.lookups, strict=True))[:2])
        return dy, indices, padding

    def fold_lookups(self) -> None:
        """Add queued look-ups to the buffer: they are a part of a gradient that is formed anyway."""
        self._check_lookups()
        for dy, indices, padding in self.lookups:
            rows, dtype = len(self.weight), compute_dtype(self.param)
            part = embedding_gradient(indices, dy, rows, dtype, None if padding < 0 else padding)
            self.buffer = part if self.buffer is None else self.buffer.add_(part)
        self.lookups, self.lookup_versions = [], []

    def hold_gradient(self) -> None:
        """Move autograd's gradient out of sight of hooks and of the optimizer's own step, until the update.

        Raises:
            UpdateError: It is sparse.
        """
        if self.param.grad is not None:
            grad, self.param.grad = self.param.grad, None
            check_strided(self.name, grad)
            self.grad = grad if self.grad is None else self.grad.add_(grad)

    def take_gradient(self) -> Tensor | None:
        """What waits of a gradient that is `plain`; nothing does afterwards.

        Raises:
            UpdateError: It is sparse.
        """
        grad = self.param.grad
        if grad is None or self.grad is not None:
            self.hold_gradient()
            grad, self.grad = self.grad, None
        else:
            self.param.grad = None
        check_strided(self.name, grad)
        return grad

    def take_pair(self) -> Factors | None:
        """The factors of an `entire` weight if those of one use are all that waits; nothing does afterwards.

        Raises:
            UpdateError: As `collect`.
        """
        if not self.entire or len(self.factors) != 1 or self.lookups or self.buffer is not None:
            return None
        if self.grad is not None or self.param.grad is not None:
            return None
        self._check_inputs()
        (pair,) = self.factors
        self.factors, self.versions = [], []
        return pair

    def collect(self) -> tuple[list[Factors], Tensor | None]:
        """Everything that waits: factors, and the sum of the stored parts or None. The slot is empty afterwards.

        Raises:
            UpdateError: An input was changed in place after its use, so that its weight gradient is lost.
        """
        self.hold_gradient()
        self._check_inputs()
        self.fold_lookups()
        factors, stored = self.factors, self.stored
        accumulated = self.sparse.buffer if self.sparse is not None else None
        self.drop()
        if self.sparse is not None:
            self.sparse.stored = accumulated
        return factors, stored

    @property
    def stored(self) -> Tensor | None:
        """What is stored of the gradient at full shape."""
        if self.buffer is not None and self.grad is not None:
            self.buffer, self.grad = self.buffer.add_(self.grad), None
        return self.grad if self.buffer is None else self.buffer

    def fold(self) -> bool:
        """Turn factors into one stored gradient, if they take more memory than it does (or already did).

        Factors cost tokens · (in + out) elements, the gradient in · out.

        Returns:
            Whether this was the first fold of the step.
        """
        if not self.factors and not self.lookups:
            return False
        weight, dtype = self.weight, compute_dtype(self.param)
        held = sum(part.numel() * part.element_size() for pair in self.factors for part in pair)
        held += sum(dy.numel() * dy.element_size() for dy, *_ in self.lookups)
        if self.sparse is not None and self.sparse.accumulates:
            if held <= self.sparse.own * dtype.itemsize and self.sparse.buffer is None:
                return False
            self._check_inputs()
            first = self.sparse.fold(self.factors, dtype)
            self.factors, self.versions = [], []
            return first
        first = self.buffer is None
        if held <= weight.numel() * self.kept_dtype.itemsize and first:
            return False
        self._check_inputs()
        factors, self.factors, self.versions = self.factors, [], []
        if all(dy.dtype == x.dtype == self.kept_dtype for dy, x in factors):
            for dy, x in factors:  # the sum is rounded once, where autograd rounds what it adds as well
                self.buffer = dy.t() @ x if self.buffer is None else self.buffer.addmm_(dy.t(), x)
        else:
            self.add_rows(slabs(factors, None, dtype, slab_rows(weight.shape[1], weight.device)))
        self.fold_lookups()
        assert self.buffer is not None
        self.buffer = self.buffer.to(self.kept_dtype)
        return first

    @property
    def kept_dtype(self) -> torch.dtype:
        """Precision of a gradient that waits: that of moments."""
        return kept_dtype(self.param, self.updater.state_dtype == "float32")

    def add_rows(self, parts: Iterable[tuple[int, int, Tensor]]) -> None:
        """Add to `buffer`, or begin it.

        Args:
            parts: First row, row past the last, and what is added to these rows, in `compute_dtype`.
        """
        if self.buffer is None:
            weight = self.weight
            self.buffer = torch.zeros(weight.shape, dtype=self.kept_dtype, device=weight.device)
        for start, stop, part in parts:
            self.buffer[start:stop] += part

    def drop(self) -> None:
        """Forget every part of the gradient but ``param.grad``, which belongs to autograd."""
        if self.factors or self.lookups:
            self.factors, self.versions, self.lookups, self.lookup_versions = [], [], [], []
        self.buffer = self.grad = None
        if self.sparse is not None:
            self.sparse.buffer = self.sparse.stored = None

    def clear(self) -> None:
        """Forget the step."""
        self.uses, self.updated = 0, False
        self.drop()

    def queued_memory(self) -> Iterator[int]:
        """Addresses of the storages that hold queued dY."""
        for dy in (*(pair[0] for pair in self.factors), *(lookup[0] for lookup in self.lookups)):
            yield dy.untyped_storage().data_ptr()

    def keep_apart(self, memory: Set[int]) -> None:
        """Copy what autograd stored of the gradient if it lies in queued dY, which later additions would change.

        Autograd takes a gradient over without a copy, also where it is a view: the gradient of ``p`` in
        ``linear(x) + p[None]`` is a view of the layer's dY.

        Args:
            memory: Addresses of the storages of all queued dY.
        """
        for holder in (self.leaf, self):
            grad = holder.grad
            if grad is not None and grad.layout == torch.strided and grad.untyped_storage().data_ptr() in memory:
                holder.grad = grad.clone()

    def _check_inputs(self) -> None:
        for factors, versions in zip(self.factors, self.versions, strict=True):
            check_unchanged(self.name, factors, versions)

    def _check_lookups(self) -> None:
        for (dy, *_), versions in zip(self.lookups, self.lookup_versions, strict=True):
            check_unchanged(self.name, (dy,), versions)


def count_updates(slots: Sequence[Slot], step: int) -> None:
    """Count an update of each: all of a rule's at once, as that takes the host a fraction of the time.

    Args:
        slots: Whose updates were taken.
        step: Number of the optimizer step that took them.
    """
    for rule in {slot.rule for slot in slots}:
        rule.advance_all([(slot.group, slot.state) for slot in slots if slot.rule is rule])
    for slot in slots:
        if slot.sparse is not None:
            slot.sparse.advance(step)


def check_strided(name: str, grad: Tensor | None) -> None:
    """See to it that what autograd stored of a weight's gradient, if anything, is no sparse tensor.

    Raises:
        UpdateError: It is one.
    """
    if grad is not None and grad.layout != torch.strided:
        raise UpdateError(f"{name} has a sparse gradient; build its layer with sparse=False.")


def versions_of(*tensors: Tensor) -> Versions:
    """How often each tensor was changed in place, so far."""
    return tuple(tensor._version for tensor in tensors)


def check_unchanged(name: str, tensors: Sequence[Tensor], versions: Versions) -> None:
    """See to it that the factors of a weight's gradient are still what they were when they were queued.

    Args:
        name: Of the weight.
        tensors: dY, and x if it is not known otherwise.
        versions: `versions_of` them when they were queued.

    Raises:
        UpdateError: One was changed in place, so that the weight gradient is lost.
    """
    now = versions_of(*tensors)
    if now[0] != versions[0]:
        raise UpdateError(
            f"the gradient of the output of {name}'s layer was changed in place after the layer's backward pass, and "
            "before the weight's update. A hook, or a backward function of your own, that changes a gradient returns a "
            "new tensor: g * 0.5 for g.mul_(0.5)."
        )
    if now != versions:
        raise UpdateError(
            f"the input of {name} was changed in place between its backward pass and the update. "
            "Give each micro-batch tensors of its own."
        )
