"""What an optimizer must know of sharded parameters: FSDP2's by rows (DTensor) and FSDP1's flat ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_memopt.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def sharded(tensor: Tensor) -> DTensor | None:
    """`tensor` if it is a DTensor."""
    # A DTensor exists only where its module has been imported, which takes a second.
    if type(tensor) is Tensor or not hasattr(tensor, "device_mesh"):
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, by reference."""
    distributed = sharded(tensor)
    return tensor if distributed is None else distributed.to_local()


def _split_dim(place: Placement) -> int | None:
    """The dimension that a placement splits; that of FSDP2 over tensor parallelism is no `Shard` by its own account."""
    return getattr(place, "dim", None)


def placed_as(param: Tensor, tensor: Tensor) -> Tensor:
    """A gradient or moment as `param` is placed: where ranks hold addends of it, or other parts, they exchange these.

    All ranks must call it for the same parameters, in the same order.
    """
    wanted, found = sharded(param), sharded(tensor)
    if wanted is None or found is None or found.placements == wanted.placements:
        return tensor
    return found.redistribute(placements=wanted.placements)


def by_rows(param: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros of `shape`, whose first dimension is that of `param`, sharded as `param` is.

    Raises:
        UnsupportedError: `param` is sharded, but not by rows only.
    """
    distributed = sharded(param)
    if distributed is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=param.device)
    from torch.distributed.tensor import DTensor

    placements = distributed.placements
    if any(place.is_partial() or _split_dim(place) not in (None, 0) for place in placements):
        raise UnsupportedError(
            f"a weight of shape {tuple(param.shape)} is sharded as {placements}; the blocks of Gefen and AdamW8bit lie "
            "along rows, so weights can be sharded by rows only (FSDP2's default), not by columns (tensor parallelism)."
        )
    rows = distributed.to_local().shape[:1]
    part = torch.zeros((*rows, *shape[1:]), dtype=dtype, device=param.device)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        part, distributed.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def offset(param: Tensor) -> int:
    """Index, in the whole parameter, of the first element of this rank's rows."""
    distributed = sharded(param)
    if distributed is None:
        return 0
    return _offset(distributed.shape, distributed.device_mesh, distributed.placements)


@lru_cache(1024)
def _offset(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    with torch.device("cpu"):  # of rows of rows torch makes a list, in tensors
        _, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    return start[0] * prod(shape[1:]) if start else 0


def sum_over_ranks(param: Tensor, values: Tensor) -> Tensor:
    """Sum of the ranks' `values` over those that hold different rows of `param`; in place."""
    distributed = sharded(param)
    if distributed is not None:
        mesh = distributed.device_mesh
        for dim, place in enumerate(distributed.placements):
            if _split_dim(place) is not None:
                torch.distributed.all_reduce(values, group=mesh.get_group(dim))
    return values


def is_flat_shard(param: Tensor) -> bool:
    """Whether `param` is a piece of a flattened parameter of FSDP1, which has lost its rows."""
    return param.dim() == 1 and getattr(param, "_fsdp_flattened", False)


def flattened_shapes(module: nn.Module) -> dict[nn.Parameter, torch.Size]:
    """The shapes that parameters had before FSDP1 made flat shards of them, as far as they are known.

    Each unit knows those of its own parameters if it keeps them (``use_orig_params``). Lightning wraps the
    LightningModule itself, so the outermost unit is its Trainer's.
    """
    if not any(is_flat_shard(param) for param in module.parameters()):
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel

    outermost = getattr(getattr(module, "_trainer", None), "model", None) or module
    shapes: dict[nn.Parameter, torch.Size] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(outermost):
        flat = unit._flat_param
        if flat is not None and flat._params is not None:
            shapes |= zip(flat._params, flat._shapes, strict=True)
    return shapes


def as_rows(param: Tensor) -> Tensor:
    """`param`, or a flat shard as a single row."""
    return param.view(1, -1) if is_flat_shard(param) else param
