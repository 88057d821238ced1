"""The update in plain torch: correct on every device and dtype, and what each kernel is tested against."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lightning_memopt.kernels.rounding import round_stochastic
from lightning_memopt.kernels.update import Update


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Precision of the update's arithmetic: float64 for float64 weights, else float32."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def kept_dtype(weight: Tensor, wide: bool) -> torch.dtype:
    """Precision in which a weight's moments and waiting gradients are kept: its own, or float32 for bf16 if `wide`."""
    return torch.float32 if wide and weight.dtype == torch.bfloat16 else weight.dtype


@torch.no_grad()
def apply_gradient(update: Update, grad: Tensor) -> bool:
    """Take one step on a gradient of the weight's shape.

    Returns:
        False, with nothing written, if the gradient holds a non-finite value.
    """
    weight, scalars, rule = update.weight, update.scalars, update.rule
    dtype = compute_dtype(weight)
    g = grad.to(dtype)
    if not (g.abs() < rule.limit).all():
        return False
    if update.coefficient is not None:
        g = g * update.coefficient
    if scalars["scale"] != 1.0:
        g = g * scalars["scale"]
    if scalars["clip"] != float("inf"):
        g = g.clamp(-scalars["clip"], scalars["clip"])
    w = weight.to(dtype)
    if scalars["l2"]:
        g = g.add(w, alpha=scalars["l2"])
    for storage in update.storage:
        g = storage.convert(update.state, g)
    if scalars["decay"] != 1.0:
        # torch multiplies the stored weight in place as well; for bf16, `w` is already a copy.
        w.mul_(scalars["decay"])
    moments = [storage.load(update.state, dtype) for storage in update.storage]
    g2 = g * g
    for storage in update.storage:
        g2 = storage.share(update.state, g2)
    entries = update.entries
    if entries is None:
        rule.update(w, g, g2, moments, scalars)
    else:
        entries.step(rule, w, g, g2, moments, scalars)
    index = update.offset if entries is None else entries.index
    stochastic = update.rounding == "stochastic"
    rounder = partial(round_stochastic, key=update.key, offset=index, low=True)
    for storage, moment in zip(update.storage, moments, strict=True):
        storage.save(update.state, moment, rounder if stochastic or storage.dithered else None)
    if w is not weight:
        if weight.dtype == torch.bfloat16 and stochastic:
            w = round_stochastic(w, update.key, index)
        weight.copy_(w)
    return True
