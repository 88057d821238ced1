"""Which kernel takes an update of a sparse weight: plain torch, Triton on slabs, or Triton fused with the matmul.

The fused kernel is portable Triton, whose matmul is slower than the vendor's, so it runs only where it is asked for; it
pays where block masks leave tiles empty. On the step whose gradient decides where to grow, slabs of it are looked at,
so that one is not fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from lightning_memopt.errors import UpdateError
from lightning_memopt.kernels import sparse_reference
from lightning_memopt.kernels.slabs import Factors, equal_rows, pieces, slab_rows
from lightning_memopt.kernels.sparse_gradient import active_slabs, masked
from lightning_memopt.kernels.update import Update
from lightning_memopt.sparsity.bits import unpack

# Elements of a slab on a GPU: nearly every layer is one, as each slab costs the host a matmul and a launch, and smaller
# ones, which stay in cache, were slower on the GPU too. Fewer where plain torch looks at a slab as well, with some
# int64 for every weight.
SLAB_ELEMENTS, SEEN_ELEMENTS = 1 << 26, 1 << 22


def apply(update: Update, factors: Sequence[Factors], grad: Tensor | None, kernel: str) -> bool:
    """Take one step on dW = sum of dYᵀ x over `factors`, plus `grad`, at the active weights only.

    Returns:
        As `lightning_memopt.kernels.dispatch.apply_factors`.
    """
    rows, columns = update.weight.shape
    if kernel != "reference" and _in_triton(update):
        in_triton(update, factors, grad, _height(update), fused=kernel == "fused")
        return True
    _refuse_capture(update)
    step = rows if kernel == "reference" else slab_rows(columns, update.weight.device)
    return sparse_reference.apply(update, factors, grad, step)


def _height(update: Update) -> int:
    """Rows of a slab on a GPU."""
    assert update.active is not None
    rows, columns = update.weight.shape
    alone = update.active.stored is None and update.active.growth is None
    return equal_rows(rows, columns, SLAB_ELEMENTS if alone else SEEN_ELEMENTS)


def apply_slabs(update: Update, slabs: Iterable[tuple[int, int, Tensor]], kernel: str) -> bool:
    """Take one step on a gradient that comes in parts, in order and without gaps, and is known to be finite.

    Returns:
        As `lightning_memopt.kernels.dispatch.apply_slabs`.
    """
    assert update.active is not None
    if kernel != "reference" and _in_triton(update):
        _slabs_in_triton(update, slabs)
        return True
    _refuse_capture(update)
    return sparse_reference.apply_slabs(update, masked(slabs, update.active.bits))


def _refuse_capture(update: Update) -> None:
    """Plain torch goes by sizes that depend on the mask, and by scalars of the host.

    Raises:
        UpdateError: A CUDA graph is being captured, which would hold those of this step for good.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UpdateError(
            f"the update of {update.name} runs in plain torch, whose sizes and scalars follow the mask; docs/smet.md "
            "says which do. Leave cuda_graph out, or use cuda_graph='auto', which then runs eagerly."
        )


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def _in_triton(update: Update) -> bool:
    if not update.weight.is_cuda or update.row is None or not has_triton():
        return False
    if update.memory is not None and update.memory.look(update):
        return True  # as in the step before
    from lightning_memopt.kernels import sparse_arguments

    return sparse_arguments.supports(update)


def in_triton(update: Update, factors: Sequence[Factors], grad: Tensor | None, rows: int, fused: bool) -> None:
    """Take one step by Triton kernels; non-finite elements are left out and set ``update.nonfinite``."""
    from lightning_memopt.kernels import sparse_fused

    active, shape = update.active, tuple(update.weight.shape)
    assert active is not None
    if active.stored is not None:
        slabs = active_slabs(shape, active.bits, factors, grad, active.stored, torch.float32, rows)
        _slabs_in_triton(update, ((start, stop, slab) for start, stop, slab, _ in slabs))
    elif not factors and active.growth is None:
        assert grad is not None
        _slabs_in_triton(update, [(0, len(grad), grad)])
    elif fused and grad is None and active.growth is None and sparse_fused.fuses(update):
        sparse_fused.apply_factors(update, factors)
    else:
        _slabs_in_triton(update, pieces(factors, grad, torch.float32, rows))


def _slabs_in_triton(update: Update, slabs: Iterable[tuple[int, int, Tensor]]) -> None:
    from lightning_memopt.kernels import sparse_slab

    active, columns = update.active, update.weight.shape[1]
    assert active is not None
    for start, stop, slab in slabs:
        if active.growth is not None:
            mask = unpack(active.bits, start * columns, stop * columns)
            active.growth.add(update.offset + start * columns, slab.reshape(-1), mask)
        sparse_slab.apply(update, slab.view(-1, columns), start)
