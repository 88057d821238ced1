"""The process groups that gradients travel in: of their own, beside those of FSDP2.

NCCL runs what is sent within one group in the order it was issued. FSDP2 gathers the weights of the next block while
one is computed, which takes about as long; factors sent in the same group would arrive only after all of that, and
every update, and the backward pass with it, would wait. A group of their own has its own queue, and the same ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_memopt.backward.exchange import Ranks


def ranks_of(mesh: DeviceMesh, timeout: timedelta) -> Ranks:
    """Who trains together on a mesh, with new groups. All ranks must call it at the same time.

    Args:
        mesh: Of all ranks: of one dimension, or replicate × shard.
        timeout: Of every collective.
    """
    grid: list[list[int]] = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
    replicas, shards, rank = len(grid), len(grid[0]), dist.get_rank()
    group = _group_of([list(range(replicas * shards))], timeout)
    if replicas == 1:
        return Ranks(group, group, None, shards, shards, grid[0].index(rank))
    row = next(row for row in grid if rank in row)
    return Ranks(
        group=group,
        shard_group=_group_of(grid, timeout),
        replica_group=_group_of(list(zip(*grid, strict=True)), timeout),
        size=replicas * shards,
        shards=shards,
        index=row.index(rank),
    )


def _group_of(members: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup:
    """The group that this rank is in, of those that are made of all `members`."""
    rank, mine = dist.get_rank(), None
    for ranks in members:
        group = dist.new_group(list(ranks), timeout, pg_options=_options(timeout))
        mine = group if rank in ranks else mine
    assert mine is not None
    return mine


def _options(timeout: timedelta) -> Any:
    """On GPUs the few multiprocessors that a collective takes are given to it before a computation that waits."""
    if dist.get_backend() != dist.Backend.NCCL:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout
    return options
