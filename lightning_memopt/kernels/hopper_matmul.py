# mypy: ignore-errors
# Device code, whose types are Triton's.
"""The matmul of a tile of dW = dYᵀ x in the Hopper kernels: the order of tiles, the ring of operands, the products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

# A tile, and how it and its upper and lower half lie in the registers of the four warps that form it.
TILE_ROWS, TILE_COLUMNS = 128, 128
HALF = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_COLUMNS, 16])
_ROWS, _COLUMNS, _HALF = gl.constexpr(TILE_ROWS), gl.constexpr(TILE_COLUMNS), gl.constexpr(HALF)


@gluon.jit
def tile_position(i, down, across, group):
    """Tile `i` of a `down` by `across` grid, taken in bands of `group` rows so that operands stay in L2.

    Some position for tiles beyond the last, which some ask for ahead.
    """
    band = group * across
    first = (i // band) * group
    height = gl.maximum(gl.minimum(down - first, group), 1)
    return first + (i % band) % height, (i % band) // height


@gluon.jit
def corner(n, down, across, group):
    """First row and column of the `n`-th tile that this program works on."""
    row, column = tile_position(gl.program_id(0) + n * gl.num_programs(0), down, across, group)
    return row * _ROWS, column * _COLUMNS


@gluon.jit
def tile_count(down, across):
    """How many tiles this program works on."""
    return gl.cdiv(down * across - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def operands(dy, x, dy_ring, x_ring, full, empty, down, across, steps, group):
    """Keep the ring of dY and x stages full."""
    stages: gl.constexpr = x_ring.type.shape[0]
    tokens: gl.constexpr = x.block_type.shape[0]
    i = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        row, column = tile_position(tile, down, across, group)
        for t in range(steps):
            stage = i % stages
            mbarrier.wait(empty.index(stage), ((i // stages) & 1) ^ 1)
            mbarrier.expect(full.index(stage), dy.block_type.nbytes + x.block_type.nbytes)
            tma.async_copy_global_to_shared(dy, [t * tokens, row * _ROWS], full.index(stage), dy_ring.index(stage))
            tma.async_copy_global_to_shared(x, [t * tokens, column * _COLUMNS], full.index(stage), x_ring.index(stage))
            i += 1


@gluon.jit
def first_product(i, dy_ring, x_ring, full):
    """The first token step of one tile, which is still running on return."""
    stages: gl.constexpr = x_ring.type.shape[0]
    acc = gl.zeros([_ROWS, _COLUMNS], gl.float32, _HALF)
    return _product(acc, i % stages, (i // stages) & 1, dy_ring, x_ring, full, False)


@gluon.jit
def more_products(acc, i, dy_ring, x_ring, full, empty, steps):
    """The others, from the second on, one wgmma in flight; the last one is still running on return."""
    stages: gl.constexpr = x_ring.type.shape[0]
    for _ in range(1, steps):
        i += 1
        stage = i % stages
        acc = _product(acc, stage, (i // stages) & 1, dy_ring, x_ring, full, True)
        mbarrier.arrive(empty.index((i + stages - 1) % stages), count=1)
    return acc, i + 1


@gluon.jit
def _product(acc, stage, parity, dy_ring, x_ring, full, MORE: gl.constexpr):
    """Start the product of a stage, once it is there, and wait for the one before it."""
    mbarrier.wait(full.index(stage), parity)
    acc = warpgroup_mma(dy_ring.index(stage).permute((1, 0)), x_ring.index(stage), acc, is_async=True, use_acc=MORE)
    return warpgroup_mma_wait(1, deps=(acc,))


@gluon.jit
def halves(x, axis: gl.constexpr, layout: gl.constexpr):
    """A tile cut in two along `axis`: only a renaming of registers, which the compiler is made to prove."""
    if axis == 1:
        a, b = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
    else:
        a, b = x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute([1, 2, 0]).split()
    return gl.convert_layout(a, layout, assert_trivial=True), gl.convert_layout(b, layout, assert_trivial=True)
