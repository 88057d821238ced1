"""The linear layer whose weight gradient need not exist: forward as usual, backward hands over its factors.

In backward, dX is formed from the weight as it is, and the factors (dY, x) of dW = dYᵀ x go to the parameter's
updater. Where the updater declines (another loss's backward, `torch.autograd.grad`, an unarmed pass, double backward),
dW is formed and returned, and the layer behaves as ``torch.nn.Linear``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memopt.backward.engine import applier, transformed

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot

# Attribute of a Parameter that an updater may update inside backward. A copy of the module has no such attribute on its
# parameters, so its layers behave as plain ones.
SLOT = "_memopt_slot"


class FusedLinear(torch.autograd.Function):
    """y = x Wᵀ + b for x [..., in] in compute dtype, W [out, in], b [out] or None; W and b are cast to x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, slot: Slot) -> Tensor:  # noqa: D102
        ctx.slot, ctx.bias_dtype = slot, bias.dtype if bias is not None else None
        ctx.weight_dtype = weight.dtype
        ctx.set_materialize_grads(False)
        # As torch: what backward does not need may be changed in place meanwhile.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        # Cast by hand: autocast would cache a copy of the weight made without a graph and hand it to later,
        # differentiable uses. The copy is made again in backward rather than kept.
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if not torch.is_autocast_enabled(x.device.type):  # entering a context takes as long as the launch
            y = F.linear(x, weight, bias)
        else:
            with torch.autocast(x.device.type, enabled=False):
                y = F.linear(x, weight, bias)
        # With a bias, torch folds leading dimensions into one and views the result, and what is a view here could not
        # be changed in place (by a ReLU, say).
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        if dy is None:  # no path of the graph reaches here; a gradient of zeros would decay the weight
            return None, None, None, None
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = dw = db = None
        if needs_x:
            dx = dy.matmul(weight if weight.dtype == x.dtype else weight.to(x.dtype))
        dy_rows = _rows(dy)
        if needs_bias:
            db = dy_rows.sum(0).to(ctx.bias_dtype)
        if needs_weight:
            x_rows = _rows(x)
            # Data, not an activation, may be refilled by its owner before the step, unseen by torch.
            if (not needs_x and ctx.slot.updater.queueing) or ctx.slot.updater.will_write(x_rows):
                x_rows = x_rows.clone()
            if not ctx.slot.take(dy_rows, x_rows):
                dw = dy_rows.t().matmul(x_rows).to(ctx.weight_dtype)
        return dx, dw, db, None


_apply = applier(FusedLinear)


def own_weight(layer: nn.Module) -> nn.Parameter | None:
    """The layer's weight; None if it is parametrized, when asking for it computes it and may draw random numbers."""
    return layer._parameters.get("weight")


def is_dense(x: Tensor) -> bool:
    """Whether what a layer is given can be one factor, a matrix: it is neither nested nor sparse."""
    return not x.is_nested and x.layout == torch.strided


def _rows(x: Tensor) -> Tensor:
    """All leading dimensions as one, also where a dimension is empty."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


# The name under which a bound method pickles: an unpickled layer finds its class's own forward.
def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """``nn.Linear.forward`` that hands over factors where an updater waits for them."""
    weight = self.weight  # once: a parametrized weight is computed at each access
    slot: Slot | None = getattr(weight, SLOT, None)
    if slot is None:
        return F.linear(input, weight, self.bias)
    slot.count_use(input)
    differentiated = torch.is_grad_enabled() and weight.requires_grad and not transformed()
    if not differentiated or not is_dense(input):
        return F.linear(input, weight, self.bias)
    device = input.device.type
    wide = torch.float64 in (input.dtype, weight.dtype)  # which autocast leaves alone
    if torch.is_autocast_enabled(device) and input.is_floating_point() and not wide:
        input = input.to(torch.get_autocast_dtype(device))
    elif input.dtype != weight.dtype:
        return F.linear(input, weight, self.bias)  # raises torch's error
    return _apply(input, weight, self.bias, slot)


def install(
    root: nn.Module, kind: type[nn.Module] = nn.Linear, fused: Callable[..., Tensor] = forward
) -> list[nn.Module]:
    """Give every layer of `kind` under `root` the forward `fused`; a layer with a forward of its own keeps it.

    Returns:
        The changed modules, for `remove`.
    """
    changed: list[nn.Module] = []
    # A compiled graph would form weight gradients of its own; fused layers run between compiled graphs instead.
    between = torch.compiler.disable(fused)
    for module in root.modules():
        if isinstance(module, kind) and getattr(module.forward, "__func__", None) is kind.forward:
            module.forward = MethodType(between, module)
            changed.append(module)
    return changed


def remove(modules: list[nn.Module]) -> None:
    """Undo `install`."""
    for module in modules:
        module.__dict__.pop("forward", None)
