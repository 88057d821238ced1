"""The linear layer whose weight gradient need not exist: forward as usual, backward hands over its factors.

In backward, dX is formed from the weight as it is, and the factors (dY, x) of dW = dYᵀ x go to the parameter's
updater. Where the updater declines (another loss's backward, `torch.autograd.grad`, an unarmed pass, double backward),
dW is formed and returned, and the layer behaves as ``torch.nn.Linear``.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot

# Attribute of a Parameter that an updater may update inside backward. A copy of the module has no such attribute on its
# parameters, so its layers behave as plain ones.
SLOT = "_memopt_slot"


class FusedLinear(torch.autograd.Function):
    """y = x Wᵀ + b for x [..., in], W [out, in], b [out] or None, in the dtype autocast asks for."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, slot: Slot
    ) -> Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device) and x.is_floating_point()
        dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        ctx.slot, ctx.dtype, ctx.x_dtype = slot, dtype, x.dtype
        ctx.bias_dtype = bias.dtype if bias is not None else None
        if autocast:
            # Cast by hand: autocast would cache a copy of the weight made without a graph and hand it to later,
            # differentiable uses. The copy is made again in backward rather than kept.
            x = x.to(dtype)
        ctx.save_for_backward(x, weight)
        with torch.autocast(device, enabled=False):
            return F.linear(
                x,
                weight.to(dtype) if autocast else weight,
                bias.to(dtype) if autocast and bias is not None else bias,
            )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # type: ignore[override]  # noqa: D102
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = dw = db = None
        if needs_x:
            dx = dy.matmul(weight.to(ctx.dtype)).to(ctx.x_dtype)
        dy_rows = dy.reshape(-1, dy.shape[-1])
        if needs_bias:
            db = dy_rows.sum(0).to(ctx.bias_dtype)
        if needs_weight:
            x_rows = x.reshape(-1, x.shape[-1])
            if not ctx.slot.take(dy_rows, x_rows):
                dw = dy_rows.t().matmul(x_rows).to(weight.dtype)
        return dx, dw, db, None


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    slot: Slot | None = getattr(self.weight, SLOT, None)
    if slot is not None:
        slot.count_use()
        # torch.func transforms cannot see through a Function of this form; they get the plain layer.
        if torch.is_grad_enabled() and self.weight.requires_grad and not torch._C._are_functorch_transforms_active():
            return FusedLinear.apply(input, self.weight, self.bias, slot)
    return F.linear(input, self.weight, self.bias)


def install(root: nn.Module) -> list[nn.Module]:
    """Give every linear layer under `root` the fused forward; a subclass with a forward of its own keeps it.

    Returns:
        The changed modules, for `remove`.
    """
    changed: list[nn.Module] = []
    for module in root.modules():
        plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if plain and "forward" not in module.__dict__:
            module.forward = MethodType(_forward, module)
            changed.append(module)
    return changed


def remove(modules: list[nn.Module]) -> None:
    """Undo `install`."""
    for module in modules:
        module.__dict__.pop("forward", None)
