"""Which layers are sparse, and how dense each is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from lightning_memopt.backward.linear import own_weight
from lightning_memopt.errors import UnsupportedError

Distribution = Literal["uniform", "erk"]


def matches(pattern: str, name: str) -> bool:
    """Whether a module name fits: a shell pattern for the whole name, or, without wildcards, a part of it."""
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(name, pattern)
    return pattern in name


def sparse_layers(
    root: nn.Module, include: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> dict[str, nn.Linear]:
    """Linear layers to make sparse, by the name of their module.

    Args:
        root: The model.
        include: Patterns of module names; None for every ``nn.Linear`` but the output head. The head is what a Hugging
            Face model says it is, otherwise the last linear layer in the order of definition.
        exclude: Patterns of module names to leave dense.
    """
    trained = {name: m for name, m in root.named_modules() if isinstance(m, nn.Linear) and _is_trained(m)}
    linear = {name: m for name, m in trained.items() if own_weight(m) is not None}
    if include is None:
        heads = _heads(root) or list(trained.values())[-1:]
        shared = _shared(root)
        chosen = {
            name: m for name, m in linear.items() if not any(m is h for h in heads) and id(m.weight) not in shared
        }
    else:
        chosen = {name: m for name, m in linear.items() if any(matches(p, name) for p in include)}
    return {name: m for name, m in chosen.items() if not any(matches(p, name) for p in exclude)}


def _is_trained(layer: nn.Linear) -> bool:
    weight = own_weight(layer)
    return weight.requires_grad if weight is not None else any(p.requires_grad for p in layer.parameters())


def _heads(root: nn.Module) -> list[nn.Module]:
    """Output heads that Hugging Face models name."""
    heads = []
    for module in root.modules():
        name_head: Callable[[], nn.Module | None] = getattr(module, "get_output_embeddings", lambda: None)
        head = name_head()
        if head is not None:
            heads.append(head)
    return heads


def _shared(root: nn.Module) -> set[int]:
    """Ids of embedding matrices, which a tied head shares."""
    return {id(own_weight(m)) for m in root.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def densities(
    shapes: Mapping[str, tuple[int, int]], density: float | Mapping[str, float], distribution: Distribution
) -> dict[str, float]:
    """Density of each layer, by name; layers that no pattern fits are left out.

    Args:
        shapes: [out, in] of the layers.
        density: Of all layers together, or by pattern; the first pattern that fits a name counts.
        distribution: How layers of one pattern share its density: equally, or by `erk`.

    Raises:
        UnsupportedError: A density outside (0, 1].
    """
    patterns = {"*": density} if isinstance(density, int | float) else dict(density)
    for pattern, value in patterns.items():
        if not 0 < value <= 1:
            raise UnsupportedError(f"SMET: density {value} of {pattern!r} is outside (0, 1].")
    result: dict[str, float] = {}
    for pattern, value in patterns.items():
        mine = {n: shape for n, shape in shapes.items() if n not in result and matches(pattern, n)}
        result |= erk(mine, value) if distribution == "erk" else dict.fromkeys(mine, float(value))
    return {name: result[name] for name in shapes if name in result}


def erk(shapes: Mapping[str, tuple[int, int]], density: float) -> dict[str, float]:
    """Densities in proportion to (out + in) / (out in), at most 1, whose mean over weights is `density`.

    The Erdős-Rényi distribution of Mocanu et al. (2018) as used for linear layers by Evci et al. (2020).
    """
    sizes = {name: out * inputs for name, (out, inputs) in shapes.items()}
    raw = {name: (out + inputs) / (out * inputs) for name, (out, inputs) in shapes.items()}
    full: set[str] = set()
    while len(full) < len(shapes):
        room = density * sum(sizes.values()) - sum(sizes[name] for name in full)
        scale = room / sum(raw[name] * sizes[name] for name in shapes if name not in full)
        over = {name for name in shapes if name not in full and scale * raw[name] > 1}
        if not over:
            return {name: 1.0 if name in full else scale * raw[name] for name in shapes}
        full |= over
    return dict.fromkeys(shapes, 1.0)
