"""A parameter of which the optimizer holds a shard: what FSDP2 does to it, seen from the updater.

FSDP2 keeps two parameters for one weight. The sharded one, a DTensor, is the optimizer's; the unsharded one is what
layers and autograd see, its memory filled before forward and backward and freed after. Gradients of the unsharded one
that autograd stores are averaged over ranks into ``grad`` of the sharded one, at the end of a module's backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_memopt.backward.exchange import Ranks
from lightning_memopt.backward.sharded_states import spread_rows
from lightning_memopt.backward.slot import Lookup, Slot, Versions, check_unchanged, versions_of
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.kernels import Factors
from lightning_memopt.kernels.reference import compute_dtype
from lightning_memopt.kernels.slabs import join, place
from lightning_memopt.optim.shards import local
from lightning_memopt.rules import Rule

if TYPE_CHECKING:
    from lightning_memopt.backward.sharded_keeper import ShardedKeeper


class ShardedSlot(Slot):
    """A slot whose update writes this rank's rows.

    Its ``factors``, ``buffer`` and ``grad`` are of these rows and summed over ranks; `mean` makes the sum an average.

    Args:
        unsharded: What layers and autograd use.
        ranks: Who shares the gradient.
        number: Position among all slots, the same on all ranks.
        unit: Number of the parameters that FSDP2 gathers together with this one.

    Attributes:
        outgoing: Factors (dY, x) of this rank's tokens that have not been sent to the owners of their rows, and the
            versions of these.
        looked_up: The same of look-ups: dY [tokens, D], rows of the whole table [tokens], padding index or -1.
        sent: Whether the last pass had any.
        bytes: Of the whole parameter.
        in_torch: Whether its update runs in plain torch, and what that follows from; None before anyone asked.
    """

    updater: ShardedKeeper

    def __init__(
        self,
        updater: ShardedKeeper,
        name: str,
        param: nn.Parameter,
        optimizer: Optimizer,
        group: dict[str, Any],
        rule: Rule,
        unsharded: nn.Parameter,
        ranks: Ranks,
        number: int,
        unit: int,
    ) -> None:
        unsharded.requires_grad_(True)
        super().__init__(updater, name, param, optimizer, group, rule, get_gradient_edge(unsharded).node)
        self._unsharded, self.number, self.unit = unsharded, number, unit
        self.outgoing: list[tuple[Factors, Versions]] = []
        self.looked_up: list[tuple[Lookup, Versions]] = []
        self.sent = False
        self.bytes = self.param.nbytes
        self.in_torch: tuple[tuple[object, ...], bool] | None = None
        shape = self.param.shape
        first, last = ranks.rows(shape[0])
        if (last - first, *shape[1:]) != tuple(local(self.param).shape):
            raise UnsupportedError(
                f"{self.name} of shape {tuple(shape)} is not sharded evenly by rows over {ranks.shards} ranks. Let the "
                "strategy shard the model, or call fully_shard without a shard_placement_fn."
            )
        self.offset = first * shape[1:].numel()
        if len(shape) == 2:
            self.mean = 1 / ranks.size

    @property
    def leaf(self) -> nn.Parameter:
        """FSDP2's unsharded parameter."""
        return self._unsharded

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self._rows.detach()

    @property
    def _rows(self) -> Tensor:
        # Operations on a DTensor, even `detach`, take the host as long as a launch.
        assert isinstance(self.param, DTensor)
        return self.param._local_tensor

    @property
    def address(self) -> int:
        """Where this rank's rows begin in memory."""
        return self._rows.data_ptr()

    @property
    def update_state(self) -> MutableMapping[str, Any]:
        """This rank's rows of the state."""
        return LocalState(self.state)

    def whole(self, rows: Tensor) -> Tensor:
        """Gathered from all ranks, which must all ask for it."""
        return spread_rows(self.param, rows).full_tensor()

    @property
    def pending(self) -> bool:
        """Whether any part of a gradient waits here."""
        return bool(self.outgoing) or bool(self.looked_up) or super().pending

    @property
    def only_stored(self) -> bool:
        """Whether all that waits of the gradient of a dense weight, which has rows here, is what autograd stored."""
        if self.sparse is not None or self.factors or self.lookups or self.outgoing or self.looked_up:
            return False
        return self.buffer is None and self.weight.numel() > 0

    @property
    def awaits_average(self) -> bool:
        """Whether autograd stored a part of the gradient, which FSDP2 averages over ranks sooner or later."""
        return self.leaf.grad is not None or self.param.grad is not None

    def count_use(self, x: Tensor) -> None:
        """As for one device; what this rank's backward pass will send follows from all that are called."""
        super().count_use(x)
        updater = self.updater
        if not updater.in_backward:
            updater.path = hash((updater.path, self.number, x.shape, x.dtype))

    def take(self, dy: Tensor, x: Tensor) -> bool:
        """Keep the factors of one use until they are sent."""
        if not self.updater.takes(self):
            return False
        self.outgoing.append(((dy, x), versions_of(dy, x)))
        return True

    def take_lookup(self, dy: Tensor, indices: Tensor, padding_idx: int) -> bool:
        """Keep what was looked up until it is sent."""
        if self.sparse is not None or not self.updater.takes(self):
            return False
        dy = dy.reshape(-1, dy.shape[-1])
        self.looked_up.append(((dy, indices.reshape(-1).long().clone(), padding_idx), versions_of(dy)))
        return True

    def take_looked_up(self) -> Iterator[Lookup]:
        """What this rank looked up, to be sent, together for each padding index."""
        for (dy, *_), versions in self.looked_up:
            check_unchanged(self.name, (dy,), versions)
        looked_up, self.looked_up = [lookup for lookup, _ in self.looked_up], []
        for padding in dict.fromkeys(padding for *_, padding in looked_up):
            dys, indices = zip(*((dy, rows) for dy, rows, own in looked_up if own == padding), strict=True)
            yield (torch.cat(dys), torch.cat(indices), padding) if len(dys) > 1 else (dys[0], indices[0], padding)

    def take_outgoing(self) -> Factors:
        """This rank's factors, to be sent.

        Raises:
            UpdateError: One was changed in place after its use.
        """
        outgoing, self.outgoing = self.outgoing, []
        for factors, versions in outgoing:
            check_unchanged(self.name, factors, versions)
        return join([factors for factors, _ in outgoing])

    def arrive(self, factors: Factors) -> None:
        """Take in factors of this rank's rows, over the tokens of all ranks."""
        self.factors.append(factors)
        self.versions.append(versions_of(*factors))

    def add_blocks(self, blocks: Iterable[tuple[int, int, Tensor]]) -> None:
        """Add rows of dW, summed over ranks, to the buffer, which a rank without rows has as well: an empty one."""
        if self.sparse is not None and self.sparse.accumulates:
            self.sparse.fold_blocks(blocks, compute_dtype(self.weight))
            return
        self.add_rows(blocks)

    def hold_gradient(self) -> None:
        """Take FSDP2's average as the sum that the other parts are."""
        if self.param.grad is not None:
            grad, self.param.grad = local(self.param.grad), None
            if self.mean != 1:
                grad = grad.to(compute_dtype(grad)) / self.mean
            self.add_gradient(grad)

    def add_gradient(self, grad: Tensor) -> None:
        """Take in a gradient of this rank's rows, of which `mean` makes the average over ranks."""
        self.grad = grad if self.grad is None else self.grad + grad

    def drop(self) -> None:
        """Also forget what was not sent."""
        super().drop()
        self.outgoing, self.looked_up = [], []


