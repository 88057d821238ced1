"""Tables whose look-ups are sent to the owners of their rows, instead of a gradient of all rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import Module
from sharded import Ranks, furthest, train, train_plain, train_told
from torch import Tensor, nn

WIDTH = 6


class Tables(nn.Module):
    """Tables with padding rows of different ranks, one of them looked up twice, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH, padding_idx=2)
        self.places = nn.Embedding(11, WIDTH, padding_idx=9)
        self.kinds = nn.Embedding(3, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        for table in (self.words, self.places, self.kinds):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + torch.tanh(self.words(ids.flip(1))) + self.kinds(ids % 3)
        return self.head(torch.tanh(x * self.places(ids)))


MAKE = partial(Module, net=Tables)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}], ids=["", "clipped"])
def test_equal(two: Ranks, options: dict[str, Any], later: bool) -> None:
    """Whether updates are left out as a whole, which makes ranks form what is theirs of the gradient, or not."""
    results = two(train_told, later, MAKE, max_steps=8, **options)
    assert furthest(results[0], results[1]) == 0
    assert furthest(train_plain(MAKE, max_steps=8, **options), results[0]) <= 1e-5


@pytest.mark.parametrize("replicate", [1, 2])
def test_four_ranks(four: Ranks, replicate: int) -> None:
    """One rank has no row of the smallest table; replicas see each other's tokens."""
    results = four(train, MAKE, {"replicate": replicate}, max_steps=8)
    assert all(furthest(results[0], other) == 0 for other in results[1:])
    assert furthest(train_plain(MAKE, max_steps=8), results[0]) <= 1e-5


def test_bytes(two: Ranks) -> None:
    """A rank receives what the other one looked up: two samples of so many tokens, twice in one table."""
    for run in two(train, MAKE, max_steps=1, inspect=moved):
        tokens, twice, once = run["said"]
        assert once == tokens * (4 * WIDTH + 8) and twice == 2 * once


def moved(trainer: Any) -> tuple[int, int, int]:
    plan = trainer.strategy.updater.plan
    tokens = next(iter(trainer.train_dataloader))[0].numel()
    return tokens, plan["net.words.weight"][1], plan["net.places.weight"][1]
