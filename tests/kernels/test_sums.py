"""Sums that are stored in bf16: the kernel against plain torch, and what either makes of them."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, DEVICES, F32

from lightning_memopt.kernels import sums
from lightning_memopt.kernels.rounding import rounding_key

sums_triton = pytest.importorskip("lightning_memopt.kernels.sums_triton", exc_type=ImportError)
pytestmark = [pytest.mark.parametrize("device", DEVICES)]


@pytest.mark.parametrize("shape", [(1,), (3, 70), (17, 130), (0, 4)])
@pytest.mark.parametrize("offset", [0, 77, 2**31 + 5, 2**33 + 1])
def test_the_kernel_rounds_as_plain_torch_does(shape, offset, device) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape) * torch.rand(shape).mul(20).exp()
    if len(values):
        values.view(-1)[0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(F32)  # as GPUs write NaN
        values.view(-1)[1:3] = torch.tensor([torch.inf, -torch.inf])[: values.numel() - 1]
    for key in (rounding_key(0, 3, "a"), rounding_key(1, 3, "b"), 2**31 - 1, 2**32 - 1):
        expected = torch.randn(shape).to(BF16)
        found, exact = expected.to(device, copy=True), expected.float() + values
        sums.add(expected, values, key, offset)
        sums_triton.add(found, values.to(device), key, offset)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(expected.isfinite(), values.isfinite())
        near = exact.isfinite()
        torch.testing.assert_close(expected.float()[near], exact[near], rtol=2**-7, atol=0)