def part_kept(slots: Sequence[ShardedSlot]) -> None:
    """Copy the factors that slots keep out of memory they were received in, where more than a tenth of it is others'.

    Args:
        slots: Whose factors arrived together.
    """
    views: dict[int, dict[tuple[object, ...], int]] = {}
    parts = [(part, _memory(part)) for slot in slots for pair in slot.factors for part in pair]
    for part, memory in parts:
        views.setdefault(memory, {})[place(part)] = part.nbytes
    copies: dict[int, dict[tuple[object, ...], Tensor]] = {
        memory: {} for part, memory in parts if 10 * sum(views[memory].values()) < 9 * part.untyped_storage().nbytes()
    }

    def alone(part: Tensor) -> Tensor:
        known = copies.get(_memory(part))
        if known is None:
            return part
        if place(part) not in known:
            known[place(part)] = part.clone()
        return known[place(part)]

    for slot in slots if copies else ():
        factors, slot.factors, slot.versions = slot.factors, [], []
        for dy, x in factors:
            slot.arrive((alone(dy), alone(x)))


def _memory(part: Tensor) -> int:
    return part.untyped_storage().data_ptr()


class LocalState(MutableMapping[str, Any]):
    """An optimizer's state of one parameter with each DTensor as this rank's part of it, by reference."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state

    def __getitem__(self, key: str) -> Any:
        value = self._state[key]
        return value._local_tensor if isinstance(value, DTensor) else value

    def __setitem__(self, key: str, value: Any) -> None:
        self._state[key] = value

    def __delitem__(self, key: str) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)
