"""Making tensors without data behave as a GPU's would, where memory depends on it.

On the ``meta`` device torch takes the plain formulas of attention and RMS norm, which keep intermediate results that a
GPU's kernels do not, and it knows no autocast. These stand in for all three while a module is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

# What autocast runs in the lower precision, and what in float32 (torch's lists for CUDA, as far as modules use them).
LOWER = (
    *((F, name) for name in ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")),
    *((F, name) for name in ("scaled_dot_product_attention",)),
    *((torch, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")),
    *((Tensor, name) for name in ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm")),
)
HIGHER = (
    *((F, name) for name in ("layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss")),
    *((F, name) for name in ("mse_loss", "l1_loss", "binary_cross_entropy_with_logits")),
    *((torch, name) for name in ("softmax", "log_softmax", "pow", "rsqrt", "exp", "log", "cumsum", "prod", "sum")),
    *((Tensor, name) for name in ("softmax", "log_softmax", "pow", "__pow__", "rsqrt", "exp", "log", "cumsum", "sum")),
)


class FlashAttention(torch.autograd.Function):
    """Keeps query, key, value, output and one number per query, as fused attention does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class RMSNorm(torch.autograd.Function):
    """Keeps input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if weight is not None else None


class Autocast:
    """Casts as ``torch.autocast`` to `lower` does, which does not know the meta device."""

    def __init__(self, lower: torch.dtype | None) -> None:
        self.lower = lower
        self.enabled = False
        self._copies: dict[Tensor, Tensor] = {}

    @contextmanager
    def context(self, *_: Any, enabled: bool = True, **__: Any) -> Iterator[None]:
        """What ``torch.autocast`` is while tracing; as there, copies of weights live until the outermost ends."""
        before, self.enabled = self.enabled, enabled and self.lower is not None
        try:
            yield
        finally:
            self.enabled = before
            if not before:
                self._copies.clear()

    def casting(self, function: Any, dtype: Any) -> Any:
        """The function on arguments cast to `dtype`, while enabled."""

        def cast_and_call(*args: Any, **kwargs: Any) -> Any:
            if self.enabled:
                args, kwargs = self._cast(args, dtype), self._cast(kwargs, dtype)
            return function(*args, **kwargs)

        return cast_and_call

    def _cast(self, value: Any, dtype: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._cast(item, dtype) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._cast(item, dtype) for item in value)
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return value
        if value.dtype == dtype:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        if value not in self._copies:  # autocast keeps its copies of weights until it ends
            self._copies[value] = value.to(dtype)
        return self._copies[value]


def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``scaled_dot_product_attention`` as a fused kernel holds it."""
    if query.dim() != 4:
        return _attention(query, key, value, *args, **kwargs)
    return FlashAttention.apply(query, key, value)


def rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``rms_norm`` as a fused kernel holds it."""
    return RMSNorm.apply(x, weight)


_attention = F.scaled_dot_product_attention


@contextmanager
def stand_ins(lower: torch.dtype | None) -> Iterator[None]:
    """Trace as on a GPU, where ``torch.autocast()`` casts to `lower` (None: not at all).

    Functions are replaced where modules look them up, and not by a mode of torch's, as modes end where a module runs
    again inside backward.
    """
    autocast = Autocast(lower)
    with ExitStack() as stack:

        def replace(owner: Any, name: str, stand_in: Any) -> None:
            stack.enter_context(patch.object(owner, name, stand_in))

        replace(F, "scaled_dot_product_attention", attention)
        replace(F, "rms_norm", rms_norm)
        replace(torch, "is_autocast_enabled", lambda *_: autocast.enabled)
        replace(torch, "get_autocast_dtype", lambda *_: lower or torch.bfloat16)
        replace(torch, "autocast", autocast.context)
        replace(torch.amp, "autocast", autocast.context)  # what activation checkpointing uses
        if lower is not None:
            for functions, dtype in ((LOWER, lower), (HIGHER, torch.float32)):
                for owner, name in functions:
                    replace(owner, name, autocast.casting(getattr(owner, name), dtype))
        yield
