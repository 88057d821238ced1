"""What one of several devices that share a model holds of the factors that they exchange, while a module is traced.

See `lightning_memopt.backward.shipping`: the layers of a block travel together, over the tokens of all ranks; those of
one block are used while those of the next arrive. What a rank leaves for the others lies in a window that stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_memopt.backward.exchange import BLOCK_ELEMENTS
from lightning_memopt.backward.shipping import BLOCKS
from lightning_memopt.backward.traffic import exchange_bytes, reduce_bytes, shard_rows
from lightning_memopt.kernels import Factors
from lightning_memopt.planning.live import LiveBytes


def blocks(module: nn.Module) -> list[nn.Module]:
    """What is gathered and sent as one: the elements of lists of modules."""
    return [child for part in module.modules() if isinstance(part, nn.ModuleList) for child in part]


class Exchanged:
    """Factors of the blocks under way.

    Args:
        module: Traced.
        ranks: Devices that share it.
        live: Counts what is received.

    Attributes:
        window: Bytes of the largest block that this rank has left for the others so far.
    """

    def __init__(self, module: nn.Module, ranks: int, live: LiveBytes) -> None:
        self.ranks, self.live, self.window = ranks, live, 0
        self._blocks: Mapping[nn.Parameter, int] = {
            param: i for i, block in enumerate(blocks(module), 1) for param in block.parameters()
        }
        self._block: int | None = None
        self._left = 0
        self._inputs: dict[Tensor, Tensor] = {}
        # What was received of the block that is used, and of the one that arrives.
        self._flying: deque[list[Tensor]] = deque(maxlen=2)

    def receive(self, param: nn.Parameter, dy: Tensor, x: Tensor) -> Factors | None:
        """This device's columns of dY, and x, over the tokens of all; None where it receives its rows of dW instead."""
        block = self._blocks.get(param, 0)
        if block != self._block or not block:  # what is in no block travels alone
            self._block, self._left, self._inputs = block, 0, {}
            self._flying.append([])
        (rows, columns), tokens = param.shape, dy.numel() // max(1, dy.shape[-1])
        moved = exchange_bytes((rows, columns), tokens, self.ranks, self.ranks, x.element_size(), x not in self._inputs)
        if moved > reduce_bytes((rows, columns), self.ranks, self.ranks):
            size = BLOCKS * min(param.numel(), BLOCK_ELEMENTS)
            self._flying[-1] = [self._hold(torch.empty(size, dtype=torch.float32, device="meta"))]
            return None
        own = shard_rows(rows, self.ranks)
        received = self._hold(dy.new_empty(self.ranks * tokens, own))
        self._left += tokens * max(0, rows - own) * dy.element_size()
        if x not in self._inputs:
            self._inputs[x] = self._hold(x.new_empty(self.ranks * tokens, columns))
            self._left += x.numel() * x.element_size()
        self.window = max(self.window, self._left)
        self._flying[-1] += [received, self._inputs[x]]
        return received, self._inputs[x]

    def _hold(self, tensor: Tensor) -> Tensor:
        self.live.relabel(tensor, "factors")
        return tensor
