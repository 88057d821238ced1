"""The Hopper kernel against the reference in float64: every rule, format and shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import BF16, F32, INTERPRETED, RULES, check, make_update, twin

from lightning_memopt.kernels import reference

flat = pytest.importorskip("lightning_memopt.kernels.flat", exc_type=ImportError)
hopper = pytest.importorskip("lightning_memopt.kernels.fused_hopper", exc_type=ImportError)
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not INTERPRETED
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")]

# Small rings, so that the tests' few tiles go around them.
CONFIG = hopper.Config(stages=3, slots=2, lag=0, group=2)
# The same where tiles are handed over.
HANDED = hopper.Config(stages=2, slots=2, lag=0, group=2, handed=True)


def factors(tokens, rows, columns, dtype=torch.float16):
    dy = torch.randn(tokens, rows, device="cuda") / 4
    return dy.to(dtype), torch.randn(tokens, columns, device="cuda").to(dtype)


def step_both(update, dy, x, config=CONFIG) -> None:
    assert hopper.supports(update, dy, x)
    expected = twin(update)
    assert reference.apply_gradient(expected, dy.double().t() @ x.double())
    hopper.apply_factors(update, dy, x, config)
    check(update, expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "moment_dtype"), [(F32, F32), (BF16, BF16), (BF16, F32)])
def test_every_rule_and_format(rule, dtype, moment_dtype) -> None:
    torch.manual_seed(0)
    # Three float32 moments of a float32 weight leave room for less.
    config = CONFIG if dtype == BF16 else hopper.Config(stages=2, slots=2, lag=0, group=2)
    step_both(make_update(rule, (136, 272), "cuda", dtype, moment_dtype), *factors(70, 136, 272), config)


@pytest.mark.parametrize("rule", ["adamw", "adamw8bit", "gefen", "gefen-64"])
@pytest.mark.parametrize("shape", [(1, 16), (8, 64), (128, 128), (130, 80), (300, 208), (2048, 2304)])
@pytest.mark.parametrize("tokens", [1, 65, 640])
def test_shapes(rule, shape, tokens) -> None:
    torch.manual_seed(1)
    rows = shape[0] + -shape[0] % 8  # what TMA wants of dY; other rows are left out below
    dy, x = factors(tokens, rows, shape[1])
    step_both(make_update(rule, shape, "cuda", BF16), dy[:, : shape[0]], x)


@pytest.mark.parametrize("shape", [(128, 128), (130, 80), (300, 208), (2048, 2304)])
@pytest.mark.parametrize("tokens", [1, 65, 640])
@pytest.mark.parametrize("config", [(2, 2, 0, 2, 64, True), (3, 4, 0, 1, 64, True), (7, 3, 0, 8, 32, True)])
def test_shapes_handed_over(shape, tokens, config) -> None:
    torch.manual_seed(1)
    dy, x = factors(tokens, shape[0] + -shape[0] % 8, shape[1])
    update = make_update("adamw8bit", shape, "cuda", BF16)
    assert hopper.can_hand_over(update)
    step_both(update, dy[:, : shape[0]], x, hopper.Config(*config))


@pytest.mark.parametrize("clip", [0.05, float("inf")])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_formats_and_clipping_handed_over(dtype, clip) -> None:
    torch.manual_seed(3)
    update = make_update("adamw8bit", (384, 272), "cuda", dtype, BF16, clip=clip)
    step_both(update, *factors(64, 384, 272, BF16), HANDED)


@pytest.mark.parametrize("config", [(4, 4, 0, 1), (5, 2, 0, 2), (4, 3, 1, 8)])
def test_configurations(config) -> None:
    torch.manual_seed(2)
    step_both(make_update("adamw", (1024, 2304), "cuda", BF16), *factors(200, 1024, 2304), hopper.Config(*config))


@pytest.mark.parametrize("rule", ["adam", "adamw8bit", "gefen"])
@pytest.mark.parametrize("clip", [0.05, float("inf")])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_clipping_and_rounding(rule, clip, rounding) -> None:
    torch.manual_seed(3)
    update = make_update(rule, (256, 256), "cuda", BF16, rounding=rounding, clip=clip)
    step_both(update, *factors(64, 256, 256, BF16))


def test_random_bits_are_the_reference_s() -> None:
    """On a gradient that float32 holds exactly, weights agree to the bit but where approximate division shows."""
    torch.manual_seed(4)
    update = make_update("adamw", (256, 256), "cuda", BF16)
    expected = twin(update, None)
    dy, x = torch.randn(1, 256, device="cuda").to(BF16), torch.randn(1, 256, device="cuda").to(BF16)
    assert reference.apply_gradient(expected, dy.float().t() @ x.float())
    hopper.apply_factors(update, dy, x, CONFIG)
    for ours, theirs in [(update.weight, expected.weight), (update.state["exp_avg_sq"], expected.state["exp_avg_sq"])]:
        assert (ours != theirs).float().mean() < 1e-3


@pytest.mark.parametrize(
    ("rule", "config"), [("adamw", CONFIG), ("adamw8bit", CONFIG), ("gefen", CONFIG), ("adamw8bit", HANDED)]
)
def test_non_finite_elements_are_left_out(rule, config) -> None:
    torch.manual_seed(5)
    update = make_update(rule, (256, 256), "cuda", BF16)
    before = twin(update, None)
    dy, x = factors(9, 256, 256)
    dy[3, 7] = float("nan")
    dy[4, 200] = float("inf")
    hopper.apply_factors(update, dy, x, config)
    assert update.nonfinite.item() == 1
    changed = (update.weight != before.weight).any(1)
    assert not changed[[7, 200]].any() and changed.sum() == 254
    for storage in update.storage:
        old, new = (storage.load(u.state, F32)[[7, 200]] for u in (before, update))
        assert torch.isfinite(new).all()
        if rule == "adamw":
            assert torch.equal(old, new)


@pytest.mark.parametrize("bad", [float("nan"), 2.0**56])
@pytest.mark.parametrize("rule", ["gefen", "gefen-64"])
def test_shared_moments_without_some_elements_are_the_flat_kernel_s(rule, bad) -> None:
    torch.manual_seed(7)
    update = make_update(rule, (256, 272), "cuda", F32)
    expected = twin(update, None)
    dy, x = factors(9, 256, 272, BF16)
    dy[4] = 0
    dy[4, :99] = 1
    x[4, 70], x[4, 200:] = bad, bad
    # Sums with NaN or 2^56 in them are left out, all others do not know of them.
    flat.apply_gradient(expected, dy.float().t() @ x.float())
    hopper.apply_factors(update, dy, x, CONFIG)
    assert update.nonfinite.item() == expected.nonfinite.item() == 1
    torch.testing.assert_close(update.weight, expected.weight, rtol=2e-5, atol=2e-6)
    shared, wanted = update.state["exp_avg_sq"], expected.state["exp_avg_sq"]
    torch.testing.assert_close(shared, wanted, rtol=2e-5, atol=0)


@pytest.mark.parametrize("rule", ["gefen", "gefen-64"])
def test_large_gradients_below_the_limit_are_used(rule) -> None:
    torch.manual_seed(8)
    # Their squares add up to more than can be told from a sum, so each is looked at.
    step_both(make_update(rule, (256, 272), "cuda", BF16), *(2.0**26 * part for part in factors(3, 256, 272, BF16)))


@pytest.mark.parametrize("rule", ["adamw", "adamw8bit", "gefen"])
def test_two_runs_agree_bitwise(rule) -> None:
    torch.manual_seed(6)
    first = make_update(rule, (1024, 2304), "cuda", BF16)
    pair = factors(333, 1024, 2304)
    others = [hopper.Config(stages=4, slots=3, lag=1, group=8)]
    others += [HANDED, hopper.Config(7, 3, 0, 8, 32, handed=True)] if hopper.can_hand_over(first) else []
    seconds = [twin(first, None) for _ in others]
    hopper.apply_factors(first, *pair, CONFIG)
    for second, config in zip(seconds, others, strict=True):
        hopper.apply_factors(second, *pair, config)
        assert torch.equal(first.weight, second.weight)
        assert all(torch.equal(first.state[key], second.state[key]) for key in first.state)


def test_more_than_two_to_the_31_elements() -> None:
    rows, columns = 2**19 + 8, 4096
    update = make_update("sgd", (1, 1), "cuda", BF16, rounding="nearest")
    update.weight = torch.zeros(rows, columns, dtype=BF16, device="cuda")
    ones = torch.ones(1, rows, dtype=BF16, device="cuda"), torch.ones(1, columns, dtype=BF16, device="cuda")
    hopper.apply_factors(update, *ones, CONFIG)
    assert (update.weight == torch.tensor(-0.01, dtype=BF16, device="cuda")).all()


@pytest.mark.parametrize("rule", ["adamw", "adamw8bit", "gefen"])
def test_programs_beside_others_do_the_same(rule) -> None:
    torch.manual_seed(9)
    update = make_update(rule, (4096, 4480), "cuda", BF16)
    others = [replace(twin(update, None), beside=beside) for beside in ("collectives", "barriers")]
    dy, x = factors(200, 4096, 4480, BF16)
    calls = [hopper.call(each, dy, x, CONFIG) for each in (update, *others)]
    assert [call.programs - calls[0].programs for call in calls[1:]] == [calls[0].programs, -hopper.LEFT_TO_BARRIERS]
    for call in calls:
        call.run()
    for other in others:
        assert torch.equal(update.weight, other.weight)
        for storage in update.storage:
            for entry in storage.entries():
                assert torch.equal(update.state[entry], other.state[entry])
