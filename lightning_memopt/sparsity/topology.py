"""A topology update: which weights of a layer are pruned and which are grown.

A layer's weights are runs of `run` consecutive weights of a row (run = 1: single weights); a mask keeps or drops whole
runs. As many are grown as pruned, so a layer's density never changes, and none that is pruned is grown in the same
event.

Random choices are the smallest of `lightning_memopt.kernels.rounding.bits` of a key of (seed, event, parameter name) at
the runs' global numbers. That function is one-to-one, so they are without repetition.

Of a sharded layer each process has the weights and bits of its own rows, and chooses there exactly what one process
would: `lightning_memopt.sparsity.selection` finds the last one that is still chosen, over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memopt.kernels.active import Largest
from lightning_memopt.kernels.rounding import bits as random_bits
from lightning_memopt.kernels.rounding import rounding_key
from lightning_memopt.sparsity.bits import CHUNK, chunks, pack, unpack
from lightning_memopt.sparsity.selection import Smallest
from lightning_memopt.sparsity.shard import Shard


@dataclass(frozen=True)
class Runs:
    """The runs of one layer.

    Attributes:
        name: Name of the parameter.
        total: Its weights.
        run: Weights in a run; a row holds a whole number of runs.
        shard: Which of the weights are here; None for all of them.
    """

    name: str
    total: int
    run: int
    shard: Shard | None = None

    @property
    def count(self) -> int:
        """Number of runs."""
        return self.total // self.run

    @property
    def own(self) -> range:
        """Numbers of those that are here."""
        if self.shard is None:
            return range(self.count)
        first = self.shard.first // self.run
        return range(first, first + self.shard.count // self.run)


def random_mask(runs: Runs, keep: int, seed: int, device: torch.device) -> Tensor:
    """Bits of a mask with `keep` runs chosen at random: event 0 of the layer. Those of the weights that are here."""
    key, first = rounding_key(seed, 0, f"smet {runs.name}"), runs.own.start

    def keys(start: int, stop: int) -> tuple[Tensor, Tensor]:
        number = torch.arange(first + start, first + stop, device=device)
        return random_bits(key, number), torch.ones_like(number, dtype=torch.bool)

    chosen = Smallest(keys, len(runs.own), keep, shard=runs.shard)
    return _pack(runs, chosen.chosen, device)


@torch.no_grad()
def exchange(weight: Tensor, mask: Tensor, runs: Runs, k: int, seed: int, event: int, growth: Largest | None) -> Tensor:
    """Choose `k` active runs to prune, those of least magnitude, and as many others to grow.

    Args:
        weight: Of the layer, the rows that are here.
        mask: Its bits.
        runs: Its runs.
        k: At most the number of active, and of inactive, runs of the layer.
        seed: Seed of random growth.
        event: Number of the update, from 1.
        growth: The runs that may grow, if by gradient: over all processes `k` or more; else they are chosen at random.

    Returns:
        Bits of the new mask.
    """
    flat, run, first, count = weight.reshape(-1), runs.run, runs.own.start, len(runs.own)
    wide = weight.dtype == torch.float64
    key = rounding_key(seed, event, f"smet {runs.name}")

    def active(start: int, stop: int) -> Tensor:
        return unpack(mask, start * run, stop * run)[::run]

    def magnitudes(start: int, stop: int) -> tuple[Tensor, Tensor]:
        part = flat[start * run : stop * run].to(torch.float64 if wide else torch.float32)
        # The bits of a float that is not negative are ordered as its value is.
        size = part.abs().view(-1, run).sum(1) if run > 1 else part.abs()
        return size.view(torch.int64 if wide else torch.int32).long(), active(start, stop)

    def noise(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return random_bits(key, torch.arange(first + start, first + stop, device=flat.device)), ~active(start, stop)

    pruned = Smallest(magnitudes, count, k, 64 if wide else 32, runs.shard)
    random = Smallest(noise, count, k, shard=runs.shard) if growth is None else None
    listed = _largest(growth, k, runs.shard, flat.device) - first if growth is not None else None

    def part(start: int, stop: int) -> Tensor:
        kept = active(start, stop) & ~pruned.chosen(start, stop)
        if random is not None:
            return kept | random.chosen(start, stop)
        assert listed is not None
        kept[listed[(listed >= start) & (listed < stop)] - start] = True
        return kept

    return _pack(runs, part, flat.device)


def _largest(growth: Largest, k: int, shard: Shard | None, device: torch.device) -> Tensor:
    """Numbers of those here that are among the `k` with the largest gradient over all processes."""
    if growth.runs is None or growth.scores is None:  # this process has no rows
        runs, scores = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device)
    else:
        order = growth.runs.argsort()
        runs, scores = growth.runs[order].long(), growth.scores[order]
    wide = scores.dtype == torch.float64

    def keys(start: int, stop: int) -> tuple[Tensor, Tensor]:
        part = scores[start:stop]
        # Turned around, as the largest are wanted.
        key = torch.iinfo(torch.int64 if wide else torch.int32).max - part.view(torch.int64 if wide else torch.int32)
        return key.long(), torch.ones_like(part, dtype=torch.bool)

    chosen = Smallest(keys, len(runs), k, 64 if wide else 32, shard)
    taken = [chosen.chosen(start, stop) for start, stop in chunks(len(runs))]
    return runs[torch.cat(taken)] if taken else runs


@torch.no_grad()
def apply_mask(weight: Tensor, mask: Tensor) -> None:
    """Set weights off the mask to zero."""
    columns = weight.shape[1]
    rows = max(CHUNK // columns, 1)
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows]
        part.masked_fill_(~unpack(mask, start * columns, start * columns + part.numel()).view(part.shape), 0.0)


def _pack(runs: Runs, part: Callable[[int, int], Tensor], device: torch.device) -> Tensor:
    """Bits of a mask that is given by runs."""

    def flags(start: int, stop: int) -> Tensor:
        return part(start // runs.run, stop // runs.run).repeat_interleave(runs.run)

    return pack(len(runs.own) * runs.run, flags, device, runs.run)
