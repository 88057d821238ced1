"""Which kernel takes an update: the one place that looks at device, dtype and the user's choice.

``reference``  plain torch on the whole gradient; any device and dtype.
``two_pass``   dW of a few rows at a time in a small scratch, each slab consumed before the next is formed.
``fused``      dW tiles consumed in registers; needs a GPU.
``auto``       the fastest exact one for device, shape and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Literal

import torch
from torch import Tensor

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.kernels import reference, sparse
from lightning_memopt.kernels.batches import Batches
from lightning_memopt.kernels.memory import factors_key, gradient_key
from lightning_memopt.kernels.slabs import Factors, finite, slab_rows, slabs
from lightning_memopt.kernels.sparse import has_triton
from lightning_memopt.kernels.update import Update

Kernel = Literal["auto", "reference", "two_pass", "fused"]


def apply_gradient(update: Update, grad: Tensor, kernel: Kernel) -> bool:
    """Take one step on a stored gradient of the weight's shape.

    Returns:
        False where the gradient was non-finite and nothing was written. Kernels that cannot tell without waiting for
        the device return True and set ``update.nonfinite``.
    """
    if update.active is not None:
        return sparse.apply(update, (), grad, kernel)
    if update.memory is not None:
        repeat = update.memory.recall(update, gradient_key(grad, kernel))
        if repeat is not None and repeat(grad):
            return True
    if in_triton(update, kernel):
        from lightning_memopt.kernels import gpu

        gpu.apply_gradient(update, grad, kernel)
        return True
    return reference.apply_gradient(update, grad)


def apply_gradients(
    updates: Sequence[Update], grads: Sequence[Tensor], kernel: Kernel, batches: Batches
) -> Sequence[bool]:
    """Take one step on each of many stored gradients, in as few launches as there are kinds of them.

    Args:
        updates: Of weights that are not sparse.
        grads: The gradient of each.
        kernel: As for one.
        batches: What is remembered of sets of updates that came before.

    Returns:
        For each update, what `apply_gradient` returns for it, which also leaves the same bits.
    """
    taken: Set[int] = frozenset()
    if in_triton(updates[0], kernel):
        from lightning_memopt.kernels import gpu

        taken = gpu.apply_batches(updates, grads, kernel, batches)
    pairs = zip(updates, grads, strict=True)
    return [i in taken or apply_gradient(update, grad, kernel) for i, (update, grad) in enumerate(pairs)]


def check_kernel(kernel: Kernel, device: torch.device) -> None:
    """Refuse a kernel that the device cannot run, at set-up.

    Raises:
        UnsupportedError: ``fused`` without a CUDA device or without Triton.
    """
    if kernel != "fused":
        return
    if device.type != "cuda":
        raise UnsupportedError(
            f"kernel='fused' needs a CUDA device, not '{device.type}'; set kernel='auto', which takes what fits."
        )
    if not has_triton():
        raise UnsupportedError("kernel='fused' needs Triton: pip install triton, or set kernel='auto'.")


def in_triton(update: Update, kernel: Kernel) -> bool:
    """Whether one of the Triton kernels takes this update."""
    if kernel == "reference" or not update.weight.is_cuda or not has_triton():
        return False
    from lightning_memopt.kernels import gpu

    return gpu.supports(update)


def apply_factors(update: Update, factors: Sequence[Factors], grad: Tensor | None, kernel: Kernel) -> bool:
    """Take one step on dW = sum of dYᵀ x over `factors`, plus `grad` if autograd holds a part of the sum.

    Returns:
        As `apply_gradient`.
    """
    if update.active is not None:
        return sparse.apply(update, factors, grad, kernel)
    if update.memory is not None and grad is None and len(factors) == 1:
        dy, x = factors[0]
        repeat = update.memory.recall(update, factors_key(dy, x, kernel))
        if repeat is not None and repeat(dy, x):
            return True
    if in_triton(update, kernel):
        from lightning_memopt.kernels import gpu

        gpu.apply_factors(update, factors, grad, kernel)
        return True
    rows, columns = update.weight.shape
    step = rows if kernel == "reference" else slab_rows(columns, update.weight.device)
    dtype = reference.compute_dtype(update.weight)
    if step < rows and not finite(factors, grad, dtype, step, update.rule.limit):
        return False
    for start, stop, slab in slabs(factors, grad, dtype, step):
        if not reference.apply_gradient(update.rows(start, stop), slab):
            return False
    return True


def apply_slabs(update: Update, slabs: Iterable[tuple[int, int, Tensor]], kernel: Kernel) -> bool:
    """Take one step on a gradient that comes in parts: (first row, row past the last, gradient of these rows).

    Returns:
        As `apply_gradient`, over all parts.
    """
    if update.active is not None:
        return sparse.apply_slabs(update, slabs, kernel)
    finite = True
    for start, stop, slab in slabs:
        finite &= apply_gradient(update.rows(start, stop), slab, kernel)
    return finite
