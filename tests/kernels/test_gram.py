"""Squared norms of weight gradients of many layers at once, from their factors."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICES, INTERPRETED

gram = pytest.importorskip("lightning_memopt.kernels.gram", exc_type=ImportError)
pytestmark = [pytest.mark.parametrize("device", DEVICES)]


def half(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter's dot is wrong for bf16


def part(tokens: int, width: int, device: str) -> torch.Tensor:
    """Columns of a larger tensor, as factors that arrived together are."""
    whole = torch.randn(tokens, width + 24, device=device).to(half(device)) / 4
    return whole[:, 8 : 8 + width]


def exact(pairs) -> torch.Tensor:
    return torch.stack([(dy.double().t() @ x.double()).square().sum() for dy, x in pairs])


@pytest.mark.parametrize("tokens", [1, 5, 128, 150 if INTERPRETED else 300])
def test_norms_of_many_layers(tokens, device) -> None:
    torch.manual_seed(tokens)
    shared, other = part(tokens, 64, device), part(tokens, 136, device)
    # More than one launch, inputs that several share in a row and out of it, and across two launches.
    inputs = [*[shared] * 2, *[other] * 3, shared, part(tokens, 8, device), *[shared] * (gram.LAYERS - 4), other]
    pairs = [(part(tokens, 8 * (1 + i % 7), device), x) for i, x in enumerate(inputs)]
    if device == "cuda":
        assert all(gram.supports(dy, x) for dy, x in pairs)
    norms = gram.squared_norms(pairs)
    torch.testing.assert_close(norms.double(), exact(pairs), rtol=2e-6, atol=0)
    assert torch.equal(norms, gram.squared_norms(pairs))


def test_what_it_takes(device) -> None:
    plain = part(4, 64, device)
    assert gram.supports(plain, plain) == (device == "cuda")
    if device == "cpu":
        return
    far = torch.empty(1 << 31, dtype=half(device), device=device)[-64:].as_strided((1, 64), (1 << 31, 1))
    others = [plain.float(), plain.t(), plain[:, 1:57], plain[:, :60], far, plain.to(torch.float16)]
    assert not any(gram.supports(plain, other) for other in others)


def test_without_tokens(device) -> None:
    pairs = [(part(0, 16, device), part(0, 8, device))] * 2
    assert gram.squared_norms(pairs).tolist() == [0, 0]


def test_a_gradient_that_cancels(device) -> None:
    """Its norm is small against the products that it is the sum of; what rounding leaves is never below zero."""
    torch.manual_seed(0)
    dy, x = part(2, 64, device), part(2, 64, device)
    dy[1], x[1] = -dy[0], x[0]
    norm = float(gram.squared_norms([(dy, x)]))
    assert 0 <= norm < 1e-6 * float(exact([(dy[:1], x[:1])]))


def test_not_finite(device) -> None:
    torch.manual_seed(0)
    pairs = [(part(130, 16, device), part(130, 24, device)) for _ in range(3)]
    pairs[1][0][129, 3] = float("inf")
    assert torch.isfinite(gram.squared_norms(pairs)).tolist() == [True, False, True]
