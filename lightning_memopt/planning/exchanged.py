"""What one of several devices that share a model holds of the factors that they exchange, while a module is traced.

See `lightning_memopt.backward.shipping`: the layers of a block travel together, over the tokens of all ranks; those of
one block are used while those of the next arrive. What a rank leaves for the others lies in a window that stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_memopt.backward.exchange import BLOCK_ELEMENTS, sources
from lightning_memopt.backward.shipping import BLOCKS
from lightning_memopt.backward.traffic import Layer, Way, chosen_routes, shard_rows
from lightning_memopt.kernels import Factors
from lightning_memopt.kernels.reference import compute_dtype
from lightning_memopt.planning.live import LiveBytes


class Weight(Protocol):
    """A weight whose factors are exchanged."""

    param: nn.Parameter

    def arrive(self, pair: Factors | None) -> None:
        """This device's columns of dY, and x, over the tokens of all; None where it receives its rows of dW instead."""


class Exchanged:
    """Factors of the blocks under way.

    Args:
        parts: Parameters that are gathered, and whose factors are sent, together; those of the last travel alone.
        ranks: Devices that share the module.
        way: How gradients are summed, see `lightning_memopt.ForgeFSDPStrategy`.
        live: Counts what is received.

    Attributes:
        window: Bytes of the largest block that this rank has left for the others so far.
    """

    def __init__(self, parts: Sequence[Sequence[nn.Parameter]], ranks: int, way: Way, live: LiveBytes) -> None:
        self.ranks, self.way, self.live, self.window = ranks, way, live, 0
        self._blocks: Mapping[nn.Parameter, int] = {param: i for i, params in enumerate(parts[:-1]) for param in params}
        self._block: int | None = None
        self._collected: list[tuple[Weight, Tensor, Tensor]] = []
        # What was received of each block that is not used yet; and blocks of dW.
        self._flying: deque[list[Tensor]] = deque()
        self._reduced: Tensor | None = None

    def send(self, weight: Weight, dy: Tensor, x: Tensor) -> None:
        """Take over the factors of this device's tokens, until the block is through."""
        block = self._blocks.get(weight.param)
        if block is None or block != self._block:
            self.flush()
            while len(self._flying) > 1:  # used as the next block begins
                self._flying.popleft()
        self._block = block
        self._collected.append((weight, dy, x))

    def flush(self) -> None:
        """Hand out what the layers collected so far receive."""
        collected, self._collected = self._collected, []
        if not collected:
            return
        first = sources([x for *_, x in collected])
        layers = [_layer(*of, source) for of, source in zip(collected, first, strict=True)]
        routes = chosen_routes(self.way, layers, self.ranks, self.ranks)
        reduced = [weight for (weight, *_), way in zip(collected, routes, strict=True) if way == "reduce"]
        self._reduced = None
        if reduced:
            elements = min(max(weight.param.numel() for weight in reduced), BLOCK_ELEMENTS)
            self._reduced = self._hold(torch.empty(BLOCKS * elements, dtype=torch.float32, device="meta"))
        left, received = 0, dict[int, Tensor]()
        self._flying.append([])
        for (weight, dy, x), layer, way in zip(collected, layers, routes, strict=True):
            if way == "reduce":
                weight.arrive(None)
                continue
            rows, columns = layer.shape
            own = shard_rows(rows, self.ranks)
            left += layer.tokens * max(0, rows - own) * layer.itemsize
            if layer.source not in received:
                received[layer.source] = self._hold(x.new_empty(self.ranks * layer.tokens, columns))
                left += x.nbytes
            pair = self._hold(dy.new_empty(self.ranks * layer.tokens, own)), received[layer.source]
            self._flying[-1] += pair
            weight.arrive(pair)
        self.window = max(self.window, left)

    def _hold(self, tensor: Tensor) -> Tensor:
        self.live.relabel(tensor, "factors")
        return tensor


def _layer(weight: Weight, dy: Tensor, x: Tensor, source: int) -> Layer:
    rows, columns = weight.param.shape
    return Layer((rows, columns), len(dy), source, dy.element_size(), compute_dtype(weight.param).itemsize)
