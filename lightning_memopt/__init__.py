"""Fused, quantised and sparse training for Lightning: the optimizer step inside the backward pass.

Importing the package registers the strategies ``"forge"`` and ``"forge_fsdp"`` with ``lightning.pytorch``.
"""

from lightning_memopt.callbacks.smet import SMET
from lightning_memopt.errors import MemOptError, NonFiniteError, UnsupportedError, UpdateError
from lightning_memopt.optim import AdamW8bit, Gefen, Lion
from lightning_memopt.optim.gefen import gefen
from lightning_memopt.planning import plan
from lightning_memopt.strategies import ForgeFSDPStrategy, ForgeStrategy, fused_step, register

__version__ = "0.1.0"
__all__ = [
    "SMET",
    "AdamW8bit",
    "ForgeFSDPStrategy",
    "ForgeStrategy",
    "Gefen",
    "Lion",
    "MemOptError",
    "NonFiniteError",
    "UnsupportedError",
    "UpdateError",
    "fused_step",
    "gefen",
    "plan",
]

register()
