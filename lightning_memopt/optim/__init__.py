"""Optimizers of this package that torch does not have."""

from lightning_memopt.optim.lion import Lion

__all__ = ["Lion"]
