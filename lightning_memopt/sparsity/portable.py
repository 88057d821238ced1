"""The state of sharded sparse weights in checkpoints: a form that any number of ranks writes alike and can read.

Ranks hold the active weights of their own rows, each another number of them. For a checkpoint the values of a layer,
all ranks' one after the other, are dealt out evenly, so that an entry is a DTensor of the shape it has on one device:

    moments       [1, active]           sharded along the second dimension
    smet_cohort   [active]              sharded
    smet_mask     [rows, columns / 8]   sharded by rows; a row begins with a new byte (`sparsity.bits.by_rows`)
    of blocks     [rows, blocks]        sharded by rows, as they always are (`sparsity.spans`)
    others        the same on all ranks

Only the mask says whose a value is, so it is read first; then the values go back to their rows. The index is made anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardedAlong
from torch.optim import Optimizer

from lightning_memopt.optim.shards import local, sharded
from lightning_memopt.sparsity.bits import by_rows, count, cut, flat_bits
from lightning_memopt.sparsity.shard import Shard
from lightning_memopt.sparsity.state import COHORT, INDEX, MASK

State = dict[str, Any]


def is_sparse(entries: Mapping[str, Any]) -> bool:
    """Whether a state, or what is known of a saved one, is that of a sparse weight."""
    return MASK in entries


def is_compact(key: str, shape: Sequence[int], active: int) -> bool:
    """Whether an entry of a sparse weight's state has a value for each of so many active weights."""
    return key == COHORT or (key != MASK and tuple(shape) == (1, active))


@contextmanager
def portable(optimizer: Optimizer) -> Iterator[None]:
    """Inside, states of sharded sparse weights have the form of checkpoints."""
    kept: list[tuple[State, State]] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if is_sparse(state) and sharded(param) is not None:
                kept.append((state, dict(state)))
                changed = _spread(param, state)
                state.clear()
                state.update(changed)
    try:
        yield
    finally:
        for state, own in kept:
            state.clear()
            state.update(own)


def _spread(param: DTensor, state: State) -> State:
    shard, active = Shard.of(param), len(state[COHORT])
    rows, columns = local(param.detach()).shape
    result = {key: value for key, value in state.items() if key != INDEX}
    for key, value in result.items():
        if key == MASK:
            bits = by_rows(value, rows, columns)
            result[key] = _dtensor(param, bits, (param.shape[0], bits.shape[1]), 0)
        elif isinstance(value, Tensor) and is_compact(key, value.shape, active):
            shape = (*value.shape[:-1], sum(shard.each(active)))
            own = shard.even(value.view(-1))
            result[key] = _dtensor(param, own.view(*value.shape[:-1], -1), shape, len(shape) - 1)
    return result


def _placements(param: DTensor, dim: int) -> list[Placement]:
    return [ShardedAlong(dim) if place.is_shard() else Replicate() for place in param.placements]


def _dtensor(param: DTensor, own: Tensor, shape: tuple[int, ...], dim: int) -> DTensor:
    placements = _placements(param, dim)
    stride = tuple(torch.Size(shape[i + 1 :]).numel() for i in range(len(shape)))
    return DTensor.from_local(
        own, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def even_room(param: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> DTensor:
    """A tensor to read this rank's even share of an entry into."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(param, DTensor)
    last = len(shape) - 1
    own, _ = compute_local_shape_and_global_offset(shape, param.device_mesh, _placements(param, last))
    return _dtensor(param, torch.empty(own, dtype=dtype, device=local(param).device), shape, last)


def from_even(param: Tensor, saved: Mapping[str, Any]) -> State:
    """This rank's state, from even shares of the values and this rank's rows of the mask."""
    shard = Shard.of(param)
    bits = flat_bits(saved[MASK], param.shape[1])
    own, share = count(bits, shard.count), len(saved[COHORT])
    result = {**saved, MASK: bits}
    for key, value in saved.items():
        if isinstance(value, Tensor) and is_compact(key, value.shape, share):
            values = shard.uneven(value.view(-1), own)
            result[key] = values if key == COHORT else values.view(1, -1)
    return result


def from_whole(param: Tensor, saved: Mapping[str, Any]) -> State:
    """This rank's state, from that of one device."""
    shard = Shard.of(param)
    bits, active = flat_bits(saved[MASK], param.shape[1]), len(saved[COHORT])
    mine = cut(bits, shard.first, shard.first + shard.count)
    first = count(bits, shard.first)
    last = first + count(mine, shard.count)
    result = {**saved, MASK: mine}
    for key, value in saved.items():
        if isinstance(value, Tensor) and is_compact(key, value.shape, active):
            result[key] = value[..., first:last]
        elif isinstance(value, Tensor) and value.dim() == 2 and key != MASK:  # of the blocks in each row
            columns = param.shape[1]
            result[key] = value[shard.first // columns : (shard.first + shard.count) // columns]
    return result
