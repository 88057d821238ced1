"""The line at the start of a run that says which weights have stored gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from harness import Module, Net, fit, next_token_loss, square_loss, tokens, vectors
from torch import Tensor, nn


class Convolves(nn.Module):
    """Most weights are a convolution's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(8, 16, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x[..., None])[..., 0])


class OnlyLinear(nn.Sequential):
    """No other weights, not even biases."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


@pytest.mark.parametrize(
    ("net", "loss", "data", "share", "rest"),
    [
        (OnlyLinear, square_loss, vectors, "Of 128 weights, 100.0% ", "gradient."),
        (Convolves, square_loss, vectors, "Of 212 weights, 30.2% ",
         "The largest: net.conv.weight [16, 8, 1] of Conv1d, not the weight of an nn.Linear or nn.Embedding."),
        (Net, next_token_loss, tokens, "Of 411 weights, 66.2% ",
         "The largest: net.embedding.weight [11, 8], shared by a linear and an embedding layer."),
        (partial(Net, tied=False), next_token_loss, tokens, "Of 499 weights, 89.8% ",
         "The largest: net.up.bias [17] of Linear, not the weight of an nn.Linear or nn.Embedding."),
    ],
    ids=["linear", "convolution", "tied", "untied"],
)  # fmt: skip
def test_share_and_largest(
    net: Any, loss: Any, data: Callable[[], Any], share: str, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much needs no stored gradient, and the largest that does, with the reason."""
    said: list[str] = []
    monkeypatch.setattr("lightning_memopt.strategies.forge.rank_zero_info", said.append)
    fit(Module(net, loss=loss), "forge", data(), max_steps=1)
    (line,) = said
    assert line.startswith(share) and line.endswith(rest), line
