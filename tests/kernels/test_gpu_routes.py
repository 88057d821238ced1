"""Dispatch on a GPU: any operands, every route, no waiting for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import BF16, F32, INTERPRETED, check, make_update, twin

from lightning_memopt.kernels import apply_embedding, apply_factors, apply_gradient, reference
from lightning_memopt.kernels.memory import Memory

tuning = pytest.importorskip("lightning_memopt.kernels.tuning", exc_type=ImportError)
Prepared = pytest.importorskip("lightning_memopt.kernels.launch", exc_type=ImportError).Prepared
gpu = pytest.importorskip("lightning_memopt.kernels.gpu", exc_type=ImportError)
HERE = torch.cuda.is_available() and not INTERPRETED
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a GPU")]
ROUTES = ["auto", "fused", "two_pass"]


def factors(tokens, rows, columns, dtype=BF16):
    dy = torch.randn(tokens, rows, device="cuda") / 4
    return dy.to(dtype), torch.randn(tokens, columns, device="cuda").to(dtype)


def step_both(update, pairs, kernel, grad=None) -> None:
    expected = twin(update)
    dw = sum(dy.double().t() @ x.double() for dy, x in pairs)
    assert reference.apply_gradient(expected, dw if grad is None else dw + grad)
    assert apply_factors(update, pairs, grad, kernel)
    check(update, expected)


@pytest.mark.parametrize("kernel", ROUTES)
@pytest.mark.parametrize("rule", ["adamw", "adamw8bit", "gefen", "sgd"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (40, 200), (129, 131), (256, 384)])
@pytest.mark.parametrize("tokens", [0, 1, 100])
def test_shapes(rule, rows, columns, tokens, kernel) -> None:
    torch.manual_seed(0)
    step_both(make_update(rule, (rows, columns), "cuda", BF16), [factors(tokens, rows, columns)], kernel)


@pytest.mark.parametrize("kernel", ROUTES)
def test_operands(kernel) -> None:
    torch.manual_seed(1)
    dy, x = factors(48, 256, 128)
    for pair in [
        (dy.t().contiguous().t(), x),  # not contiguous
        (dy[:, ::2].repeat(1, 2), x[:, 3:].repeat(1, 2)[:, :128]),
        (dy[:1, :1].expand(48, 256), x),  # the gradient of a sum
        (dy[:1].expand(48, 256), x),  # that of a mean over tokens
        (dy, x.flatten().as_strided((48, 128), (64, 1))),  # windows that overlap
        (dy.float(), x),
        (dy.half(), x.half()),
        (dy.float(), x.float()),
    ]:
        step_both(make_update("adamw", (256, 128), "cuda", BF16), [pair], kernel)


@pytest.mark.parametrize("kernel", ROUTES)
def test_several_factors_and_a_stored_part(kernel) -> None:
    torch.manual_seed(2)
    pairs = [factors(33, 256, 128), factors(4, 256, 128)]
    step_both(make_update("adamw", (256, 128), "cuda", BF16), pairs, kernel)
    step_both(make_update("adamw", (256, 128), "cuda", BF16), pairs, kernel, torch.randn(256, 128, device="cuda"))


def test_stored_gradient() -> None:
    torch.manual_seed(3)
    update = make_update("adamw", (77,), "cuda", BF16)
    expected, grad = twin(update), torch.randn(77, device="cuda")
    assert reference.apply_gradient(expected, grad) and apply_gradient(update, grad, "auto")
    check(update, expected)


def test_slabs_cover_every_row() -> None:
    torch.manual_seed(4)
    update = make_update("adamw8bit", (3000, 4096), "cuda", BF16)
    step_both(update, [factors(64, 3000, 4096)], "two_pass")


@pytest.mark.parametrize("kernel", ROUTES)
def test_a_graph_follows_the_schedule(kernel) -> None:
    """A captured launch reads learning rate and key from the device at every replay."""
    torch.manual_seed(5)
    update = make_update("adamw", (256, 512), "cuda", BF16, F32)
    dy, x = factors(64, 256, 512)
    apply_factors(replace_copy(update), [(dy, x)], None, kernel)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply_factors(update, [(dy, x)], None, kernel)
    expected = replace_copy(update)
    for factor in (1.0, 0.5):
        update.row[7] *= factor  # the step size
        update.row_key += 1
        graph.replay()
        apply_factors(replace(expected, row=update.row, row_key=update.row_key), [(dy, x)], None, kernel)
        assert torch.equal(update.weight, expected.weight)


@pytest.mark.parametrize("kernel", ROUTES)
@pytest.mark.parametrize("rule", ["adamw", "adamw8bit", "gefen", "sgd"])
def test_repeated_launches_leave_the_same_bits(rule, kernel, monkeypatch) -> None:
    """A parameter that remembers its launches, beside one that does not: steps, other token counts, replaced states."""
    torch.manual_seed(7)
    plain = make_update(rule, (384, 512), "cuda", BF16)
    remembering = replace(replace_copy(plain), memory=Memory())
    count = []
    launch = Prepared.__call__
    monkeypatch.setattr(Prepared, "__call__", lambda self, *operands: count.append(1) or launch(self, *operands))
    for step in range(6):
        if step == 3:
            for update in (plain, remembering):
                update.state |= {k: v.clone() for k, v in update.state.items() if v.is_cuda}
        pair = factors(64 if step % 3 else 2048, 384, 512)
        plain.row_key.add_(1)  # which is the other's as well
        for update in (plain, remembering):
            assert apply_factors(update, [pair], None, kernel)
        assert torch.equal(plain.weight, remembering.weight)
        for key, value in plain.state.items():
            assert torch.equal(value, remembering.state[key]), key
    # Of three steps with the same state, the first launches the ordinary way; another route does once more.
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert not hopper or len(count) >= 2


def test_repeated_flat_launches_leave_the_same_bits(monkeypatch) -> None:
    torch.manual_seed(8)
    plain = make_update("adamw", (1000,), "cuda", BF16)
    remembering = replace(replace_copy(plain), memory=Memory())
    count = []
    launch = Prepared.__call__
    monkeypatch.setattr(Prepared, "__call__", lambda self, *operands: count.append(1) or launch(self, *operands))
    whole = torch.randn(1010, device="cuda").to(BF16)
    for start in (0, 8, 1, 3, 5, 0):
        for update in (plain, remembering):
            assert apply_gradient(update, whole[start : start + 1000], "auto")
        assert torch.equal(plain.weight, remembering.weight)
    assert len(count) == 4  # one ordinary launch for aligned gradients, and one for others


def test_repeated_slabs_and_look_ups_leave_the_same_bits(monkeypatch) -> None:
    """A table that is also a layer's weight: its look-ups are formed and added to slabs of the layer's gradient."""
    torch.manual_seed(9)
    monkeypatch.setattr(gpu, "GPU_SLAB_ELEMENTS", 64 * 200)
    plain = make_update("adamw", (300, 200), "cuda", BF16)
    remembering = replace(replace_copy(plain), memory=Memory())
    count = []
    launch = Prepared.__call__
    monkeypatch.setattr(Prepared, "__call__", lambda self, *operands: count.append(1) or launch(self, *operands))
    for step in range(4):
        pair, stored = factors(33, 300, 200), torch.randn(300, 200, device="cuda")
        tokens = 50 if step % 2 else 70
        indices, dy = torch.randint(0, 300, (tokens,), device="cuda"), torch.randn(tokens, 200, device="cuda").to(BF16)
        for update in (plain, remembering):
            assert apply_factors(update, [pair], stored, "auto")
            assert apply_embedding(update, indices, dy, "auto")
        assert torch.equal(plain.weight, remembering.weight)
        for key, value in plain.state.items():
            assert torch.equal(value, remembering.state[key]), key
    assert len(count) == 3 * (3 + 1)  # after the first step: three slabs and the look-ups


def replace_copy(update):
    return tuning.copy(update)


def test_measured_routes_are_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MEMOPT_TUNE", "1")
    tuning._measured.cache_clear()
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has a choice")
    torch.manual_seed(6)
    update = make_update("adamw", (512, 512), "cuda", BF16)
    before = update.weight.clone()
    route = tuning.choose(update, *factors(128, 512, 512))
    assert torch.equal(update.weight, before)
    tuning._measured.cache_clear()
    monkeypatch.delenv("MEMOPT_TUNE")
    assert tuning._measured(update.weight.device) == {
        "512x512 128 adam bfloat16-bfloat16-bfloat16-bfloat16 stochastic": route
    }
    tuning._measured.cache_clear()
