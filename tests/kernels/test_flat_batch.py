"""Many small updates in one launch: to the bit what each alone would be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import BF16, DEVICES, F32, INTERPRETED, RULES, check_margins, gradient, make_update, twin

from lightning_memopt.kernels import apply_gradients
from lightning_memopt.kernels.batches import Batches

flat = pytest.importorskip("lightning_memopt.kernels.flat", exc_type=ImportError)
flat_batch = pytest.importorskip("lightning_memopt.kernels.flat_batch", exc_type=ImportError)
pytestmark = [pytest.mark.parametrize("device", DEVICES)]
# One program's share, more than that, an odd number, one weight, a scalar, and a matrix too small for codes.
SHAPES = [(512,), (1100,), (129,), (1,), (), (33, 70)]


def same(batched, alone) -> None:
    assert torch.equal(batched.weight, alone.weight)
    for storage in batched.storage:
        assert torch.equal(batched.state[storage.name], alone.state[storage.name]), storage.name
    assert batched.nonfinite.item() == alone.nonfinite.item()
    check_margins(batched)


def step_alone(updates, grads) -> None:
    for update, grad in zip(updates, grads, strict=True):
        flat.apply_gradient(update, grad)


def twins(updates):
    return [replace(twin(update, None), nonfinite=update.nonfinite.clone()) for update in updates]


# A rule for each number of moments: the interpreter takes seconds for each, and the single kernel's tests know all.
MOMENTS = ["sgd", "lion", "adamw", "rmsprop-momentum-centered"]
FORMATS = [(BF16, BF16, "stochastic"), (F32, F32, "stochastic"), (BF16, F32, "stochastic"), (BF16, BF16, "nearest")]


@pytest.mark.parametrize(
    ("rule", "dtype", "moment_dtype", "rounding"),
    [(rule, *FORMATS[0]) for rule in (MOMENTS if INTERPRETED else RULES)] + [("adamw", *form) for form in FORMATS[1:]],
)
def test_every_rule_and_format(rule, dtype, moment_dtype, rounding, device) -> None:
    torch.manual_seed(0)
    # With pasts of their own, so that their scalars differ.
    updates = [
        make_update(rule, shape, device, dtype, moment_dtype, rounding, past=past) for past, shape in enumerate(SHAPES)
    ]
    alone = twins(updates)
    grads = [gradient(shape, device).to(dtype) for shape in SHAPES]
    grads[1][7], grads[5][3] = float("nan"), float("-inf")
    assert len({flat_batch.kind(update, grad) for update, grad in zip(updates, grads, strict=True)}) == 1
    batch = flat_batch.Batch(updates, grads)
    for _ in range(2):  # the first launch, and a repeated one
        batch.step(grads)
        step_alone(alone, grads)
        for update, expected in zip(updates, alone, strict=True):
            same(update, expected)
        # Strides are free.
        grads = [gradient(shape[::-1], device).to(dtype) for shape in SHAPES]
        grads[5] = grads[5].t()


def test_what_needs_a_launch_of_its_own(device) -> None:
    torch.manual_seed(1)
    zeros = torch.zeros(64, 64, device=device)
    assert flat_batch.kind(make_update("adamw8bit", (64, 64), device), zeros) is None, "codes"
    assert flat_batch.kind(make_update("gefen", (64, 64), device), zeros) is None, "shared moments"
    assert flat_batch.kind(make_update("adamw", (0, 4), device), torch.zeros(0, 4, device=device)) is None
    update = make_update("adamw", (64, 64), device)
    assert flat_batch.kind(update, zeros) is not None
    assert flat_batch.kind(update, zeros.bfloat16()) is None, "a gradient in another dtype"
    assert flat_batch.kind(replace(update, weight=update.weight.t()), zeros) is None, "strides"


def test_batches_by_kind(device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch for each kind, single launches for the rest; from the second time that the same updates come on."""
    from lightning_memopt.kernels import blocks, dispatch, gpu

    monkeypatch.setattr(gpu, "supports", blocks.supports)
    monkeypatch.setattr(dispatch, "in_triton", lambda update, kernel: blocks.supports(update))
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    made: list[int] = []
    plain = flat_batch.Batch

    class Noted(plain):
        def __init__(self, updates, grads) -> None:
            made.append(len(updates))
            super().__init__(updates, grads)

    monkeypatch.setattr(flat_batch, "Batch", Noted)
    torch.manual_seed(2)
    cases = [("adamw", F32), ("adamw", BF16), ("adamw", F32), ("lion", F32), ("adamw", BF16), ("adamw", F32)]
    updates = [make_update(rule, (40 + i,), device, dtype) for i, (rule, dtype) in enumerate(cases)]
    updates.append(make_update("adamw8bit", (64, 64), device))
    alone, batches = twins(updates), Batches()
    for step in range(4):
        grads = [gradient(tuple(update.weight.shape), device).to(update.weight.dtype) for update in updates]
        capturing[0] = step in (1, 3)
        assert all(apply_gradients(updates, grads, "auto", batches))
        step_alone(alone, grads)
        for update, expected in zip(updates, alone, strict=True):
            same(update, expected)
        assert made == ([3, 2] if step >= 2 else []), "not at first sight, and not in a capture"
