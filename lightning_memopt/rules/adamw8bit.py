"""AdamW with 8-bit moments: AdamW's rule on another storage."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.optim.adamw8bit import AdamW8bit
from lightning_memopt.rules.adam import AdamWRule
from lightning_memopt.rules.base import Group
from lightning_memopt.rules.storage import Dense, Storage
from lightning_memopt.rules.storage_8bit import PositiveCodes, SignedCodes, rows_of

# Smaller tensors and vectors (biases, norms) keep float32 moments: they weigh nothing and are the most sensitive.
# So do short rows, where the scales would outweigh what the codes save.
MIN_ELEMENTS, MIN_COLUMNS = 4096, 16


class AdamW8bitRule(AdamWRule):
    """AdamW; the update uses the new moments before they are rounded."""

    optimizer: ClassVar[type[Optimizer]] = AdamW8bit

    def storage(self, param: Tensor, group: Group, dtype: torch.dtype) -> tuple[Storage, ...]:
        """Codes for matrices, float32 (whatever `dtype` is) for what is too small to gain."""
        if param.dim() < 2 or param.numel() < MIN_ELEMENTS or rows_of(param)[1] < MIN_COLUMNS:
            return (Dense("exp_avg", torch.float32), Dense("exp_avg_sq", torch.float32, slow=True))
        return (SignedCodes("exp_avg"), PositiveCodes("exp_avg_sq"))
