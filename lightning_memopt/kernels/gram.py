"""‖dYᵀ x‖² of many layers in one launch, by ⟨dY dYᵀ, x xᵀ⟩, of which neither product is stored.

Both are symmetric, so only their lower halves are formed, tile by tile: T² (N + K) operations for T tokens, N outputs
and K inputs. Layers with the same input share its part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memopt.kernels.slabs import Factors, place

# Layers of a launch (of few tokens there are few tiles of one), tokens along either side of a tile, and outputs or
# inputs that are summed over at a time.
LAYERS, TILE, DEPTH = 32, 128, 64
WARPS, STAGES = 8, 3
# Elements in 16 bytes, at a multiple of which rows must begin for their loads to be wide.
WIDE = 8
# How a number of elements and another number are packed into one: Triton makes another kernel for every set of numbers
# of which some are 1, multiples of 16, or small enough for 32 bits, and these are neither.
BITS, MARKS = 28, 1 << 62 | 1
_TILE, _DEPTH, _WIDE = tl.constexpr(TILE), tl.constexpr(DEPTH), tl.constexpr(WIDE)
_BITS, _MASK = tl.constexpr(BITS), tl.constexpr((1 << BITS) - 1)


@triton.jit
def _pick(values, i):
    """Element `i` of a tuple, in a program that knows `i` only when it runs."""
    picked = values[0]
    for k in tl.static_range(1, len(values)):
        picked = tl.where(i == k, values[k], picked)
    return picked


@triton.jit
def _unpacked(packed):
    """Both numbers of `_packed`."""
    return packed >> 1 & _MASK, packed >> _BITS >> 1 & _MASK


@triton.jit
def _product(factor, packed, i, j, tokens):
    """Tile (i, j) of a factor [tokens, width] times its transpose."""
    width, stride = _unpacked(packed)
    width, stride = width * _WIDE, stride * _WIDE
    down, across = i * _TILE + tl.arange(0, _TILE), j * _TILE + tl.arange(0, _TILE)
    depth = tl.arange(0, _DEPTH)
    a = factor + (down[:, None] * stride + depth[None, :])
    b = factor + (across[None, :] * stride + depth[:, None])
    sums = tl.zeros((_TILE, _TILE), tl.float32)
    for start in range(0, width, _DEPTH):
        inside = start + depth < width
        sums = tl.dot(
            tl.load(a + start, mask=(down < tokens)[:, None] & inside[None, :], other=0.0),
            tl.load(b + start, mask=inside[:, None] & (across < tokens)[None, :], other=0.0),
            sums, input_precision="ieee",
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["tokens"])
def gram_norms(dys, dy_widths, xs, x_widths, groups, out, tokens):
    """What each tile of the lower half adds to the squared norms of up to `LAYERS` layers.

    Args:
        dys, xs: Of each layer dY and x, [tokens, width].
        dy_widths, x_widths: Their `_packed` widths, and elements from one token to the next.
        groups: For each layer, `_packed` as well, how many there are from it on that have its x; 0 after the first.
        out: Float32 [layers, tiles, tiles]; its upper half is left alone.
    """
    across = tl.cdiv(tokens, _TILE)
    tile, first = tl.program_id(0), tl.program_id(1)
    i, j = tile // across, tile % across
    count, _ = _unpacked(_pick(groups, first))
    if (j <= i) & (count > 0):
        x = _product(_pick(xs, first), _pick(x_widths, first), i, j, tokens)
        for layer in range(first, first + count.to(tl.int32)):
            dy = _product(_pick(dys, layer), _pick(dy_widths, layer), i, j, tokens)
            total = tl.sum(x * dy) * tl.where(i == j, 1.0, 2.0)
            tl.store(out + layer * across * across + tile, total)


def supports(dy: Tensor, x: Tensor) -> bool:
    """Whether the kernel takes these factors, which must be bf16 or fp16 on a GPU."""
    return dy.dtype == x.dtype and all(
        part.dtype in (torch.bfloat16, torch.float16)
        and part.is_cuda
        and part.stride(1) == 1
        and part.stride(0) % WIDE == 0
        and max(part.shape[1], part.stride(0)) < WIDE << BITS
        and part.shape[1] % WIDE == 0
        and part.data_ptr() % 16 == 0
        for part in (dy, x)
    )


def squared_norms(pairs: Sequence[Factors]) -> Tensor:
    """Float32 [layers], of factors of one dtype and number of tokens; two runs agree to the bit."""
    parts = [_launch(pairs[start : start + LAYERS]) for start in range(0, len(pairs), LAYERS)]
    return torch.cat(parts).clamp_(min=0)


def _launch(pairs: Sequence[Factors]) -> Tensor:
    tokens = len(pairs[0][0])
    side = -(-tokens // TILE)
    out = torch.zeros(len(pairs), side, side, dtype=torch.float32, device=pairs[0][0].device)
    if not tokens:
        return out.sum((1, 2))
    # Short launches are filled up, so that there is one kernel to compile.
    dys, xs = zip(*pairs, *[pairs[0]] * (LAYERS - len(pairs)), strict=True)
    groups = [0] * LAYERS
    for i, (_, x) in enumerate(pairs):
        if i == 0 or place(x) != place(xs[i - 1]):
            first = i
        groups[first] += 1
    gram_norms[(side * side, len(pairs))](
        dys, _widths(dys), xs, _widths(xs), tuple(_packed(count) for count in groups), out, tokens,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out.sum((1, 2))


def _widths(parts: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(_packed(part.shape[1] // WIDE, part.stride(0) // WIDE) for part in parts)


def _packed(number: int, other: int = 0) -> int:
    return MARKS | number << 1 | other << 1 + BITS
