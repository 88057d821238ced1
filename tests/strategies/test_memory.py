"""Memory that gradients take during a step, measured by following every allocation of the backward pass."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from harness import Module, fit, vectors
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import lightning_memopt as memopt

WIDTH, LAYERS = 1024, 4
LAYER_BYTES = WIDTH * 2 * WIDTH * 4


class Meter(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate while it is active, as long as they live.

    With a few tokens, activations and their gradients are negligible: what remains are weight gradients and scratch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor):
                self.follow(tensor.untyped_storage(), inputs)
        return out

    def follow(self, storage: Any, inputs: set[int]) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self.known or address in inputs:
            return
        self.known.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.free, address, size)

    def free(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.live -= size


class Metered(Module):
    """Runs each backward pass under a meter of its own."""

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.Sequential(*(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) * (LAYERS // 2))
        )
        self.peaks: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with Meter() as meter:
            loss.backward(*args, **kwargs)
        self.peaks.append(meter.peak)


def peaks(strategy: Any, **options: Any) -> list[int]:
    """Peak gradient bytes of each backward pass."""
    module = Metered()
    fit(module, strategy, vectors(WIDTH, batch_size=2), max_steps=2, **options)
    return module.peaks


def test_the_meter_counts() -> None:
    """The meter sees a tensor come and go, counts views once, and in-place operations never."""
    with Meter() as meter:
        kept = torch.zeros(1000)
        kept.view(10, 100).t().add_(1)
        assert meter.live == 4000
        torch.zeros(500)
        assert (meter.live, meter.peak) == (4000, 6000)
        del kept
        assert meter.live == 0


def test_plain_backward_holds_every_gradient() -> None:
    """The yardstick: plain training holds the sum of all weight gradients at the end of backward."""
    assert min(peaks("auto")) >= 2 * LAYER_BYTES  # the two distinct layers, each used twice


@pytest.mark.parametrize("clip", [None, "value"])
def test_fused_backward_stays_below_one_layer(clip: str | None) -> None:
    """During a fused step, gradients and scratch together stay below the largest single layer's gradient."""
    options = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": clip} if clip else {}
    measured = peaks("forge", **options)
    assert len(measured) == 2
    assert 0 < max(measured) < LAYER_BYTES


class Wide(Metered):
    """Layers that are used once, and an embedding and a convolution beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(6)))
        self.embedding = nn.Embedding(2 * WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH // 2, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net(batch[0] + self.embedding(torch.tensor([1, 2])))
        return self.conv(x[:, :, None].expand(-1, -1, 3)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_released_gradients_are_freed_at_once() -> None:
    """Other layers' gradients are autograd's own, of which no more than two live at a time."""
    sizes: dict[str, int] = {}
    for strategy in ("auto", "forge"):
        module = Wide()
        fit(module, strategy, vectors(WIDTH, batch_size=2), max_steps=1)
        sizes[strategy] = module.peaks[0]
    total = sum(p.numel() * 4 for p in Wide().parameters())
    largest = 2 * WIDTH * WIDTH * 4
    assert sizes["auto"] >= total
    assert sizes["forge"] < 2.5 * largest < total


def test_moments_take_what_the_option_says() -> None:
    """State bytes: two moments per weight in the weight's precision, or in float32."""
    for state_dtype, width in (("param", 2), ("float32", 4)):
        run = fit(Module(), memopt.ForgeStrategy(state_dtype=state_dtype), precision="bf16-true", max_steps=1)  # type: ignore[arg-type]
        weights = sum(p.numel() for p in run.module.parameters())
        held = sum(
            value.numel() * value.element_size()
            for state in run.optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        )
        assert held == 2 * width * weights
