"""Modules that torch.compile has compiled: their fused layers stay fused, and updates are those of an eager run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import Module, Net, assert_equal_runs, fit
from torch import nn

from lightning_memopt.backward.slot import Slot

pytestmark = pytest.mark.filterwarnings("ignore")


def whole(backend: str) -> nn.Module:
    """The network as one compiled module."""
    return torch.compile(Net(), backend=backend)  # type: ignore[return-value]


def parts(backend: str) -> nn.Module:
    """Single layers compiled, by wrapping and in place."""
    net = Net()
    net.up = torch.compile(net.up, backend=backend)  # type: ignore[assignment]
    net.norm.compile(backend=backend)
    net.down.compile(backend=backend)
    return net


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}], ids=str)
@pytest.mark.parametrize("net", [whole, parts])
def test_equals_the_plain_run(net: Any, options: dict[str, Any]) -> None:
    """With the same compiler on both sides, eager backend, in float64."""
    torch.compiler.reset()
    make = partial(Module, net=partial(net, "aot_eager"))
    assert_equal_runs(make, 1e-12, precision="64-true", max_steps=4, **options)


@pytest.mark.parametrize("net", [whole, parts])
def test_layers_stay_fused(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each use of a linear layer hands over its factors: once per step for the head, twice for the reused layers."""
    torch.compiler.reset()
    taken: list[str] = []
    plain = Slot.take

    def take(self: Slot, dy: torch.Tensor, x: torch.Tensor) -> bool:
        taken.append(self.name)
        return plain(self, dy, x)

    monkeypatch.setattr(Slot, "take", take)
    fit(Module(net=partial(net, "aot_eager")), max_steps=3)
    assert len(taken) == 3 * 5
