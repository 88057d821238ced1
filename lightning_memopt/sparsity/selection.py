"""The k smallest of many integer keys, found by their digits: nothing is sorted, and no key is kept.

Two passes over 32-bit keys count how many share their upper, then their lower 16 bits with the k-th smallest. Equal
keys are taken in the order of their index, so the choice depends on the keys alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_memopt.sparsity.bits import chunks

DIGIT = 16
# Keys of elements [start, stop) as non-negative int64, and which of them may be chosen.
Keys = Callable[[int, int], tuple[Tensor, Tensor]]


class Smallest:
    """Chooses the `k` candidates with the smallest keys.

    Args:
        keys: Called several times for each range.
        total: Number of elements.
        k: How many to choose, at most the number of candidates.
        width: Bits of a key, 32 or 64.
    """

    def __init__(self, keys: Keys, total: int, k: int, width: int = 32) -> None:
        self.keys = keys
        self.threshold, self.ties = self._threshold(total, k, width) if k else (-1, 0)

    def _threshold(self, total: int, k: int, width: int) -> tuple[int, int]:
        """The k-th smallest key, and how many of the keys equal to it are among the k."""
        prefix = 0
        for shift in range(width - DIGIT, -1, -DIGIT):
            counts: Tensor | None = None
            for start, stop in chunks(total):
                key, candidate = self.keys(start, stop)
                digits = key[candidate & (key >> (shift + DIGIT) == prefix)] >> shift & ((1 << DIGIT) - 1)
                part = torch.bincount(digits, minlength=1 << DIGIT)
                counts = part if counts is None else counts.add_(part)
            assert counts is not None
            below = counts.cumsum(0)
            digit = int(torch.searchsorted(below, k))
            k -= int(below[digit] - counts[digit])
            prefix = prefix << DIGIT | digit
        return prefix, k

    def chosen(self, start: int, stop: int) -> Tensor:
        """Which of the elements [start, stop) are chosen, bool; ranges must come in order, without gaps."""
        key, candidate = self.keys(start, stop)
        tied = candidate & (key == self.threshold)
        taken = tied & (tied.cumsum(0) <= self.ties)
        self.ties -= int(taken.sum())
        return candidate & (key < self.threshold) | taken
