"""What kernel tests share: every rule with its options, updates with a past, and a float64 twin to compare with."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memopt.kernels import Update, reference
from lightning_memopt.optim import AdamW8bit, Gefen, Lion
from lightning_memopt.optim.gefen_columns import SCALE
from lightning_memopt.optim.gefen_learning import CODEBOOK
from lightning_memopt.rules import rule_for
from lightning_memopt.rules.storage import Dense
from lightning_memopt.rules.storage_8bit import Codes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

# Where kernels run: in the interpreter (see kernels/test_interpreted.py), or else on a GPU.
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, or TRITON_INTERPRET=1")
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]

RULES = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop-momentum": (torch.optim.RMSprop, {"momentum": 0.9}),
    "rmsprop-centered": (torch.optim.RMSprop, {"centered": True}),
    "rmsprop-momentum-centered": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "lion": (Lion, {"weight_decay": 0.1}),
    "adamw8bit": (AdamW8bit, {"weight_decay": 0.1}),
    "gefen": (Gefen, {"weight_decay": 0.1}),
    "gefen-64": (Gefen, {"weight_decay": 0.1, "block": 64}),
}
MARGIN = 64


def guarded(tensor: Tensor) -> Tensor:
    """A copy whose neighbours in memory are poisoned: NaN, or 0xA5 for codes."""
    poison = 0xA5 if tensor.dtype == torch.uint8 else float("nan")
    buffer = torch.full((tensor.numel() + 2 * MARGIN,), poison, dtype=tensor.dtype, device=tensor.device)
    return buffer[MARGIN:-MARGIN].view(tensor.shape).copy_(tensor)


def check_margins(update: Update) -> None:
    """Nothing was written beyond any tensor of the update."""
    kept = [update.state[entry] for storage in update.storage for entry in storage.entries()]
    for tensor in [update.weight, *(value for value in kept if value.dim())]:
        buffer = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        for margin in (buffer[:MARGIN], buffer[-MARGIN:]):
            assert (margin == 0xA5).all() if tensor.dtype == torch.uint8 else margin.isnan().all()


def make_update(
    name: str,
    shape: tuple[int, ...],
    device: str = "cpu",
    dtype: torch.dtype = F32,
    moment_dtype: torch.dtype | None = None,
    rounding: str = "stochastic",
    clip: float = float("inf"),
    past: int = 2,
) -> Update:
    """An update of the named rule, after `past` steps on random gradients."""
    cls, options = RULES[name]
    param = torch.nn.Parameter(torch.randn(shape).to(device, dtype))
    optimizer = cls([param], lr=0.01, **options)
    rule, group = rule_for(optimizer), optimizer.param_groups[0]
    storage = rule.storage(param, group, moment_dtype or dtype)
    state = optimizer.state[param] = rule.init_state(param, group, storage)
    if SCALE in state:
        state[SCALE] = torch.rand_like(state[SCALE]) * 3 + 0.2
    scale = -1.0 if group.get("maximize") else 1.0
    for step in range(past + 1):
        rule.prepare(optimizer)
        scalars = {"scale": scale, "clip": clip, **rule.common_scalars(group), **rule.scalars(group, state)}
        update = Update(
            name, param.detach(), state, rule, rule.tile(group), storage, scalars, 0x9ABCDEF0 + step, rounding,
            offset=5 << 32 | 78,
        )  # fmt: skip
        if step < past:
            reference.apply_gradient(update, gradient(shape, device))
            rule.advance(group, state)
    on_device = {
        "row": torch.tensor([*scalars.values(), *[float("nan")] * 4], dtype=F32, device=device),
        "row_key": torch.tensor(update.key - (1 << 32), dtype=torch.int32, device=device),
        "nonfinite": torch.zeros((), dtype=torch.int32, device=device),
    }
    kept = {entry for moment in storage for entry in moment.entries()} - {CODEBOOK}
    state = {key: guarded(value) if key in kept else value for key, value in state.items()}
    return replace(update, weight=guarded(param.detach()), state=state, **on_device)


def gradient(shape: tuple[int, ...], device: str) -> Tensor:
    """Random, with magnitudes over some decades."""
    return (torch.randn(shape) * torch.rand(shape) ** 3).to(device)


def twin(update: Update, dtype: torch.dtype | None = F64) -> Update:
    """A deep copy with weight and dense moments in `dtype` (None: as they are) for the reference to step on."""
    state: dict[str, Any] = copy.deepcopy(update.state)
    for storage in update.storage:
        if isinstance(storage, Dense):
            state[storage.name] = state[storage.name].to(dtype or state[storage.name].dtype)
    weight = update.weight.clone() if dtype is None else update.weight.to(dtype)
    return replace(update, weight=weight, state=state)


def check(update: Update, expected: Update) -> None:
    """A kernel's result against the reference's on a float64 twin."""
    assert not update.nonfinite.item()
    check_margins(update)
    _check_dense(update.weight, expected.weight, "weight")
    for storage in update.storage:
        actual, wanted = update.state[storage.name], expected.state[storage.name]
        if isinstance(storage, Codes):
            scale, wanted_scale = update.state[storage.scale_name], expected.state[storage.scale_name]
            torch.testing.assert_close(scale, wanted_scale, rtol=2**-7, atol=0)
            # Half-way cases of a sum in another order: neighbouring codes, rarely.
            signed = actual.view(torch.int8).int() - wanted.view(torch.int8).int()
            apart = torch.minimum(signed.abs(), (actual.int() - wanted.int()).abs())
            assert apart.max() <= 1 and apart.float().mean() < 0.01, storage.name
        else:
            _check_dense(actual, wanted, storage.name)


def _check_dense(actual: Tensor, wanted: Tensor, name: str) -> None:
    if actual.dtype == BF16:
        # Either neighbour is right where rounding is stochastic (or interpreted: it truncates).
        rtol, atol = 2**-7, 1e-6
    else:
        # Sums of terms that nearly cancel are as exact as their terms.
        rtol, atol = 2e-5, 2e-6 * max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)
    torch.testing.assert_close(actual.to(wanted.dtype), wanted, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")
