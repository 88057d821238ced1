"""Which of a module's parameters decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.optim.shards import flattened_shapes, is_flat_shard

# How FSDP1 names a piece of a whole unit, of matrices and vectors alike.
FLAT_PARAM = "_flat_param"


def decay_groups(module: nn.Module, no_decay: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices with the optimizer's own decay, the rest with none.

    Biases and norm scales have one dimension or none; pulling them to zero only hurts.

    Args:
        module: As it is when optimizers are made: a LightningModule knows its Trainer then.
        no_decay: Parts of names, or one, in any case, of matrices without decay. Where it is unknown what a flat shard
            of FSDP1 was before, its name alone tells.

    Raises:
        UnsupportedError: There is such a shard, and its name does not tell.
    """
    listed = (no_decay,) if isinstance(no_decay, str) else no_decay
    parts, shapes = tuple(part.lower() for part in listed), flattened_shapes(module)
    trainable = {param: name for name, param in module.named_parameters() if param.requires_grad}
    decays = {param: _decays(name.lower(), param, shapes, parts) for param, name in trainable.items()}
    groups: list[dict[str, Any]] = [
        {"params": [param for param in trainable if decays[param]]},
        {"params": [param for param in trainable if not decays[param]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _decays(name: str, param: nn.Parameter, shapes: Mapping[nn.Parameter, torch.Size], parts: tuple[str, ...]) -> bool:
    if any(part in name for part in parts):
        return False
    if not is_flat_shard(param) or param in shapes:
        return len(shapes.get(param, param.shape)) > 1
    if parts and not name.endswith(FLAT_PARAM):
        return True
    raise UnsupportedError(
        f"{name} is a flat piece of FullyShardedDataParallel (strategy 'fsdp'), and whether of matrices, which decay, "
        "or of vectors, which do not, cannot be known. Keep FSDPStrategy's use_orig_params=True and make the optimizer "
        "in configure_optimizers, or shard with 'forge_fsdp' or ModelParallelStrategy."
    )
