"""How a rule is launched: on a stored gradient, or on the factors of a weight gradient that is never stored."""

from lightning_memopt.kernels.dispatch import (
    Factors,
    Kernel,
    apply_factors,
    apply_gradient,
    apply_gradients,
    apply_slabs,
    check_kernel,
)
from lightning_memopt.kernels.embedding import apply_embedding, embedding_gradient
from lightning_memopt.kernels.update import Rounding, Update

__all__ = [
    "Factors",
    "Kernel",
    "Rounding",
    "Update",
    "apply_embedding",
    "apply_factors",
    "apply_gradient",
    "apply_gradients",
    "apply_slabs",
    "check_kernel",
    "embedding_gradient",
]
