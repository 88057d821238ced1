"""What ways of training hold besides weights and activations: optimizer state, and scratch of the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from lightning_memopt.errors import MemOptError
from lightning_memopt.kernels.reference import kept_dtype
from lightning_memopt.optim import AdamW8bit, Gefen, Lion
from lightning_memopt.planning.live import ROUNDING, LiveBytes
from lightning_memopt.planning.trace import Route
from lightning_memopt.rules import rule_for
from lightning_memopt.sparsity.density import sparse_layers
from lightning_memopt.sparsity.state import compact_like, initial, metadata_bytes

# Parameters of an optimizer as groups, as `torch.optim` takes them.
Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], Optimizer]

DENSITY = 0.25


@dataclass(frozen=True)
class Holds:
    """Bytes of an optimizer.

    Attributes:
        state: What it keeps from step to step.
        scratch: The most its step holds beside that.
    """

    state: int
    scratch: int = 0


@dataclass(frozen=True)
class PlannedMethod:
    """A way of training.

    Attributes:
        label: In words.
        route: What becomes of gradients, see `lightning_memopt.planning.trace`.
        holds: Bytes for the module's parameter groups.
        wide: Gradients of bf16 weights wait in float32 (``state_dtype="float32"``).
    """

    label: str
    route: Route
    holds: Callable[[nn.Module, Groups], Holds]
    wide: bool = False

    def clipped(self) -> PlannedMethod:
        """The same where gradients are clipped by norm."""
        return replace(self, route="deferred") if self.route == "fused" else self


def size(value: Any) -> int:
    """Bytes of all tensors on the device in a nested value."""
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.device.type != "cpu")
    return sum(-(-leaf.numel() * leaf.element_size() // ROUNDING) * ROUNDING for leaf in leaves)


def stepped(make: MakeOptimizer, module: nn.Module, groups: Groups) -> Holds:
    """By taking a step of any optimizer that runs on the meta device."""
    optimizer = make([dict(group) for group in groups])  # an optimizer writes its defaults into its groups
    params = [param for group in optimizer.param_groups for param in group["params"]]
    try:
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
        state = size(dict(optimizer.state))
        held = [*params, *(param.grad for param in params), *_tensors(optimizer.state.values())]
        with LiveBytes(held, None) as live:
            optimizer.step()
            live.sample()
        return Holds(state, max(sum(sample) for sample in live.samples))
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise MemOptError(
            f"{type(optimizer).__name__} cannot be planned: its step does not run without data."
        ) from error
    finally:
        for param in params:
            param.grad = None


def fused_adamw(module: nn.Module, groups: Groups) -> Holds:
    """Torch's one-kernel AdamW: the state of any AdamW, and no scratch."""
    return Holds(stepped(partial(AdamW, foreach=False), module, groups).state)


def nothing(module: nn.Module, groups: Groups) -> Holds:
    """No optimizer."""
    return Holds(0)


def bnb_adamw8bit(module: nn.Module, groups: Groups) -> Holds:
    """Bitsandbytes AdamW8bit: two codes and two float32 scales per 256; tensors below 4096 keep float32 moments."""
    total = 0
    for group in groups:
        for param in group["params"]:
            n = param.numel()
            total += 8 * n if n < 4096 else 2 * (n + 4 * ceil(n / 256))
    return Holds(total)


def forged(
    make: MakeOptimizer, module: nn.Module, groups: Groups, density: float | None = None, wide: bool = False
) -> Holds:
    """One of our rules, from the state it creates.

    Args:
        make: Makes its optimizer.
        module: The module.
        groups: Its parameter groups.
        density: Of a sparse run, which has state for active weights only.
        wide: Moments of bf16 weights are in float32.
    """
    optimizer = make([dict(group) for group in groups])  # an optimizer writes its defaults into its groups
    rule = rule_for(optimizer)
    sparse = {id(layer.weight) for layer in sparse_layers(module).values()} if density is not None else set()
    total = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            dtype = kept_dtype(param, wide)
            if id(param) in sparse and density is not None:
                active, shape = round(density * param.numel()), (param.shape[0], param.shape[1])
                storage = rule.storage(compact_like(param, active), group, dtype)
                total += size(initial(rule, group, storage, shape, active, density, param))
                total += sum(metadata_bytes(param.numel(), active).values())
            else:
                total += size(rule.init_state(param, group, rule.storage(param, group, dtype)))
    return Holds(total)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)]


_RULES: dict[str, tuple[str, MakeOptimizer]] = {
    "adamw": ("AdamW", AdamW),
    "adamw8bit": ("AdamW8bit", AdamW8bit),
    "gefen": ("Gefen", Gefen),
    "lion": ("Lion", Lion),
    "sgd": ("SGD", partial(SGD, lr=1e-3)),
}

METHODS: dict[str, PlannedMethod] = {
    "adamw": PlannedMethod("torch AdamW, fused", "stored", fused_adamw),
    "adamw_clip": PlannedMethod("torch AdamW, fused, clipped", "stored", fused_adamw),
    "adamw_foreach": PlannedMethod("torch AdamW, foreach", "stored", partial(stepped, partial(AdamW, foreach=True))),
    "adamw_hooks": PlannedMethod("torch AdamW, fused, in backward hooks", "released", fused_adamw),
    "bnb_adamw8bit": PlannedMethod("bitsandbytes AdamW8bit", "stored", bnb_adamw8bit),
    "bnb_adamw8bit_hooks": PlannedMethod("bitsandbytes AdamW8bit, in backward hooks", "released", bnb_adamw8bit),
    "adamw8bit": PlannedMethod("AdamW8bit, without forge", "stored", partial(forged, AdamW8bit)),
    "gefen": PlannedMethod("Gefen, without forge", "stored", partial(forged, Gefen)),
    "forward_backward": PlannedMethod("forward and backward only", "stored", nothing),
}
for _name, (_label, _make) in _RULES.items():
    METHODS[f"forge_{_name}"] = PlannedMethod(f"forge, {_label}", "fused", partial(forged, _make))
    METHODS[f"forge_{_name}_clip"] = PlannedMethod(f"forge, {_label}, clipped", "deferred", partial(forged, _make))
for _name, (_label, _make) in _RULES.items():
    METHODS[f"forge_{_name}_smet"] = PlannedMethod(
        f"forge, {_label}, SMET", "fused", partial(forged, _make, density=DENSITY)
    )
