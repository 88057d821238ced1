"""The flat update kernel against the reference: every rule, format and shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import BF16, DEVICES, F32, F64, INTERPRETED, RULES, check, gradient, make_update, twin

from lightning_memopt.kernels import reference
from lightning_memopt.optim.gefen_blocks import Blocks
from lightning_memopt.optim.gefen_columns import SCALE

flat = pytest.importorskip("lightning_memopt.kernels.flat", exc_type=ImportError)
pytestmark = [pytest.mark.parametrize("device", DEVICES)]


@pytest.fixture(autouse=True)
def large_programs(monkeypatch) -> None:
    """The interpreter takes as long for a small program as for a large one."""
    if INTERPRETED:
        monkeypatch.setattr(flat, "WEIGHTS", 2048)


def step_both(update, grad) -> None:
    expected = twin(update)
    assert reference.apply_gradient(expected, grad.double())
    flat.apply_gradient(update, grad)
    check(update, expected)


FORMATS = [
    (*types, rounding) for types in ((F32, F32), (BF16, BF16), (BF16, F32)) for rounding in ("nearest", "stochastic")
]


# In the interpreter, which takes half a second for each, one rule in all formats.
@pytest.mark.parametrize(
    ("rule", "dtype", "moment_dtype", "rounding"),
    [
        (rule, *form)
        for rule in RULES
        for form in FORMATS
        if not INTERPRETED or rule == "adamw" or form in (FORMATS[0], FORMATS[3])
    ],
)
def test_every_rule_and_format(rule, dtype, moment_dtype, rounding, device) -> None:
    torch.manual_seed(0)
    update = make_update(rule, (33, 130), device, dtype, moment_dtype, rounding)
    step_both(update, gradient((33, 130), device))


@pytest.mark.parametrize("rule", ["adamw", "adamw8bit", "gefen", "gefen-64"])
@pytest.mark.parametrize(
    "shape", [(1,), (), (129,), (33, 128), (64, 64), (65, 64), (40, 200), (16, 32, 3, 3), (600, 1), (0, 4)]
)
def test_shapes(rule, shape, device) -> None:
    torch.manual_seed(1)
    step_both(make_update(rule, shape, device), gradient(shape, device))


@pytest.mark.parametrize("rule", ["gefen", "gefen-64"])
@pytest.mark.parametrize(
    "shape",
    [(41, 100), (36, 192), (2, 4097), (60, 16, 3, 3), (70, 100), (64, 192), (65, 130), (64, 128), (64, 5, 3, 5)],
)
def test_blocks_of_a_shared_moment(rule, shape, device) -> None:
    torch.manual_seed(9)
    step_both(make_update(rule, shape, device, BF16), gradient(shape, device))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_narrow_gradient(dtype, device) -> None:
    torch.manual_seed(2)
    step_both(make_update("adamw", (9, 70), device), gradient((9, 70), device).to(dtype))


@pytest.mark.parametrize("rule", ["adamw", "adamw8bit", "gefen"])
def test_strided_tensors(rule, device) -> None:
    torch.manual_seed(3)
    update = make_update(rule, (64, 96), device)
    # The twin keeps row-major order: neither strides nor the copies they need may change a result.
    expected = twin(update)
    weight = update.weight.t().contiguous().t()
    grad = gradient((64, 192), device)[:, ::2]
    reference.apply_gradient(expected, grad.double())
    moved = twin(update, None)
    moved.weight = weight
    flat.apply_gradient(moved, grad)
    torch.testing.assert_close(weight.double(), expected.weight, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("rule", "rows"), [("adam", 9), ("sgd-momentum", 9), ("gefen", 66)])
def test_value_clipping(rule, rows, device) -> None:
    torch.manual_seed(4)
    step_both(make_update(rule, (rows, 70), device, clip=0.1), gradient((rows, 70), device))


# Codes of second moments are rounded stochastically also where weights are not.
@pytest.mark.parametrize(
    ("rule", "dtype", "rounding"),
    [*((rule, BF16, "stochastic") for rule in ("adamw", "adamw8bit", "gefen", "lion")), ("adamw8bit", F32, "nearest")],
)
@pytest.mark.parametrize("shape", [(40, 200), (40, 201)])
@pytest.mark.parametrize("offset", [78, 77])
def test_stochastic_rounding_has_the_reference_bits(rule, dtype, rounding, shape, offset, device) -> None:
    torch.manual_seed(5)
    update = replace(make_update(rule, shape, device, dtype, rounding=rounding), offset=offset)
    expected, grad = twin(update, None), gradient(shape, device)
    reference.apply_gradient(expected, grad)
    flat.apply_gradient(update, grad)
    for actual, wanted in [(update.weight, expected.weight)] + [
        (update.state[s.name], expected.state[s.name]) for s in update.storage if s.name == "exp_avg_sq"
    ]:
        # The last bit of a float32 operation may move a value across a threshold.
        wrong = ~torch.isclose(actual, wanted, rtol=1e-6) if actual.dtype == F32 else actual != wanted
        assert wrong.float().mean() < 1e-3


@pytest.mark.parametrize("rule", ["adamw", "adamw8bit"])
def test_non_finite_elements_are_left_out(rule, device) -> None:
    torch.manual_seed(6)
    update = make_update(rule, (40, 200), device)
    before, expected = twin(update, None), twin(update)
    grad = gradient((40, 200), device)
    bad = torch.rand(40, 200, device=device) < 0.05
    reference.apply_gradient(expected, grad.masked_fill(bad, 0).double())
    values = torch.tensor([float("nan"), float("inf"), -float("inf")], device=device)
    flat.apply_gradient(update, torch.where(bad, values[torch.randint(0, 3, (40, 200))], grad))
    assert update.nonfinite.item() == 1
    assert torch.equal(update.weight[bad], before.weight[bad])
    torch.testing.assert_close(update.weight[~bad].double(), expected.weight[~bad], rtol=2e-5, atol=2e-6)
    assert all(torch.isfinite(v).all() for v in update.state.values() if v.is_floating_point())


@pytest.mark.parametrize("rule", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("past", [0, 2])
def test_a_step_of_zero_moves_no_weight(rule, past, device) -> None:
    update = make_update(rule, (40, 200), device, past=past)
    names = list(update.scalars)
    update.row[names.index("step_size")], update.row[names.index("decay")] = 0.0, 1.0
    before, grad = update.weight.clone(), gradient((40, 200), device)
    grad[:20] = 0.0
    flat.apply_gradient(update, grad)
    assert torch.equal(update.weight, before)


@pytest.mark.parametrize("limit", [float("nan"), 2.0**55])
@pytest.mark.parametrize("rule", ["gefen", "gefen-64"])
@pytest.mark.parametrize("rows", [40, 70])  # without and with a factor per column
def test_a_shared_moment_is_the_mean_over_what_is_left(rows, rule, limit, device) -> None:
    torch.manual_seed(8)
    update, shape = make_update(rule, (rows, 200), device), (rows, 200)
    before, grad = twin(update, None), gradient(shape, device)
    bad = torch.rand(shape, device=device) < 0.05
    bad[3], bad[4, :128] = True, True  # blocks with nothing left
    flat.apply_gradient(update, grad.masked_fill(bad, -limit))
    assert update.nonfinite.item() == 1
    first = update.storage[0]
    grad = grad * update.state.get(SCALE, 1.0)
    blocks, s = Blocks.of(grad, update.state["exp_avg_sq"]), update.scalars
    count = blocks.split((~bad).double()).sum(2)
    mean = blocks.split(grad.masked_fill(bad, 0).double() ** 2).sum(2) / count.clamp(min=1)
    v = before.state["exp_avg_sq"].double()
    v = torch.where(count > 0, v * s["beta2"] + mean * s["one_minus_beta2"], v)
    torch.testing.assert_close(update.state["exp_avg_sq"].double(), v, rtol=1e-5, atol=0)
    m = first.load(before.state, F64).lerp(grad.double(), s["one_minus_beta1"])
    w = before.weight.double() * s["decay"]
    w -= s["step_size"] * m / (blocks.spread(v, shape).sqrt() * s["inv_sqrt_bias2"] + s["eps"])
    torch.testing.assert_close(update.weight, torch.where(bad, before.weight.double(), w).float(), rtol=2e-5, atol=2e-6)
    left = bad & (update.state["exp_avg_scale"] == before.state["exp_avg_scale"]).repeat_interleave(64, 1)[:, :200]
    assert left.any() and torch.equal(update.state["exp_avg"][left], before.state["exp_avg"][left])


def test_two_runs_agree_bitwise(device) -> None:
    torch.manual_seed(7)
    first = make_update("adamw8bit", (40, 200), device, BF16)
    second, grad = twin(first, None), gradient((40, 200), device)
    flat.apply_gradient(first, grad)
    flat.apply_gradient(second, grad)
    assert torch.equal(first.weight, second.weight)
    assert all(torch.equal(first.state[key], second.state[key]) for key in first.state)


@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
def test_more_than_two_to_the_31_elements(device) -> None:
    shape = (2**19 + 3, 4096)
    update = make_update("sgd", (1, 1), device, BF16, rounding="nearest")
    update.weight = torch.zeros(shape, dtype=BF16, device=device)
    flat.apply_gradient(update, torch.ones(shape, dtype=BF16, device=device))
    wanted = torch.tensor(-0.01, dtype=BF16, device=device)
    assert (update.weight == wanted).all()
