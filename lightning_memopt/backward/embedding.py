"""The embedding layer whose weight gradient need not exist: forward as usual, backward hands over what it looked up.

dW of a table is dY's rows, summed where they looked up the same row of it. Where the parameter's updater declines, dW
is formed and returned, and the layer behaves as ``torch.nn.Embedding``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memopt.backward import linear
from lightning_memopt.backward.engine import applier, transformed
from lightning_memopt.backward.linear import SLOT, is_dense

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot


class FusedEmbedding(torch.autograd.Function):
    """y = W[indices] for W [rows, dim] and integers of any shape; ``padding_idx`` is -1 where there is none."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, padding_idx: int, slot: Slot) -> Tensor:  # noqa: D102
        ctx.slot, ctx.rows, ctx.padding_idx = slot, len(weight), padding_idx
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        if dy is None:  # as in `linear.FusedLinear`
            return None, None, None, None
        (indices,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0] or ctx.slot.take_lookup(dy, indices, ctx.padding_idx):
            return None, None, None, None
        dw = torch.ops.aten.embedding_dense_backward(dy, indices, ctx.rows, ctx.padding_idx, False)
        return dw, None, None, None


_apply = applier(FusedEmbedding)


def fusable(module: nn.Embedding) -> bool:
    """Whether the layer's gradient is the plain sum, and its forward pass leaves the weight alone."""
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _plain(self: nn.Embedding, input: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(
        input, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
    )


# The name under which a bound method pickles: an unpickled layer finds its class's own forward.
def forward(self: nn.Embedding, input: Tensor) -> Tensor:
    """``nn.Embedding.forward`` that hands over its look-ups where an updater waits for them."""
    weight = self.weight  # once: a parametrized weight is computed at each access
    slot: Slot | None = getattr(weight, SLOT, None)
    if slot is None:
        return _plain(self, input, weight)
    slot.count_use(input)
    differentiated = torch.is_grad_enabled() and weight.requires_grad and not transformed()
    if not differentiated or not fusable(self) or not is_dense(input):
        return _plain(self, input, weight)
    # From the end, if it was assigned so, as in torch.
    padding = -1 if self.padding_idx is None else self.padding_idx % len(weight)
    return _apply(weight, input, padding, slot)


def install(root: nn.Module) -> list[nn.Module]:
    """As `lightning_memopt.backward.linear.install`, for every embedding layer under `root`."""
    return linear.install(root, nn.Embedding, forward)
