"""How ranks turn their own tokens' gradient of a weight into the owners' gradient of its rows.

A weight [R, C] is sharded by rows: rank o owns ceil(R/N) consecutive rows, the last ranks fewer or none. Every rank
holds the factors of its own tokens, dY [T, R] and x [T, C]; the gradient is the sum of dYᵀ x over ranks.

    exchange    x is gathered by all; dY's columns for o's rows go to o, which then has the factors of its rows over
                all tokens and can run the fused kernel on them. dW exists nowhere.
    reduce      dW is formed a block of rows at a time, the same block of every owner's rows, and summed over ranks in
                float32 into the owners. Two blocks exist at a time.

Functions of tensors and process groups: no autograd, no modules. Collectives are issued without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memopt.backward.traffic import shard_rows
from lightning_memopt.kernels.slabs import Factors, matmul

# Newer names of the same collectives; the old ones warn where the new ones exist.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all = dist.all_to_all_single

# Elements of a block of dW: large enough for a link's bandwidth, small beside an activation.
BLOCK_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model together.

    Attributes:
        group: All of them, ordered so that rank i of the group owns shard ``i % shards``.
        shard_group: Those that hold different rows of this rank's replica; shard o is owned by its rank o.
        replica_group: Those that hold the same rows, or None if there is one replica.
        size: Ranks of `group`.
        shards: Ranks of `shard_group`.
        index: This rank's shard.
    """

    group: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup | None
    size: int
    shards: int
    index: int

    def rows(self, total: int, shard: int | None = None) -> tuple[int, int]:
        """First row, and row past the last, of a shard (this rank's) of `total` rows."""
        per = shard_rows(total, self.shards)
        shard = self.index if shard is None else shard
        return min(shard * per, total), min((shard + 1) * per, total)


class Exchange:
    """Factors on their way to the owners of their rows.

    Args:
        dy: This rank's dY [tokens, R].
        x: This rank's x [tokens, C].
        most: Largest number of tokens of any rank. Fewer are padded by rows of zeros, which add nothing.
        ranks: Who takes part.
    """

    def __init__(self, dy: Tensor, x: Tensor, most: int, ranks: Ranks) -> None:
        bounds = [ranks.rows(dy.shape[1], i % ranks.shards) for i in range(ranks.size)]
        start, stop = ranks.rows(dy.shape[1])
        self._x = x.new_empty(ranks.size * most, x.shape[1])
        self._dy = dy.new_empty(ranks.size * most, stop - start)
        self._works: list[dist.Work] = []
        if not most:
            return
        dy, x = _padded(dy, most), _padded(x, most).contiguous()
        sent = torch.cat([dy[:, first:last].reshape(-1) for first, last in bounds])
        self._works = [
            all_gather(self._x, x, group=ranks.group, async_op=True),
            all_to_all(
                self._dy.view(-1),
                sent,
                output_split_sizes=[most * (stop - start)] * ranks.size,
                input_split_sizes=[most * (last - first) for first, last in bounds],
                group=ranks.group,
                async_op=True,
            ),
        ]
        # Kept until the collectives are through: they read them.
        self._sent: tuple[Tensor, ...] = (x, sent)

    def wait(self) -> Factors:
        """This rank's columns of dY, and x, over all ranks' tokens; kernels that follow wait, the host does not."""
        for work in self._works:
            work.wait()
        self._sent = ()
        return self._dy, self._x


def reduce_rows(
    dy: Tensor, x: Tensor, ranks: Ranks, dtype: torch.dtype, elements: int | None = None
) -> Iterator[tuple[int, int, Tensor]]:
    """This rank's rows of the sum over ranks of dYᵀ x, block by block, as (first row, row past the last, block).

    The next block is formed while one is being summed. All ranks must run through all of it.

    Args:
        dy: This rank's dY [tokens, R].
        x: This rank's x [tokens, C].
        ranks: Who takes part.
        dtype: Precision of the sums and blocks.
        elements: Size of a block of dW, over all owners; None for `BLOCK_ELEMENTS`.
    """
    total, columns = dy.shape[1], x.shape[1]
    per = shard_rows(total, ranks.shards)
    first, last = ranks.rows(total)
    step = max(1, (elements or BLOCK_ELEMENTS) // max(1, ranks.shards * columns))
    flying: tuple[int, Tensor, Tensor, dist.Work] | None = None
    for start in range(0, per, step):
        rows = min(step, per - start)
        parts = [_columns(dy, owner * per + start, rows) for owner in range(ranks.shards)]
        block = matmul(torch.cat(parts, 1).t(), x, dtype)
        mine = block.new_empty(rows, columns)
        work = reduce_scatter(mine, block, group=ranks.shard_group, async_op=True)
        if flying is not None:
            yield from _landed(flying, last - first, ranks)
        flying = (start, mine, block, work)
    if flying is not None:
        yield from _landed(flying, last - first, ranks)


def _landed(
    flying: tuple[int, Tensor, Tensor, dist.Work], rows: int, ranks: Ranks
) -> Iterator[tuple[int, int, Tensor]]:
    start, mine, _, work = flying
    work.wait()
    if ranks.replica_group is not None:
        dist.all_reduce(mine, group=ranks.replica_group)
    stop = min(start + len(mine), rows)
    if stop > start:
        yield start, stop, mine[: stop - start]


def _columns(dy: Tensor, start: int, count: int) -> Tensor:
    """Columns [start, start + count) of dY, those past the last as zeros."""
    part = dy[:, min(start, dy.shape[1]) : start + count]
    return torch.nn.functional.pad(part, (0, count - part.shape[1]))


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if len(x) == rows else torch.nn.functional.pad(x, (0, 0, 0, rows - len(x)))


def sum_over_shards(values: Tensor, ranks: Ranks) -> Tensor:
    """Add up what the owners of different rows know of them, in place; equal on all ranks afterwards."""
    if ranks.shards > 1:
        dist.all_reduce(values, group=ranks.shard_group)
    return values


def any_rank(flags: Tensor, ranks: Ranks) -> Tensor:
    """Largest value of each of the ranks' `flags`, in place."""
    if ranks.size > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=ranks.group)
    return flags
