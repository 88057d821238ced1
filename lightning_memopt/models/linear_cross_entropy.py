"""Output projection and cross-entropy in one: exact, and never with the logits of all tokens in float32.

    loss = mean over counted tokens of  logsumexp(W h_t + b) - (W h_t + b)[target_t]

The tokens go through in chunks. Forward keeps the log-sum-exp of each token; backward forms a chunk's logits again and
from them dY = (softmax - onehot) / count in the precision of the matmul, then dX = dY W. The weight's part is the
factor pair (dY, h): where a fused strategy updates inside backward it takes the pair, as from any linear layer
(`lightning_memopt.backward.linear`); otherwise dW = dYᵀ h is formed.

For T tokens, D features and V token ids, the logits would take T V elements, in the weight's precision and again in
float32 for the loss and for its gradient. Here dY takes T V once, in backward only and in the precision of the matmul;
past T = 2 D (for bf16) not even that, as dW is then summed over the chunks in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_memopt.backward.linear import SLOT
from lightning_memopt.kernels.reference import compute_dtype
from lightning_memopt.kernels.slabs import matmul

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot

# Logits of a chunk: 64 MiB in float32. With a small vocabulary all tokens are one chunk.
CHUNK_ELEMENTS = 1 << 24
# Rows of a matmul's tile on a GPU; a chunk of a whole number of them leaves no tile half empty.
TILE_ROWS = 128
IGNORE_INDEX = -100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T + bias``, as ``torch.nn.functional.cross_entropy`` of those logits.

    Args:
        hidden: [..., D].
        weight: [V, D]; under a fused strategy its update may run inside backward.
        targets: Token ids, int64 [...].
        bias: [V] or None.
        ignore_index: Targets that do not count; if none does, the loss is NaN.
        chunk_elements: Most logits formed at a time, at least one token's.

    Returns:
        A 0-dimensional tensor, float32 (float64 for float64 weights).
    """
    slot: Slot | None = getattr(weight, SLOT, None)
    if slot is not None:
        slot.count_use(hidden)
    rows = hidden.reshape(-1, hidden.shape[-1])
    return LinearCrossEntropy.apply(rows, weight, bias, targets.reshape(-1), ignore_index, chunk_elements, slot)


@cache
def _outside_graphs() -> Callable[..., Tensor]:
    """The loss where a network is compiled: between graphs, as a graph would form the weight's gradient itself."""
    return torch.compiler.disable(linear_cross_entropy)


@contextmanager
def loss_at_head(head: nn.Linear, targets: Tensor) -> Iterator[None]:
    """Inside, calling the module `head` returns the loss of its logits instead of the logits.

    So a network whose forward ends with ``return head(hidden)`` is run as a whole, with every hook that sharding,
    monitoring or the user put on its modules.
    """
    own, loss = head.__dict__.get("forward"), _outside_graphs()
    head.__dict__["forward"] = lambda hidden: loss(hidden, head.weight, targets, head.bias)
    try:
        yield
    finally:
        del head.__dict__["forward"]
        if own is not None:
            head.__dict__["forward"] = own


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`; rows [T, D], targets [T]."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        chunk_elements: int,
        slot: Slot | None,
    ) -> Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        ctx.x_dtype, ctx.dtype, ctx.slot = x.dtype, dtype, slot
        ctx.chunk = max(1, chunk_elements // len(weight))
        if ctx.chunk > TILE_ROWS:
            ctx.chunk -= ctx.chunk % TILE_ROWS
        with torch.autocast(device, enabled=False):
            x = x.to(dtype)
            operand, added = weight.to(dtype), bias.to(dtype) if bias is not None else None
            counted = targets != ignore_index
            count = counted.sum()
            norms, losses = [], []
            for part, ids, counts in _chunks(ctx.chunk, x, targets, counted):
                logits = _logits(part, operand, added)
                norms.append(logits.logsumexp(1))
                picked = logits.gather(1, ids.where(counts, 0)[:, None])[:, 0]
                losses.append((norms[-1] - picked).where(counts, 0))
            norm = torch.cat(norms) if norms else x.new_zeros(0)
            loss = torch.cat(losses).sum() if losses else x.new_zeros((), dtype=compute_dtype(x))
        ctx.save_for_backward(x, weight, bias, targets, counted, norm, count)
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, weight, bias, targets, counted, norm, count = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        operand, added = weight.to(ctx.dtype), bias.to(ctx.dtype) if bias is not None else None
        wide = compute_dtype(operand)
        scale = grad / count
        # Either dY of all tokens, or dW in float32: whichever is less.
        whole = needs_weight and len(x) * ctx.dtype.itemsize <= x.shape[1] * wide.itemsize
        all_dy = x.new_empty(len(x), len(weight)) if whole else None
        dw = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs_weight and not whole else None
        db = torch.zeros(len(weight), dtype=wide, device=weight.device) if needs_bias else None
        dx = torch.empty(x.shape, dtype=ctx.x_dtype, device=x.device) if needs_x else None
        start = 0
        for part, ids, counts, lse in _chunks(ctx.chunk, x, targets, counted, norm):
            stop = start + len(part)
            prob = _logits(part, operand, added).sub_(lse[:, None]).exp_()
            target = ids.where(counts, 0)[:, None]
            prob.scatter_add_(1, target, prob.new_full((), -1.0).expand_as(target))
            prob.mul_((counts * scale)[:, None])
            if db is not None:
                db += prob.sum(0)
            dy = all_dy[start:stop].copy_(prob) if all_dy is not None else prob.to(ctx.dtype)
            del prob
            if dx is not None:
                dx[start:stop] = dy @ operand
            if dw is not None:
                dw += matmul(dy.t(), part, wide)
            start = stop
        if all_dy is not None and not (ctx.slot is not None and ctx.slot.take(all_dy, x)):
            dw = all_dy.t() @ x
        return (
            dx,
            dw.to(weight.dtype) if dw is not None else None,
            db.to(bias.dtype) if db is not None else None,
            None,
            None,
            None,
            None,
        )


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A chunk's logits: rounded as the plain layer's, then in float32, as a loss in bf16 has two digits."""
    return torch.nn.functional.linear(x, weight, bias).to(compute_dtype(weight))


def _chunks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)
