"""Layers of Hugging Face models by formulas that hold less, with the models' own numbers.

Their RMS norm keeps its input once more in float32 and its normalised input, where torch's fused kernel keeps one
number per row. Their gated feed-forward keeps silu(gate) and silu(gate) * up beside gate and up. And to choose a causal
mask they look at the positions, which makes the host wait for the GPU in every forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_memopt.backward import linear

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot

# weight * x / rms(x) and down(silu(gate(x)) * up(x)), under these names.
FAMILIES = ("Llama", "Mistral", "Olmo2", "Phi3", "Qwen2", "Qwen3", "SmolLM3")
NORMS = frozenset(f"{family}RMSNorm" for family in FAMILIES)
GATED = frozenset(f"{family}MLP" for family in FAMILIES if family != "Phi3")
CAUSAL = "memopt_causal"


class GatedLinear(torch.autograd.Function):
    """y = (silu(gate) * up) Wᵀ, keeping gate and up only; backward forms their product again.

    The factors (dY, silu(gate) * up) of dW go where those of every linear layer go, see
    `lightning_memopt.backward.linear`.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, slot: Slot | None) -> Tensor:  # noqa: D102
        ctx.slot = slot
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate) * up, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        gate, up, weight = ctx.saved_tensors
        act = F.silu(gate)
        dw = None
        if ctx.needs_input_grad[2]:
            dy_rows, rows = dy.flatten(0, -2), (act * up).flatten(0, -2)
            if ctx.slot is None or not ctx.slot.take(dy_rows, rows):
                dw = dy_rows.t() @ rows
            del rows
        product = dy @ weight
        return torch.ops.aten.silu_backward(product * up, gate), product.mul_(act), dw, None


# The names under which bound methods pickle.
def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """An RMS norm's forward by torch's fused kernel, where weight and input have one dtype."""
    if hidden_states.dtype != self.weight.dtype:
        return type(self).forward(self, hidden_states)
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def gated_forward(self: Any, x: Tensor) -> Tensor:
    """A gated feed-forward layer's forward that keeps gate and up only, where the last layer is a plain linear one."""
    gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
    # A compiled graph would form weight gradients of its own; the layer itself runs between graphs.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or x.dim() < 2 or not _is_bare(down):
        return down(F.silu(gate) * up)
    weight = down.weight
    if not gate.dtype == up.dtype == weight.dtype:  # under autocast
        return down(F.silu(gate) * up)
    slot: Slot | None = getattr(weight, linear.SLOT, None)
    if slot is not None:
        slot.count_use(gate)
    return GatedLinear.apply(gate, up, weight, slot)


def _is_bare(layer: nn.Module) -> bool:
    """Whether a layer is a linear one without bias, and calling it does nothing else."""
    function = getattr(layer.forward, "__func__", None)
    linear_one = function is not None and inspect.unwrap(function) in (nn.Linear.forward, linear.forward)
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return linear_one and layer.bias is None and not any(hooks)


def install(net: nn.Module) -> None:
    """Replace what is replaceable in a Hugging Face model; other layers are left alone."""
    for module in net.modules():
        name = type(module).__name__
        if not type(module).__module__.startswith("transformers.models."):
            continue
        if name in NORMS:
            module.forward = MethodType(norm_forward, module)
        elif name in GATED and getattr(module.config, "hidden_act", None) in ("silu", "swish"):
            module.forward = MethodType(gated_forward, module)


def remove(net: nn.Module) -> None:
    """Undo `install`."""
    for module in net.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) in (norm_forward, gated_forward):
            del module.__dict__["forward"]


@contextmanager
def causal_without_looking(net: Any, length: int) -> Iterator[None]:
    """Inside, a model runs on whole sequences of `length` tokens, one per row, with torch's own causal attention.

    An attention implementation that has no mask function is given no mask, so no position is looked at. Models with
    sliding windows shorter than the sequence, and implementations other than "sdpa", are left alone.
    """
    config = net.config
    window = getattr(config, "sliding_window", None)
    if config._attn_implementation != "sdpa" or (window is not None and window < length):
        yield
        return
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    config._attn_implementation = CAUSAL
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
