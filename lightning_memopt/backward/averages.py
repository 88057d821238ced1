"""Small gradients that autograd stores (norms, biases): summed over ranks once per pass instead of once per unit.

FSDP2 reduces what autograd stored of a unit as soon as the unit is through: for a transformer's block a few KB, in a
collective that costs the host as much as one of the block's layers. Where everything else of a unit was sent as factors
in the pass before, FSDP2 is told to leave its gradients, and all units' are reduced together at the end of the pass, in
float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.backward.exchange import Ranks, sum_to_owners
from lightning_memopt.backward.sharded_slot import ShardedSlot
from lightning_memopt.backward.traffic import shard_rows
from lightning_memopt.kernels.reference import compute_dtype

# Bytes of a unit's gradients that may wait for the end of a pass.
SMALL = 1 << 20


class Averages:
    """Which units' gradients wait, and their sum.

    Args:
        ranks: Who takes part.
        units: By number, the parameters of each of FSDP2's units, as it keeps them.
    """

    def __init__(self, ranks: Ranks, units: Mapping[int, Sequence[Any]]) -> None:
        self._ranks = ranks
        self._units = {number: groups for number, groups in units.items() if all(map(_as_usual, groups))}
        self._told: list[Any] = []
        self._waiting: list[ShardedSlot] = []

    def begin(self, slots: Iterable[ShardedSlot]) -> None:
        """A pass begins.

        Args:
            slots: All parameters that it may update; `ShardedSlot.sent` says how they went the last time.
        """
        stored: dict[int, int] = {}
        mine: dict[int, list[ShardedSlot]] = {}
        for slot in slots:
            mine.setdefault(slot.unit, []).append(slot)
            stored[slot.unit] = stored.get(slot.unit, 0) + (0 if slot.sent else slot.bytes)
            slot.sent = False
        for number, members in mine.items():
            groups = self._units.get(number, ())
            if stored[number] > SMALL or not groups or not all(group.reduce_grads for group in groups):
                continue
            known = {slot.param for slot in members if not slot.param._post_accumulate_grad_hooks}
            trained = [p.sharded_param for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
            if all(param in known for param in trained):
                self._told += groups
                self._waiting += members
        for group in self._told:
            group.reduce_grads = False

    def end(self) -> None:
        """The pass is over, or broke off: FSDP2 reduces again."""
        for group in self._told:
            group.reduce_grads = True
        for slot in self._waiting:
            slot.leaf.grad = None
        self._told, self._waiting = [], []

    def sum(self) -> None:
        """Give the owners of rows what waits of them. All ranks must have gradients of the same parameters."""
        slots = [slot for slot in self._waiting if slot.leaf.grad is not None]
        for dtype in {compute_dtype(slot.param) for slot in slots}:
            self._sum([slot for slot in slots if compute_dtype(slot.param) == dtype], dtype)

    def _sum(self, slots: Sequence[ShardedSlot], dtype: torch.dtype) -> None:
        ranks, grads = self._ranks, list[Tensor]()
        for slot in slots:
            grad, slot.leaf.grad = slot.leaf.grad, None
            assert grad is not None
            grads.append(grad)
        sizes = [shard_rows(len(grad), ranks.shards) * grad.shape[1:].numel() for grad in grads]
        sent = grads[0].new_empty(ranks.shards, sum(sizes), dtype=dtype)
        torch._chunk_cat(grads, 0, ranks.shards, out=sent)
        mine = sum_to_owners(sent, ranks)
        average = mine / ranks.size
        for slot, total, mean in zip(slots, mine.split(sizes), average.split(sizes), strict=True):
            shape, part = slot.weight.shape, mean if slot.mean == 1 else total
            slot.add_gradient(part if part.shape == shape else part[: shape.numel()].view(shape))


def _as_usual(group: Any) -> bool:
    """Whether FSDP2 would do nothing else with the unit's gradients than average them."""
    policy = group.mp_policy
    special = (
        policy.reduce_dtype,
        getattr(group, "gradient_divide_factor", None),
        getattr(group, "_all_reduce_hook", None),
    )
    return all(value is None for value in special)
