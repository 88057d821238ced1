"""Gefen's blocks: how a weight is cut into them, and how many weights share a second moment.

A block is up to B consecutive weights of one row, B a power of two; the last block of a row may be shorter. A row is
what one index of the first dimension selects: an output of a linear layer or a convolution, a token of an embedding.
Blocks never cross a row, so a state that is sharded by rows reshards exactly, and they lie inside a tile of the fused
kernels. A divisor of the row length would do without short blocks, but most divisors fit no kernel, and lengths like
147 or 50257 have none worth having.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

# The shortest block that is looked for.
FINEST = 64
# Least mean squared gradient of a block: v never vanishes, by underflow, under a moment that has not. Its root is a
# billionth of the usual eps.
LEAST = 2.0**-113
# Bytes of state per parameter, over all parameters of an optimizer, that shorter blocks may not exceed.
BUDGET = 1.1
# Shorter blocks are wanted where sharing one second moment would make the typical step wrong by a tenth.
TOLERANCE = 0.1


def per_block(shape: Sequence[int], block: int) -> tuple[int, int]:
    """Shape of a tensor with one element per block: [rows, blocks in a row]."""
    return shape[0], -(-prod(shape[1:]) // block)


@dataclass(frozen=True)
class Blocks:
    """The blocks of one weight: `count` in each of `rows` rows of `columns` weights."""

    rows: int
    columns: int
    count: int

    @classmethod
    def of(cls, weight: Tensor, values: Tensor) -> Blocks:
        """From a tensor of the weight's shape and one with an element per block."""
        rows, count = values.shape
        return cls(rows, prod(weight.shape[1:]), count)

    @property
    def block(self) -> int:
        """Weights in a block: the smallest power of two that cuts a row into this many."""
        block = 1
        while -(-self.columns // block) > self.count:
            block *= 2
        return block

    def split(self, x: Tensor) -> Tensor:
        """[rows, count, block] of a tensor of the weight's shape, short blocks filled up with zeros."""
        padded = F.pad(x.reshape(self.rows, self.columns), (0, self.count * self.block - self.columns))
        return padded.view(self.rows, self.count, self.block)

    def join(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Inverse of `split`."""
        return x.reshape(self.rows, self.count * self.block)[:, : self.columns].reshape(shape)

    def spread(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """A fresh tensor of the weight's shape, from one value per block."""
        return self.join(values[:, :, None].expand(-1, -1, self.block).clone(), shape)

    def largest(self, x: Tensor) -> Tensor:
        """Largest magnitude in each block: [rows, count]."""
        return self.split(x).abs().amax(2)

    def put(self, values: Tensor, x: Tensor) -> None:
        """Write what all weights of a block agree on."""
        values.copy_(self.split(x)[:, :, 0])

    def sizes(self, like: Tensor) -> Tensor:
        """Weights in each block of a row: [count], dtype and device of `like`."""
        starts = torch.arange(self.count, device=like.device) * self.block
        return (self.columns - starts).clamp_(max=self.block).to(like.dtype)

    def mean(self, x: Tensor) -> Tensor:
        """Mean over each block: [rows, count]."""
        return self.split(x).sum(2) / self.sizes(x)

    def merge(self, values: Tensor, factor: int) -> Tensor:
        """Means over blocks `factor` times as long, from means over these: [rows, ceil(count / factor)]."""
        sizes = self.sizes(values)
        pad = (0, -self.count % factor)
        total = F.pad(values * sizes, pad).unflatten(-1, (-1, factor)).sum(-1)
        return total / F.pad(sizes, pad).unflatten(-1, (-1, factor)).sum(-1)


def profile(fine: Tensor) -> tuple[Tensor, Tensor]:
    """How the squared gradient is spread along a row, averaged over the rows that have one.

    Args:
        fine: Means of the squared gradient over the finest blocks, [rows, count].

    Returns:
        The sum over rows of each row divided by its own mean, float64 [count], and the number of rows. Rows differ by
        chance; what they have in common is structure. Ranks may add up theirs.
    """
    rows = fine.double()
    mean = rows.mean(1, keepdim=True)
    live = mean > 2 * LEAST
    return torch.where(live, rows / torch.where(live, mean, 1.0), 0.0).sum(0), live.sum().double()


def disagreement(spread: Tensor, blocks: Blocks, factor: int) -> float:
    """How wrong step sizes get if blocks `factor` times as long share one second moment: rms of ln of the ratio.

    A step is inversely proportional to the root of the second moment, hence the half. Blocks that see no gradient take
    no step, so they only count as neighbours.

    Args:
        spread: What `profile` returns, divided by the rows; float64 [count].
        blocks: The finest blocks.
        factor: Finest blocks in one of the longer.
    """
    merged = blocks.merge(spread, factor).repeat_interleave(factor)[: blocks.count]
    live = spread > 1e-6
    if not live.any():
        return 0.0
    return float((0.5 * (spread[live] / merged[live]).log()).square().mean().sqrt())


@dataclass(frozen=True)
class Wish:
    """A weight whose blocks are to be chosen.

    Attributes:
        shape: Of the full, unsharded weight.
        options: Block lengths, the default (longest) first.
        errors: `disagreement` of each.
    """

    shape: tuple[int, ...]
    options: tuple[int, ...]
    errors: tuple[float, ...]

    @property
    def wanted(self) -> int:
        """The longest block that is good enough, else the shortest."""
        good = (block for block, error in zip(self.options, self.errors, strict=True) if error <= TOLERANCE)
        return next(good, self.options[-1])


def choose(wishes: Sequence[Wish], room: float) -> list[int]:
    """The block length of each weight: as wanted, those in most need first, while the bytes last.

    Args:
        wishes: In the order of the parameters, which breaks ties.
        room: Bytes left if every weight took its default.
    """
    chosen = [wish.options[0] for wish in wishes]
    for i in sorted(range(len(wishes)), key=lambda i: -wishes[i].errors[0]):
        wish = wishes[i]
        cost = 4 * (prod(per_block(wish.shape, wish.wanted)) - prod(per_block(wish.shape, wish.options[0])))
        if cost <= room:
            chosen[i] = wish.wanted
            room -= cost
    return chosen
