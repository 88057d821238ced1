"""The update of an embedding table, in plain torch and by its kernel, against autograd's dense gradient."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, DEVICES, F32, INTERPRETED, check, make_update, twin

from lightning_memopt.kernels import embedding, reference, slabs


def dense_gradient(indices, dy, rows, padding_idx):
    table = torch.zeros(rows, dy.shape[-1], dtype=torch.float64, device=dy.device, requires_grad=True)
    output = torch.nn.functional.embedding(indices, table, padding_idx=padding_idx)
    (grad,) = torch.autograd.grad(output, table, dy.double())
    return grad


def make_tokens(rows, dim, device, shape=(3, 30)):
    """Some rows many times, some once, most never."""
    indices = (torch.rand(shape) ** 4 * rows).long().to(device)
    return indices, torch.randn(*shape, dim, device=device)


def by_kernel(update, indices, dy, padding_idx=None) -> None:
    embedding_triton = pytest.importorskip("lightning_memopt.kernels.embedding_triton", exc_type=ImportError)
    tokens = embedding.segments(indices, len(update.weight))
    embedding_triton.apply_embedding(update, tokens, dy.reshape(-1, dy.shape[-1]), padding_idx)


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
@pytest.mark.parametrize("slab", [1 << 18, 64])
@pytest.mark.parametrize("rule", ["adamw", "adamw8bit"])
def test_reference_is_dense_autograd(rule, slab, padding_idx, monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(slabs, "CPU_SLAB_ELEMENTS", slab)
    update = make_update(rule, (130, 40))
    expected = twin(update)
    indices, dy = make_tokens(130, 40, "cpu")
    dense = dense_gradient(indices, dy, 130, padding_idx)
    assert reference.apply_gradient(expected, dense)
    assert embedding.apply_embedding(update, indices, dy, "auto", padding_idx)
    check(update, expected)
    torch.testing.assert_close(embedding.embedding_gradient(indices, dy, 130, torch.float64, padding_idx), dense)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_reference_leaves_out_a_non_finite_update_whole(bad, monkeypatch) -> None:
    monkeypatch.setattr(slabs, "CPU_SLAB_ELEMENTS", 8)
    update = make_update("adamw", (10, 4))
    before = twin(update, None)
    dy = torch.ones(4, 4)
    dy[2:] = bad  # two of them overflow where each is still finite
    assert not embedding.apply_embedding(update, torch.tensor([1, 2, 9, 9]), dy, "auto")
    assert torch.equal(update.weight, before.weight)
    assert all(torch.equal(update.state[key], before.state[key]) for key in update.state)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["adamw", "adamw8bit", "gefen", "lion", "sgd", "adagrad"])
@pytest.mark.parametrize(("dtype", "moment_dtype"), [(F32, F32), (BF16, BF16)])
def test_kernel(rule, dtype, moment_dtype, device) -> None:
    torch.manual_seed(1)
    update = make_update(rule, (51, 130), device, dtype, moment_dtype)
    expected = twin(update)
    indices, dy = make_tokens(51, 130, device)
    reference.apply_gradient(expected, dense_gradient(indices, dy, 51, None))
    by_kernel(update, indices, dy)
    check(update, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding_idx", [0, 3])
def test_kernel_leaves_padding_out(padding_idx, device) -> None:
    torch.manual_seed(2)
    update = make_update("adamw8bit", (50, 200), device)
    expected = twin(update)
    indices, dy = make_tokens(50, 200, device)
    reference.apply_gradient(expected, dense_gradient(indices, dy, 50, padding_idx))
    by_kernel(update, indices, dy, padding_idx)
    check(update, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1])
def test_kernel_with_hardly_any_tokens(tokens, device) -> None:
    torch.manual_seed(3)
    update = make_update("adamw", (9, 33), device)
    expected = twin(update)
    indices, dy = make_tokens(9, 33, device, (tokens,))
    reference.apply_gradient(expected, dense_gradient(indices, dy, 9, None))
    by_kernel(update, indices, dy)
    check(update, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_with_strided_narrow_gradient(device) -> None:
    torch.manual_seed(4)
    update = make_update("adamw", (51, 64), device)
    expected = twin(update)
    indices, dy = make_tokens(51, 128, device, (40,))
    dy = dy.half()[:, ::2]
    reference.apply_gradient(expected, dense_gradient(indices, dy, 51, None))
    by_kernel(update, indices, dy)
    check(update, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_two_runs_agree_bitwise(device) -> None:
    torch.manual_seed(5)
    rows, tokens = (51, (90,)) if INTERPRETED else (5000, (20000,))
    first = make_update("adamw8bit", (rows, 130), device, BF16)
    second = twin(first, None)
    indices, dy = make_tokens(rows, 130, device, tokens)
    by_kernel(first, indices, dy)
    by_kernel(second, indices, dy)
    assert torch.equal(first.weight, second.weight)
    assert all(torch.equal(first.state[key], second.state[key]) for key in first.state)
