"""The process groups that gradients travel in: of their own, beside those of FSDP2.

NCCL runs what is sent within one group in the order it was issued. FSDP2 gathers the weights of the next block while
one is computed, which takes about as long; factors sent in the same group would arrive only after all of that, and
every update, and the backward pass with it, would wait. A group of their own has its own queue, and the same ranks.

Groups are made once per process and used by every run after, as the threads of a gloo group never rest and nothing ends
them. After a run that broke off, what it sent may still be under way in its groups, so the next run gets new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_memopt.backward.exchange import Ranks
from lightning_memopt.backward.outbox import Outbox


@dataclass
class _Kept:
    """Groups of this process.

    Attributes:
        world: The default group that they belong to.
        groups: By backend, timeout and the members of all groups made together, this rank's own.
        meshes: By device type, shape and names of dimensions.
        broken: A run of this rank broke off since they were made.
    """

    world: dist.ProcessGroup | None = None
    groups: dict[tuple[Any, ...], dist.ProcessGroup] = field(default_factory=dict)
    meshes: dict[tuple[Any, ...], DeviceMesh] = field(default_factory=dict)
    broken: bool = False


_kept = _Kept()


def spoil() -> None:
    """A run of this rank broke off."""
    _kept.broken = True


def renew(device: torch.device) -> None:
    """Before a run, on all ranks together: forget groups and meshes if any rank's run broke off."""
    broken = torch.tensor(int(_kept.broken), device=device)
    dist.all_reduce(broken, op=dist.ReduceOp.MAX)
    if broken.item() or _kept.world is not dist.group.WORLD:
        _kept.groups.clear()
        _kept.meshes.clear()
    _kept.world, _kept.broken = dist.group.WORLD, False


def kept_mesh(device_type: str, dimensions: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks with these names and sizes of dimensions, which has groups, too; `renew` comes first."""
    key = (device_type, *dimensions.items())
    if key not in _kept.meshes:
        names = tuple(dimensions)
        _kept.meshes[key] = init_device_mesh(device_type, tuple(dimensions.values()), mesh_dim_names=names)
    return _kept.meshes[key]


def kept_group(members: Sequence[Sequence[int]], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """The group that this rank is in, of those that are made of all `members`; `renew` comes first.

    Args:
        members: Ranks of each group; every rank in one of them.
        timeout: Of every collective.
        backend: By default that of the default group.
    """
    key = (backend, timeout, *(tuple(ranks) for ranks in members))
    if key not in _kept.groups:
        for ranks in members:
            options = None if backend else _options(timeout)
            group = dist.new_group(list(ranks), timeout, backend, pg_options=options)
            if dist.get_rank() in ranks:
                _kept.groups[key] = group
    return _kept.groups[key]


def ranks_of(mesh: DeviceMesh, timeout: timedelta, near: torch.device | None = None) -> Ranks:
    """Who trains together on a mesh. All ranks must call it at the same time.

    Args:
        mesh: Of all ranks: of one dimension, or replicate × shard.
        timeout: Of every collective.
        near: This rank's device if all ranks can read each other's memory. Weights and factors do not travel in groups
            then, so what else is sent needs no group of its own, whose buffers take 870 MiB on each of two H200s.
    """
    grid: list[list[int]] = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
    replicas, shards, rank = len(grid), len(grid[0]), dist.get_rank()
    if near is not None and replicas == 1:
        group = mesh.get_group(0)
        return Ranks(group, group, None, shards, shards, grid[0].index(rank), Outbox(group, near, timeout))
    group = kept_group([list(range(replicas * shards))], timeout)
    if replicas == 1:
        return Ranks(group, group, None, shards, shards, grid[0].index(rank))
    row = next(row for row in grid if rank in row)
    return Ranks(
        group=group,
        shard_group=kept_group(grid, timeout),
        replica_group=kept_group(list(zip(*grid, strict=True)), timeout),
        size=replicas * shards,
        shards=shards,
        index=row.index(rank),
        outbox=None if near is None else Outbox(group, near, timeout),
    )


def _options(timeout: timedelta) -> Any:
    """On GPUs the few multiprocessors that a collective takes are given to it before a computation that waits."""
    if dist.get_backend() != dist.Backend.NCCL:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout
    return options
