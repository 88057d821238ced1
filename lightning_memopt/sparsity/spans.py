"""Blocks of a sparse weight's 8-bit moments: the active weights in a span of consecutive weights of one row.

A dense weight's block is so many consecutive weights of a row. A sparse weight's is the active ones among as many more
as its density is low, so that it has that many on average. Its values (scales, shared second moments) have an element
per span, [rows, spans in a row], whatever the mask: they stay where they are when the mask changes, and are cut by rows
as the weight is. Blocks of consecutive active weights would depend on how many lie in the rows before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.sparsity.bits import chunks, unpack

# What a storage is told of a sparse weight, in the state that it is given: a `Where`.
WHERE = "smet_where"


def span(block: int, density: float) -> int:
    """Weights in a span, a power of two, for blocks of about `block` active weights."""
    return block << max(0, round(-log2(density)))


def spans(shape: tuple[int, int], block: int, density: float) -> tuple[int, int]:
    """Shape of a tensor with an element per span of a weight [rows, columns]."""
    return shape[0], -(-shape[1] // span(block, density))


def length_of(columns: int, count: int) -> int:
    """Weights in a span, where rows of `columns` have `count` spans: the least power of two that makes so many."""
    length = 1
    while -(-columns // length) > count:
        length *= 2
    return length


@dataclass(frozen=True, eq=False)
class Where:
    """Where active weights lie.

    Attributes:
        at: Number of each weight, counted row by row from the first row that has values; int64 [active], ascending.
        columns: Weights in a row.
    """

    at: Tensor
    columns: int
    _known: dict[int, Spans] = field(default_factory=dict)

    @classmethod
    def of(cls, bits: Tensor, total: int, columns: int) -> Where:
        """All active weights of a mask."""
        parts = [unpack(bits, start, stop).nonzero().view(-1) + start for start, stop in chunks(total)]
        return cls(torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=bits.device), columns)

    def blocks(self, values: Tensor) -> Spans:
        """The blocks that `values`, [rows, spans in a row], belong to."""
        count = values.shape[1]
        if count not in self._known:
            length = length_of(self.columns, count)
            row = self.at // self.columns
            number = (self.at - row * self.columns) // length + row * count if count > 1 else row
            self._known[count] = Spans(number, len(values), count)
        return self._known[count]


@dataclass(frozen=True, eq=False)
class Spans:
    """Blocks of active weights, as `lightning_memopt.optim.gefen_blocks.Blocks` of all weights.

    Attributes:
        number: Block of each active weight; int64 [active], ascending.
        rows, count: Blocks lie in `rows` rows of `count`.
    """

    number: Tensor
    rows: int
    count: int

    def spread(self, values: Tensor, shape: object = None) -> Tensor:
        """A fresh row [1, active], from one value per block."""
        return values.reshape(-1).index_select(0, self.number)[None]

    def largest(self, x: Tensor) -> Tensor:
        """Largest magnitude in each block, 0 in empty ones: [rows, count]."""
        result = x.new_zeros(self.rows * self.count)
        return result.scatter_reduce_(0, self.number, x.abs().view(-1), "amax").view(self.rows, self.count)

    def sizes(self) -> Tensor:
        """Active weights in each block: int64 [rows, count]."""
        return torch.bincount(self.number, minlength=self.rows * self.count).view(self.rows, self.count)

    def mean(self, x: Tensor) -> Tensor:
        """Mean over each block, 0 in empty ones: [rows, count]. Sums have one order, on GPUs too."""
        sizes = self.sizes()
        sums = torch.segment_reduce(x.view(-1), "sum", lengths=sizes.view(-1), unsafe=True, initial=0)
        return sums.view(sizes.shape) / sizes.clamp(min=1)

    def put(self, values: Tensor, x: Tensor) -> None:
        """Write what all weights of a block agree on; values of empty blocks stay."""
        values.view(-1)[self.number] = x.view(-1).to(values.dtype)


def where(state: Mapping[str, Any]) -> Where | None:
    """What `state` says of a sparse weight; None for a dense one."""
    return state.get(WHERE)
