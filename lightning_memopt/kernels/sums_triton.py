"""Adding to a bf16 sum and rounding it stochastically, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels import tiles

# Elements of a program.
WIDTH = 1024


@triton.jit(do_not_specialize=["key", "offset", "count"])
def add_rounded(total, part, key, offset, count, WIDTH: tl.constexpr):
    """See `kernels.sums.add`.

    Args:
        total, part: bf16 and float32 [count].
        key: The key's 32 bits, as a signed number.
        offset: Index of the first element; its low 32 bits matter.
    """
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = at < count
    before = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    x = before + tl.load(part + at, mask=inside, other=0.0)
    rounded = tiles.round_bf16(x, tiles.high_bits(tiles.random_bits(key, offset + at)))
    tl.store(total + at, tl.where(tiles.finite(x), rounded, x.to(tl.bfloat16)), mask=inside)


def add(total: Tensor, part: Tensor, key: int, offset: int) -> None:
    """See `kernels.sums.add`."""
    count = total.numel()
    if count:
        signed = key - (1 << 32) if key >= 1 << 31 else key
        add_rounded[(triton.cdiv(count, WIDTH),)](total, part, signed, offset, count, WIDTH=WIDTH)
