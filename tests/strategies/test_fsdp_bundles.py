"""The layers of a block travel together: the same training, one announcement, and an input that is sent once."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from harness import Module
from sharded import Ranks, furthest, train, train_plain
from torch import Tensor, nn

import lightning_memopt as memopt
from lightning_memopt.backward import shipping
from lightning_memopt.backward.peers import Answers, Item, Peers

STEPS, WIDTH = 4, 12


class Attention(nn.Module):
    """Three layers of one input, one of two calls, and one that sees the first tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, 6, 6))
        self.o, self.few = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.q(x)) * torch.cat([self.k(x), torch.tanh(self.v(x))], -1)
        x = x + self.o(inner) + self.o(torch.tanh(x))
        return x + self.few(x[:, :2]).mean(1, keepdim=True)


class Stack(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MAKE = partial(Module, net=Stack)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("route", ["exchange", "reduce", "auto"])
def test_equal(two: Ranks, route: str, ahead: bool, options: dict[str, Any]) -> None:
    """Layers with the same input, different tokens and two uses, sent together."""
    plain = train_plain(MAKE, **options)
    results = two(train, MAKE, {"route": route}, ahead=ahead, **options)
    assert furthest(results[0], results[1]) == 0 and furthest(plain, results[0]) <= 1e-5


def count_announcements(**options: Any) -> tuple[Counter[int], dict[str, tuple[str, int]]]:
    """By the number of layers announced, in all steps; and the plan."""
    counts: Counter[int] = Counter()
    plan: dict[str, tuple[str, int]] = {}
    plain = Peers.announce

    def announce(self: Peers, kind: int, *items: Item) -> Answers:
        if kind == shipping.FACTORS:
            counts[len(items)] += 1
        return plain(self, kind, *items)

    Peers.announce = announce  # type: ignore[method-assign]
    try:
        train(MAKE, inspect=lambda trainer: plan.update(trainer.strategy.updater.plan), max_steps=STEPS, **options)
    finally:
        Peers.announce = plain  # type: ignore[method-assign]
    return counts, plan


def test_one_announcement_per_block(two: Ranks) -> None:
    """In all but the first step, which does not know the tokens; q, k and v receive their input once."""
    for counts, plan in two(count_announcements, strategy={"route": "exchange"}, ahead=True):
        # The head by itself; the first block of the first step layer by layer, until an answer is known.
        assert counts[5] >= 2 * (STEPS - 1) and counts[1] >= STEPS
        assert sum(size * count for size, count in counts.items()) == STEPS * 11
        assert sum(counts.values()) <= 3 * (STEPS - 1) + 11
        moved = {name.removeprefix("net.blocks.0."): count for name, (_, count) in plan.items()}
        q, k, v = (moved[f"{name}.weight"] for name in "qkv")
        assert q + k + v == 8 * min(k, v)  # one input of 12 columns; 6, 3 and 3 columns of dY


def test_reduced_layers_go_one_by_one(two: Ranks) -> None:
    """Blocks of gradients are spread over the backward pass."""
    for counts, _ in two(count_announcements, strategy={"route": "reduce"}):
        assert set(counts) == {1}


class TurnsLater(Attention):
    """From the third call on, rank 1 uses k where rank 0 uses v."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2 and torch.distributed.get_rank() == 1:
            return x + self.k(x).mean() + self.o(x)
        return x + self.v(x).mean() + self.o(x)


class Turning(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TurnsLater() for _ in range(2))


def test_another_layer_inside_a_bundle() -> None:
    """All ranks say which layers they have, in a step that follows equal ones."""
    doomed = Ranks(2)
    try:
        errors = doomed.attempt(train, partial(Module, net=Turning), {"timeout_seconds": 8}, ahead=True)
    finally:
        doomed.stop()
    words = "rank 0 has net.blocks.1.v.weight, rank 1 has net.blocks.1.k.weight"
    assert all(isinstance(error, memopt.UpdateError) and words in str(error) for error in errors), errors
