"""Optimizers of this package that torch does not have."""

from lightning_memopt.optim.adamw8bit import AdamW8bit
from lightning_memopt.optim.gefen import Gefen
from lightning_memopt.optim.lion import Lion

__all__ = ["AdamW8bit", "Gefen", "Lion"]
