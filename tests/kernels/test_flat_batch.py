"""Many small updates in one launch: to the bit what each alone would be."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, DEVICES, F32, RULES, check_margins, gradient, make_update, twin

flat = pytest.importorskip("lightning_memopt.kernels.flat", exc_type=ImportError)
flat_batch = pytest.importorskip("lightning_memopt.kernels.flat_batch", exc_type=ImportError)
pytestmark = [pytest.mark.parametrize("device", DEVICES)]
# Below what coded moments begin at; a vector longer than a program; an odd one; one weight; a small matrix.
SHAPES = [(768,), (5000,), (129,), (1,), (), (33, 70), (2048,)]


def same(batched, alone) -> None:
    assert torch.equal(batched.weight, alone.weight)
    for storage in batched.storage:
        assert torch.equal(batched.state[storage.name], alone.state[storage.name]), storage.name
    assert batched.nonfinite.item() == alone.nonfinite.item()
    check_margins(batched)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "moment_dtype"), [(F32, F32), (BF16, BF16), (BF16, F32)])
def test_every_rule_and_format(rule, dtype, moment_dtype, device) -> None:
    torch.manual_seed(0)
    shapes = SHAPES if rule not in ("adamw8bit", "gefen", "gefen-64") else [s for s in SHAPES if len(s) < 2]
    # With pasts of their own, so that their scalars differ.
    updates = [make_update(rule, shape, device, dtype, moment_dtype, past=past) for past, shape in enumerate(shapes)]
    alone = [twin(update, None) for update in updates]
    for update in alone:
        update.nonfinite = update.nonfinite.clone()
    grads = [gradient(shape, device).to(dtype) for shape in shapes]
    grads[1][7] = float("nan")
    assert len({flat_batch.kind(update, grad) for update, grad in zip(updates, grads, strict=True)}) == 1
    batch = flat_batch.Batch(updates, grads)
    for _ in range(2):  # the first launch, and a repeated one
        batch.step(grads)
        for update, grad in zip(alone, grads, strict=True):
            flat.apply_gradient(update, grad)
        for update, expected in zip(updates, alone, strict=True):
            same(update, expected)
        grads = [
            gradient(shape[::-1], device).to(dtype).t() if len(shape) == 2 else grad.flip(0) if shape else -grad
            for shape, grad in zip(shapes, grads, strict=True)
        ]
