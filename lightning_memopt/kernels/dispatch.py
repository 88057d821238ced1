"""Which kernel takes an update: the one place that looks at device, dtype and the user's choice.

``reference``  plain torch on the whole gradient; any device and dtype.
``two_pass``   dW of a few rows at a time in a small scratch, each slab consumed before the next is formed.
``fused``      dW tiles consumed in registers; needs a GPU.
``auto``       the fastest exact one for device, shape and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from torch import Tensor

from lightning_memopt.kernels import reference, sparse
from lightning_memopt.kernels.slabs import SLAB_ELEMENTS, Factors, slabs
from lightning_memopt.kernels.update import Update

Kernel = Literal["auto", "reference", "two_pass", "fused"]

# Rows of an update that runs in plain torch, because a storage learns from it, are taken this many weights at a time.
LEARN_ELEMENTS = 1 << 22


def apply_gradient(update: Update, grad: Tensor, kernel: Kernel) -> bool:
    """Take one step on a stored gradient of the weight's shape.

    Returns:
        False where the gradient was non-finite and nothing was written. Kernels that cannot tell without waiting for
        the device return True and set ``update.nonfinite``.
    """
    if update.active is not None:
        return sparse.apply(update, (), grad, kernel)
    if learns(update):
        finite, step = True, max(1, LEARN_ELEMENTS // max(1, grad[:1].numel()))
        for start in range(0, len(grad), step):
            stop = min(start + step, len(grad))
            finite &= reference.apply_gradient(update.rows(start, stop), grad[start:stop])
        return finite
    return reference.apply_gradient(update, grad)


def learns(update: Update) -> bool:
    """Whether a storage wants to see the gradient, for which the update runs in plain torch; completes the state."""
    return any([storage.learns(update.state) for storage in update.storage])  # a list: each completes the state


def apply_factors(update: Update, factors: Sequence[Factors], grad: Tensor | None, kernel: Kernel) -> bool:
    """Take one step on dW = sum of dYᵀ x over `factors`, plus `grad` if autograd holds a part of the sum.

    Returns:
        As `apply_gradient`; `two_pass` leaves out only the rows of a slab that held a non-finite value.
    """
    if update.active is not None:
        return sparse.apply(update, factors, grad, kernel)
    rows, columns = update.weight.shape
    step = rows if kernel == "reference" else max(1, SLAB_ELEMENTS // columns)
    if learns(update):
        step = min(step, max(1, LEARN_ELEMENTS // columns))
    dtype = reference.compute_dtype(update.weight)
    finite = True
    for start, stop, slab in slabs(factors, grad, dtype, step):
        finite &= reference.apply_gradient(update.rows(start, stop), slab)
    return finite


def apply_slabs(update: Update, slabs: Iterable[tuple[int, int, Tensor]], kernel: Kernel) -> bool:
    """Take one step on a gradient that comes in parts: (first row, row past the last, gradient of these rows).

    Returns:
        As `apply_gradient`, over all parts.
    """
    in_torch = learns(update)
    finite = True
    for start, stop, slab in slabs:
        rows = update.rows(start, stop)
        finite &= reference.apply_gradient(rows, slab) if in_torch else apply_gradient(rows, slab, kernel)
    return finite
