"""Which rows of a layer this process holds, and what it must ask those that hold the others.

A sharded weight is cut by rows; mask, ages and moments are kept for a process's own rows only. Choices over the whole
layer need a few numbers of all of them: sums, and how much lies in the rows before one's own. On one device everything
is one's own and nothing is sent. Replicas of the same rows do the same on the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memopt.optim.shards import local, offset, sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Range = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """A part of a layer's weights.

    Attributes:
        first: Index of the first of them in the layer, counted row by row.
        count: How many.
        group: The processes that hold the layer's parts, in the order of the rows; None for one.
        device: Of the weight.
    """

    first: int
    count: int
    group: ProcessGroup | None
    device: torch.device

    @classmethod
    def of(cls, param: Tensor) -> Shard:
        """This process's rows of a weight, which may be whole."""
        own, group = local(param.detach()), None
        distributed = sharded(param)
        if distributed is not None:
            mesh = distributed.device_mesh
            groups = [mesh.get_group(i) for i, place in enumerate(distributed.placements) if place.is_shard()]
            group = next((group for group in groups if dist.get_world_size(group) > 1), None)
        return cls(offset(param) if own.numel() else param.numel(), own.numel(), group, own.device)

    def sum(self, values: Tensor) -> Tensor:
        """Add up what the parts know; in place, equal everywhere afterwards."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def each(self, number: int) -> list[int]:
        """Every part's number, in the order of the rows; waits for the device."""
        if self.group is None:
            return [number]
        numbers = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=self.device)
        numbers[self.rank] = number
        return [int(value) for value in self.sum(numbers).tolist()]

    @property
    def rank(self) -> int:
        """This part's place among the others."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def before(self, number: int) -> int:
        """Sum of the numbers of the parts before this one."""
        return sum(self.each(number)[: self.rank])

    def even(self, values: Tensor) -> Tensor:
        """This part's share if the values of all parts, one after the other, are dealt out as ``torch.chunk`` does.

        Args:
            values: [count of this part].
        """
        counts = self.each(len(values))
        return self._deal(values, _ranges(counts), _chunks(sum(counts), len(counts)))

    def uneven(self, values: Tensor, count: int) -> Tensor:
        """Inverse of `even`: the values that belong to this part, `count` of them."""
        counts = self.each(count)
        return self._deal(values, _chunks(sum(counts), len(counts)), _ranges(counts))

    def _deal(self, values: Tensor, have: list[Range], want: list[Range]) -> Tensor:
        """Send values that lie in the ranges `have` to where `want` says; both cover the same numbers in order."""
        if self.group is None:
            return values
        me, width = self.rank, values.element_size()
        sent = [_shared(have[me], other) * width for other in want]
        received = [_shared(other, want[me]) * width for other in have]
        # Bytes: not every backend sends every dtype.
        out = torch.empty(sum(received), dtype=torch.uint8, device=values.device)
        own = values.new_empty(len(values)).copy_(values)  # a single value may be of any stride, as one is contiguous
        dist.all_to_all_single(out, own.view(torch.uint8), received, sent, group=self.group)
        return out.view(values.dtype)


def _ranges(counts: list[int]) -> list[Range]:
    return list(pairwise(accumulate(counts, initial=0)))


def _chunks(total: int, parts: int) -> list[Range]:
    per = -(-total // parts)
    return [(min(i * per, total), min((i + 1) * per, total)) for i in range(parts)]


def _shared(a: Range, b: Range) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
