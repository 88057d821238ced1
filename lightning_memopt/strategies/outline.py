"""What a run says at its start of how its weights are updated, so that nobody must guess what clipping would hold."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_memopt.backward import embedding
from lightning_memopt.backward.linear import own_weight

# From this part of all weights on, the largest of those with stored gradients is named.
WORTH_NAMING = 0.01


def outline(root: nn.Module, trained: Iterable[nn.Parameter], fused: Iterable[nn.Module]) -> str:
    """One sentence on weights updated from factors and, if they are not few, one on those with stored gradients.

    Args:
        root: Module that names start from.
        trained: The parameters of all optimizers.
        fused: The layers whose forward pass hands over factors.
    """
    sizes = {param: param.numel() for param in trained}
    total = sum(sizes.values())
    layers = list(fused)
    linear = {own_weight(m) for m in layers if isinstance(m, nn.Linear)}
    tables = {own_weight(m) for m in layers if isinstance(m, nn.Embedding) and embedding.fusable(m)}
    stored = {param: size for param, size in sizes.items() if (param in linear) == (param in tables)}
    part = sum(stored.values()) / max(total, 1)
    said = f"Of {total:,} weights, {1 - part:.1%} are updated inside the backward pass without a stored gradient."
    if part < WORTH_NAMING:
        return said
    largest = max(stored, key=lambda param: stored[param])
    return (
        f"{said} The gradients of the others are stored and freed one by one, and all held until the step by norm "
        f"clipping or accumulation. The largest: {_described(root, largest, largest in linear)}."
    )


def _described(root: nn.Module, param: nn.Parameter, shared: bool) -> str:
    owners = (
        (f"{prefix}.{name}".lstrip("."), type(module).__name__)
        for prefix, module in root.named_modules()
        for name, own in module.named_parameters(recurse=False)
        if own is param
    )
    name, owner = next(owners, ("a parameter outside the module", "no module"))
    if shared:
        return f"{name} {list(param.shape)}, shared by a linear and an embedding layer"
    return f"{name} {list(param.shape)} of {owner}, not the weight of an nn.Linear or nn.Embedding"
