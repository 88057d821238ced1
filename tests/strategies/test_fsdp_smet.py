"""SMET on shards: masks, weights, ages and states are those of one process, whatever the number of ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, Module
from sharded import Deep, Ranks, furthest, train, train_forge
from torch import Tensor

import lightning_memopt as memopt

pytestmark = pytest.mark.filterwarnings("ignore:SMET. warmup_steps")
ROUTES = ["exchange", "reduce"]
# Three topology updates, at steps 6, 12 and 18 of 20.
OPTIONS: dict[str, Any] = {
    "density": 0.5, "update_every": 6, "warmup_steps": 3, "stop_at": None, "prune_schedule": "constant",
    "prune_fraction": 0.3,
}  # fmt: skip


class Watched(memopt.SMET):
    """Remembers masks after every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        self.seen.append(self.masks)


def says(trainer: pl.Trainer) -> dict[str, Any]:
    """What the callback shows, and what it logged."""
    callback = next(c for c in trainer.callbacks if isinstance(c, memopt.SMET))  # type: ignore[attr-defined]
    own = {name: len(layer.slot.state["smet_cohort"]) for name, layer in callback.layers.items()}
    return {
        "seen": getattr(callback, "seen", None),
        "masks": callback.masks,
        "ages": callback.ages,
        "memory": callback.memory(),
        "own": own,
        "logged": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


def sparse(run: Any, smet: dict[str, Any] | None = None, **options: Any) -> Any:
    """`run` (a function of tests/sharded.py, or ranks and one) with SMET."""
    return run(callbacks=[Watched(**(OPTIONS | (smet or {})))], inspect=says, **options)


def assert_same_topology(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Masks after every step, and ages at the end."""
    for mine, other in zip(a["seen"], b["seen"], strict=True):
        assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
    assert all(torch.equal(a["ages"][name], b["ages"][name]) for name in a["ages"])


def assert_equal(
    ranks: Ranks, make: Any = None, smet: dict[str, Any] | None = None, strategy: Any = None, **options: Any
) -> list[dict[str, Any]]:
    """One process and several: the same masks, and weights within 1e-5 after 20 steps."""
    make = make or partial(Module, net=Deep)
    single = sparse(partial(train_forge, make), smet, **options)
    results = sparse(partial(ranks, train, make, strategy), smet, **options)
    assert len(single["said"]["seen"]) == options.get("max_steps", 20)
    changes = [not torch.equal(a[name], b[name]) for a, b in zip(single["said"]["seen"], single["said"]["seen"][1:])
               for name in a]  # fmt: skip
    assert sum(changes) >= 3
    for result in results:
        assert_same_topology(single["said"], result["said"])
        assert furthest(results[0], result) == 0
    assert furthest(single, results[0]) <= 1e-5
    for name, mask in single["said"]["masks"].items():
        assert not results[0]["weights"][name][~mask].any()
    return [single, *results]


@pytest.mark.parametrize("route", ROUTES)
def test_plain(two: Ranks, route: str) -> None:
    assert_equal(two, strategy={"route": route})
