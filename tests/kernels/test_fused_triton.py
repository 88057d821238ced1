"""The portable fused kernel against the reference: every rule, format, shape and stride."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, DEVICES, F32, INTERPRETED, RULES, check, make_update, twin

from lightning_memopt.kernels import reference

fused_triton = pytest.importorskip("lightning_memopt.kernels.fused_triton", exc_type=ImportError)
pytestmark = [pytest.mark.parametrize("device", DEVICES)]


def make_factors(tokens, rows, columns, device, dtype=torch.float16):
    dy = torch.randn(tokens, rows, device=device) / 4
    return dy.to(dtype), torch.randn(tokens, columns, device=device).to(dtype)


def step_both(update, factors, grad=None) -> None:
    expected = twin(update)
    dw = sum(dy.double().t() @ x.double() for dy, x in factors)
    assert reference.apply_gradient(expected, dw if grad is None else dw + grad)
    fused_triton.apply_factors(update, factors, grad)
    check(update, expected)


FORMATS = [(F32, F32), (BF16, BF16), (BF16, F32)]


# In the interpreter, which takes half a second for each, one rule in all formats.
@pytest.mark.parametrize(
    ("rule", "dtype", "moment_dtype"),
    [(rule, *form) for rule in RULES for form in FORMATS if not INTERPRETED or rule == "adamw" or form == FORMATS[1]],
)
def test_every_rule_and_format(rule, dtype, moment_dtype, device) -> None:
    torch.manual_seed(0)
    update = make_update(rule, (33, 130), device, dtype, moment_dtype)
    step_both(update, [make_factors(19, 33, 130, device)])


@pytest.mark.parametrize("rule", ["adamw", "adamw8bit", "gefen", "gefen-64"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 128), (130, 70), (40, 200), (257, 16)])
@pytest.mark.parametrize("tokens", [0, 65] if INTERPRETED else [0, 1, 65])
def test_shapes(rule, rows, columns, tokens, device) -> None:
    torch.manual_seed(1)
    update = make_update(rule, (rows, columns), device)
    step_both(update, [make_factors(tokens, rows, columns, device)])


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
def test_operand_types(dtype, device) -> None:
    torch.manual_seed(2)
    step_both(make_update("adamw8bit", (40, 200), device), [make_factors(33, 40, 200, device, dtype)])


def test_mixed_operand_types(device) -> None:
    torch.manual_seed(3)
    dy, x = make_factors(33, 40, 200, device)
    step_both(make_update("adamw", (40, 200), device), [(dy.float(), x)])


def test_strides(device) -> None:
    torch.manual_seed(4)
    dy, x = make_factors(17, 80, 50, device)
    step_both(make_update("adamw", (40, 50), device), [(dy[:, ::2], x.t().contiguous().t())])
    expanded = dy[:1, :1].expand(17, 40)  # the gradient of a sum
    step_both(make_update("adamw", (40, 50), device), [(expanded, x)])


def test_several_factors_and_a_stored_part(device) -> None:
    torch.manual_seed(5)
    factors = [make_factors(9, 40, 50, device), make_factors(4, 40, 50, device)]
    step_both(make_update("adamw", (40, 50), device), factors)
    step_both(make_update("adamw", (40, 50), device), factors, torch.randn(50, 40, device=device).t())


def test_non_finite_elements_are_left_out(device) -> None:
    torch.manual_seed(6)
    update = make_update("adamw", (40, 50), device)
    before = twin(update, None)
    dy, x = make_factors(9, 40, 50, device)
    dy[3, 7] = float("nan")
    fused_triton.apply_factors(update, [(dy, x)], None)
    assert update.nonfinite.item() == 1
    assert torch.equal(update.weight[7], before.weight[7])
    assert torch.isfinite(update.weight).all() and (update.weight[8] != before.weight[8]).all()


def test_two_runs_agree_bitwise(device) -> None:
    torch.manual_seed(7)
    first = make_update("adamw8bit", (40, 200), device, BF16)
    second, factors = twin(first, None), [make_factors(33, 40, 200, device)]
    fused_triton.apply_factors(first, factors, None)
    fused_triton.apply_factors(second, factors, None)
    assert torch.equal(first.weight, second.weight)
    assert all(torch.equal(first.state[key], second.state[key]) for key in first.state)


@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
def test_more_than_two_to_the_31_elements(device) -> None:
    rows, columns = 2**19 + 3, 4096
    update = make_update("sgd", (1, 1), device, BF16, rounding="nearest")
    update.weight = torch.zeros(rows, columns, dtype=BF16, device=device)
    ones = torch.ones(1, rows, dtype=BF16, device=device), torch.ones(1, columns, dtype=BF16, device=device)
    fused_triton.apply_factors(update, [ones], None)
    assert (update.weight == torch.tensor(-0.01, dtype=BF16, device=device)).all()
