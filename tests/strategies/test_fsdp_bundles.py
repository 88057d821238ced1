"""The layers of a block travel together: the same training, one announcement, and an input that is sent once."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from harness import Module
from lightning.pytorch import Callback
from sharded import Ranks, furthest, train, train_plain, train_told
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


def count_announcements(**options: Any) -> tuple[list[Counter[int]], dict[str, tuple[str, int]]]:
    """By the number of layers announced, for each step; and the plan."""
    counts: list[Counter[int]] = []
    plan: dict[str, tuple[str, int]] = {}
    plain = Peers.announce

    def announce(self: Peers, kind: int, *items: Item) -> Answers:
        if kind == shipping.FACTORS:
            counts[-1][len(items)] += 1
        return plain(self, kind, *items)

    class Steps(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            counts.append(Counter())

    Peers.announce = announce  # type: ignore[method-assign]
    try:
        inspect = lambda trainer: plan.update(trainer.strategy.updater.plan)  # noqa: E731
        train(MAKE, inspect=inspect, max_steps=STEPS, callbacks=[Steps()], **options)
    finally:
        Peers.announce = plain  # type: ignore[method-assign]
    return counts, plan


def test_one_announcement_per_block(two: Ranks) -> None:
    """In the second step, which knows the tokens; none from then on; q, k and v receive their input once."""
    for counts, plan in two(count_announcements, strategy={"route": "exchange"}, ahead=True):
        # The head and the table by themselves; in the first step also the layers before an answer is known.
        assert sum(size * count for size, count in counts[0].items()) == 12 and counts[0][1] >= 3
        assert counts[1] == {1: 2, 5: 2}
        assert counts[2:] == [{}] * (STEPS - 2)
        moved = {name.removeprefix("net.blocks.0."): count for name, (_, count) in plan.items()}
        q, k, v = (moved[f"{name}.weight"] for name in "qkv")
        assert q + k + v == 8 * min(k, v)  # one input of 12 columns; 6, 3 and 3 columns of dY


def test_hosts_that_wait_announce_every_block(two: Ranks) -> None:
    """They have the answers before they go on, and nothing to gain."""
    for counts, _ in two(count_announcements, strategy={"route": "exchange"}, ahead=False):
        assert counts[1] == counts[2] == counts[3] and counts[3]


def test_reduced_layers_go_one_by_one(two: Ranks) -> None:
    """Blocks of gradients are spread over the backward pass."""
    for counts, _ in two(count_announcements, strategy={"route": "reduce"}):
        assert all(set(count) == {1} for count in counts)


class Varied(Stack):
    """Every rank leaves the same blocks out of some steps, and detaches the same parts in others."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.steps += 1
        x = self.embedding(ids[:, : 4 + 2 * (self.steps // 8 % 2)].repeat(1, 2)[:, : ids.shape[1]])
        for i, block in enumerate(self.blocks):
            if i or self.steps % 3:
                y = block(x)
                x = x + (y.detach() if i and self.steps % 4 == 0 else y)
        return self.head(x)


@pytest.mark.parametrize("told_later", [False, True])
@pytest.mark.parametrize("route", ["exchange", "reduce", "auto"])
def test_steps_of_several_kinds(two: Ranks, route: str, told_later: bool) -> None:
    """Some are like an earlier one only as far as their forward passes."""
    make = partial(Module, net=Varied)
    results = two(train_told, told_later, make, {"route": route}, max_steps=24)
    assert furthest(results[0], results[1]) == 0 and furthest(train_plain(make, max_steps=24), results[0]) <= 1e-5


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


class LeavesAlone(Stack):
    """From the fifth step on, the last block of rank 1 has no gradient, though its forward pass is as before."""

    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.blocks[0](self.embedding(ids))
        y = self.blocks[1](x)
        return self.head(x + (y.detach() if self.calls > 4 and torch.distributed.get_rank() == 1 else y))


def test_one_rank_that_leaves_a_known_pass() -> None:
    """Ends all ranks: hosts that wait for each other's tensors, as these do, at the timeout."""
    doomed = Ranks(2)
    try:
        errors = doomed.attempt(train, partial(Module, net=LeavesAlone), {"timeout_seconds": 8}, ahead=True)
    finally:
        doomed.stop()
    assert all(isinstance(error, RuntimeError) for error in errors), errors


def test_another_layer_inside_a_bundle() -> None:
    """All ranks say which layers they have, in a step that follows equal ones."""
    doomed = Ranks(2)
    try:
        errors = doomed.attempt(train, partial(Module, net=Turning), {"timeout_seconds": 8}, ahead=True)
    finally:
        doomed.stop()
    words = "rank 0 has net.blocks.1.v.weight, rank 1 has net.blocks.1.k.weight"
    assert all(isinstance(error, memopt.UpdateError) and words in str(error) for error in errors), errors
