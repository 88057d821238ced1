"""The k smallest of many integer keys, found by their digits: nothing is sorted, and no key is kept.

Two passes over 32-bit keys count how many share their upper, then their lower 16 bits with the k-th smallest. Equal
keys are taken in the order of their index, so the choice depends on the keys alone.

Where the keys lie on several processes, the counts are added up, 512 KiB for each pass, and so the k-th smallest of all
is known to all; of keys equal to it, those of the first rows are taken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_memopt.sparsity.bits import chunks
from lightning_memopt.sparsity.shard import Shard

DIGIT = 16
# Keys of elements [start, stop) as non-negative int64, and which of them may be chosen.
Keys = Callable[[int, int], tuple[Tensor, Tensor]]


class Smallest:
    """Chooses the `k` candidates with the smallest keys.

    Args:
        keys: Called several times for each range.
        total: Number of elements here.
        k: How many to choose, at most the number of candidates, over all processes.
        width: Bits of a key, 32 or 64.
        shard: Who else holds elements; None for nobody.
    """

    def __init__(self, keys: Keys, total: int, k: int, width: int = 32, shard: Shard | None = None) -> None:
        self.keys = keys
        self.threshold, self.ties = self._threshold(total, k, width, shard) if k else (-1, 0)

    def _threshold(self, total: int, k: int, width: int, shard: Shard | None) -> tuple[int, int]:
        """The k-th smallest key, and how many of the keys equal to it here are among the k."""
        prefix = mine = 0
        for shift in range(width - DIGIT, -1, -DIGIT):
            counts = torch.zeros(1 << DIGIT, dtype=torch.int64, device=None if shard is None else shard.device)
            for start, stop in chunks(total):
                key, candidate = self.keys(start, stop)
                digits = key[candidate & (key >> (shift + DIGIT) == prefix)] >> shift & ((1 << DIGIT) - 1)
                part = torch.bincount(digits, minlength=1 << DIGIT)
                counts = counts.to(part.device).add_(part)
            own = counts.clone()
            if shard is not None:
                counts = shard.sum(counts)
            below = counts.cumsum(0)
            digit = int(torch.searchsorted(below, k))
            k -= int(below[digit] - counts[digit])
            mine = int(own[digit])
            prefix = prefix << DIGIT | digit
        return prefix, k if shard is None else min(max(k - shard.before(mine), 0), mine)

    def chosen(self, start: int, stop: int) -> Tensor:
        """Which of the elements [start, stop) are chosen, bool; ranges must come in order, without gaps."""
        key, candidate = self.keys(start, stop)
        tied = candidate & (key == self.threshold)
        taken = tied & (tied.cumsum(0) <= self.ties)
        self.ties -= int(taken.sum())
        return candidate & (key < self.threshold) | taken
