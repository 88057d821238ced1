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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memopt.backward.traffic import shard_rows
from lightning_memopt.kernels.slabs import Factors, matmul

if TYPE_CHECKING:
    from lightning_memopt.backward.outbox import Outbox

# Newer names of the same collectives; the old ones warn where the new ones exist.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all = dist.all_to_all_single

# Elements of a block of dW over all owners, 128 MiB in float32. Each costs the host five launches, and an update of a
# part of the weight costs it more than one of the whole: a layer of an 8B Llama is one or two blocks.
BLOCK_ELEMENTS = 1 << 25
# With so few ranks, what all of them get goes along with what each gets, copied for each: one collective and not two,
# with no byte more on the way.
TOGETHER = 2
# What tensors are seen as where they are only copied.
WIDE = torch.complex128


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
        outbox: Where factors are left for the others, if these can read it; else they go by collectives.
    """

    group: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup | None
    size: int
    shards: int
    index: int
    outbox: Outbox | None = None

    def rows(self, total: int, shard: int | None = None) -> tuple[int, int]:
        """First row, and row past the last, of a shard (this rank's) of `total` rows."""
        return owned_rows(total, self.shards, self.index if shard is None else shard)


def owned_rows(total: int, shards: int, shard: int) -> tuple[int, int]:
    """First row, and row past the last, of a shard of `total` rows."""
    per = shard_rows(total, shards)
    return min(shard * per, total), min((shard + 1) * per, total)


def sources(xs: Sequence[Tensor]) -> list[int]:
    """For each layer, the position of the first one with the same x, which is equal as long as all are kept."""
    places = [(x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()) for x in xs]
    return [places.index(own) for own in places]


class Exchange:
    """Factors of some layers on their way to the owners of their rows, in two collectives, or in one (`TOGETHER`).

    The columns of all layers lie beside each other, so that what arrives is a view of what was received.

    Args:
        dys: This rank's dY [tokens, R] of each layer; R may differ.
        xs: Its x [tokens, C]; C may differ.
        sources: For each layer, the first one with the same x, which is sent once.
        most: Largest number of tokens of any rank. Fewer are padded by rows of zeros, which add nothing.
        ranks: Who takes part.
    """

    def __init__(
        self, dys: Sequence[Tensor], xs: Sequence[Tensor], sources: Sequence[int], most: int, ranks: Ranks
    ) -> None:
        self._layout = layout = layout_of(dys, xs, sources, ranks)
        distinct = [xs[i] for i in layout.distinct]
        self._dtype = dys[0].dtype
        self._works: list[dist.Work] = []
        self._sent: list[Tensor] = []  # kept until the collectives are through: they read them
        even = layout.even and ranks.size == ranks.shards
        if even and ranks.size <= TOGETHER and dys[0].dtype == xs[0].dtype:
            parts = _by_owner([*dys, *distinct], len(dys), ranks.size)
            self._arrived = [self._to_owners(parts, most, ranks)]
            return
        self._arrived = [
            self._to_owners(_by_owner(dys, len(dys), ranks.size), most, ranks)
            if even
            else self._to_uneven_owners(dys, most, ranks),
            self._to_all(distinct, most, ranks),
        ]

    def _to_all(self, xs: Sequence[Tensor], most: int, ranks: Ranks) -> Tensor:
        x = _padded(xs[0] if len(xs) == 1 else torch.cat(list(xs), 1), most).contiguous()
        arrived = x.new_empty(ranks.size * most, x.shape[1])
        if most:
            self._works.append(all_gather(arrived, x, group=ranks.group, async_op=True))
            self._sent.append(x)
        return arrived

    def _to_owners(self, parts: Sequence[Tensor], most: int, ranks: Ranks) -> Tensor:
        """Of each layer's columns [ranks, tokens, columns], those of each rank."""
        sent = _padded(torch.cat(list(parts), 2).view(self._dtype), most)
        return self._exchange(sent.view(-1), [sent[0].numel()] * ranks.size, sent.shape[2], most, ranks)

    def _to_uneven_owners(self, dys: Sequence[Tensor], most: int, ranks: Ranks) -> Tensor:
        flat = []
        for rank in range(ranks.size):
            bounds = [ranks.rows(dy.shape[1], rank % ranks.shards) for dy in dys]
            columns = [dy[:, first:last] for dy, (first, last) in zip(dys, bounds, strict=True)]
            flat.append(_padded(torch.cat(columns, 1), most).reshape(-1))
        return self._exchange(torch.cat(flat), [len(part) for part in flat], sum(self._layout.own), most, ranks)

    def _exchange(self, sent: Tensor, counts: list[int], columns: int, most: int, ranks: Ranks) -> Tensor:
        arrived = sent.new_empty(ranks.size * most, columns)
        if most:
            work = all_to_all(
                arrived.view(-1),
                sent,
                output_split_sizes=[most * columns] * ranks.size,
                input_split_sizes=counts,
                group=ranks.group,
                async_op=True,
            )
            self._works.append(work)
            self._sent.append(sent)
        return arrived

    def wait(self) -> list[Factors]:
        """Of each layer, this rank's columns of dY, and x, over all ranks' tokens.

        Kernels that follow wait, the host does not.
        """
        for work in self._works:
            work.wait()
        self._sent = []
        return split(self._layout, *self._arrived)


class Layout(NamedTuple):
    """Where layers that travel together lie beside each other.

    Attributes:
        own: Columns of each layer's dY that are this rank's.
        columns: Of each x that is sent.
        distinct: The layers whose x is sent.
        places: For each layer, which of these is its own.
        even: Whether all ranks own as many columns of each layer.
    """

    own: list[int]
    columns: list[int]
    distinct: list[int]
    places: list[int]
    even: bool


def layout_of(dys: Sequence[Tensor], xs: Sequence[Tensor], sources: Sequence[int], ranks: Ranks) -> Layout:
    """Of layers that travel together; arguments as for `Exchange`."""
    heights, widths = tuple(dy.shape[1] for dy in dys), tuple(x.shape[1] for x in xs)
    return _layout(heights, widths, tuple(sources), ranks.shards, ranks.index)


def split(layout: Layout, *arrived: Tensor) -> list[Factors]:
    """The factors of each layer, views of what arrived: dY and x of all side by side, or these two together."""
    if len(arrived) == 1:
        parts = arrived[0].split_with_sizes(layout.own + layout.columns, 1)
    else:
        parts = arrived[0].split_with_sizes(layout.own, 1) + arrived[1].split_with_sizes(layout.columns, 1)
    return [(parts[i], parts[len(layout.own) + place]) for i, place in enumerate(layout.places)]


@lru_cache(256)
def _layout(
    heights: tuple[int, ...], widths: tuple[int, ...], sources: tuple[int, ...], shards: int, index: int
) -> Layout:
    distinct = [i for i, source in enumerate(sources) if source == i]
    return Layout(
        own=[last - first for first, last in (owned_rows(height, shards, index) for height in heights)],
        columns=[widths[i] for i in distinct],
        distinct=distinct,
        places=[distinct.index(source) for source in sources],
        even=all(height % shards == 0 for height in heights),
    )


def _by_owner(tensors: Sequence[Tensor], layers: int, ranks: int) -> list[Tensor]:
    """Views [ranks, tokens, columns], in a wider dtype if possible: they are copied by element.

    Args:
        tensors: dY of each layer, of which every rank gets its columns, and then others, of which each gets all.
        layers: How many are the former.
        ranks: How many there are.
    """
    size = tensors[0].element_size()
    shares = [tensor.shape[1] // (ranks if i < layers else 1) for i, tensor in enumerate(tensors)]
    # Numbers of elements that are whole and aligned elements of 16 bytes.
    counts = chain(shares, *((tensor.stride(0), tensor.storage_offset()) for tensor in tensors))
    aligned = all(n * size % WIDE.itemsize == 0 for n in counts) and all(tensor.stride(1) == 1 for tensor in tensors)
    parts = []
    for i, tensor in enumerate(tensors):
        wide = tensor.view(WIDE) if aligned else tensor
        columns, (row, column) = wide.shape[1], wide.stride()
        if i < layers:
            columns //= ranks
        parts.append(wide.as_strided((ranks, len(wide), columns), (columns * column if i < layers else 0, row, column)))
    return parts


class Lookups:
    """What all ranks looked up in one table, on its way to all of them, in two collectives.

    Args:
        dy: Gradient [tokens, D] of what this rank looked up.
        indices: Rows of the whole table, int64 [tokens].
        most: Largest number of tokens of any rank.
        ranks: Who takes part.
    """

    def __init__(self, dy: Tensor, indices: Tensor, most: int, ranks: Ranks) -> None:
        self._dy = dy.new_empty(ranks.size * most, dy.shape[1])
        self._indices = indices.new_empty(ranks.size * most)
        self._works: list[dist.Work] = []
        if not most:
            return
        # No row is -1.
        sent = _padded(dy, most).contiguous(), torch.nn.functional.pad(indices, (0, most - len(indices)), value=-1)
        self._works = [
            all_gather(into, part, group=ranks.group, async_op=True)
            for into, part in zip((self._dy, self._indices), sent, strict=True)
        ]
        self._sent: tuple[Tensor, ...] = sent

    def wait(self, first: int, last: int, padding: int) -> tuple[Tensor, Tensor, int]:
        """Of the rows [first, last): dY of all ranks' tokens, the row of each, and that which takes no gradient or -1.

        Tokens of other rows have that last number for a row, so nothing takes theirs. Kernels that follow wait, the
        host does not.
        """
        for work in self._works:
            work.wait()
        self._sent = ()
        none = padding - first if first <= padding < last else -1
        mine = (self._indices >= first) & (self._indices < last)
        return self._dy, torch.where(mine, self._indices - first, none), none


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of dW, of all owners, on their way to these.

    Attributes:
        start, stop: The rows of the owner's shard that they are; none where the shard is too short.
        last: Whether the layer has no further block.
    """

    start: int
    stop: int
    last: bool
    _mine: Tensor
    _sent: Tensor
    _work: dist.Work
    _ranks: Ranks

    def wait(self) -> Tensor:
        """This rank's rows, summed over ranks, [stop - start, columns]; kernels that follow wait, the host does not."""
        self._work.wait()
        if self._ranks.replica_group is not None:
            dist.all_reduce(self._mine, group=self._ranks.replica_group)
        return self._mine[: self.stop - self.start]


def send_blocks(
    dy: Tensor, x: Tensor, ranks: Ranks, dtype: torch.dtype, elements: int | None = None
) -> Iterator[Block]:
    """Blocks of this rank's dYᵀ x, each formed and sent when it is asked for. All ranks must ask for all of them.

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
    for start in range(0, per, step):
        rows = min(step, per - start)
        block = matmul(_rows_of_all(dy, start, rows, per, ranks.shards).t(), x, dtype)
        mine = block.new_empty(rows, columns)
        work = reduce_scatter(mine, block, group=ranks.shard_group, async_op=True)
        stop = max(start, min(start + rows, last - first))
        yield Block(start, stop, start + rows == per, mine, block, work, ranks)


def reduce_rows(
    dy: Tensor, x: Tensor, ranks: Ranks, dtype: torch.dtype, elements: int | None = None
) -> Iterator[tuple[int, int, Tensor]]:
    """This rank's rows of the sum over ranks of dYᵀ x, block by block, as (first row, row past the last, block).

    The next block is formed while one is being summed. All ranks must run through all of it; arguments as for
    `send_blocks`.
    """
    flying: Block | None = None
    for block in chain(send_blocks(dy, x, ranks, dtype, elements), (None,)):
        if flying is not None:
            rows = flying.wait()
            if len(rows):
                yield flying.start, flying.stop, rows
        flying = block


def _rows_of_all(dy: Tensor, start: int, count: int, per: int, shards: int) -> Tensor:
    """Of each owner's `per` columns of dY, those from `start` on, side by side; zeros where a shard is too short."""
    missing = per * shards - dy.shape[1]
    if not missing and count == per:
        return dy
    if not missing:
        return dy.unflatten(1, (shards, per))[:, :, start : start + count].flatten(1)
    bounds = [min(owner * per + start, dy.shape[1]) for owner in range(shards)]
    parts = [dy[:, first : first + count] for first in bounds]
    return torch.cat([torch.nn.functional.pad(part, (0, count - part.shape[1])) for part in parts], 1)


def _padded(x: Tensor, rows: int) -> Tensor:
    """A tensor [..., tokens, columns] with rows of zeros after its own."""
    missing = rows - x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def sum_to_owners(parts: Tensor, ranks: Ranks) -> Tensor:
    """What [shards, n] of all ranks have for this rank's shard, summed, [n]."""
    mine = parts.new_empty(parts.shape[1])
    if ranks.shards > 1:
        reduce_scatter(mine, parts.view(-1), group=ranks.shard_group)
    else:
        mine.copy_(parts[0])
    if ranks.replica_group is not None:
        dist.all_reduce(mine, group=ranks.replica_group)
    return mine


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
