"""FSDP2's gathering of weights, done by copy engines: out of other ranks' memory right into the gathered weight.

FSDP2 packs a unit's shards, runs NCCL's all-gather, and copies what arrived into the parameters: three passes over the
memory, a collective that holds a fifth of the multiprocessors while the layers of the unit before it run, and about a
millisecond of the host's time, twice per unit and step. Where all shards lie in windows
(`lightning_memopt.backward.windows`) a gathered parameter is filled by one copy from each rank.

What FSDP2 decides stays its own: when a unit is gathered and freed, and everything around it. Two methods of its group
of parameters are replaced, which start the gathering and wait for it, and a third one is added to, which gives up what
was gathered in vain. The order of things is NCCL's: copies begin when all ranks have come to the same gathering, and
nothing after `wait` runs before all have read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

from lightning_memopt.backward.windows import ALIGNED, Window


def gather_by_copies(groups: Iterable[Any], timeout: timedelta) -> int:
    """Let units be gathered by copies from now on; all ranks together.

    Args:
        groups: The parameters of each unit, as FSDP2 keeps them, now sharded.
        timeout: How long a device waits for the others.

    Returns:
        Bytes of this rank's weights that moved out of torch's caching allocator.
    """
    return sum(Gathering(group, timeout).size for group in groups if _as_usual(group))


def by_copies(groups: Iterable[Any]) -> bool:
    """Whether all units are gathered so."""
    return all("unshard" in vars(group) for group in groups if group.fsdp_params)


def gather_by_collectives(groups: Iterable[Any]) -> None:
    """Leave units to FSDP2 again, and give the windows back."""
    for group in groups:
        for method in ("unshard", "wait_for_unshard", "finalize_backward"):
            vars(group).pop(method, None)


class Gathering:
    """Gathers one unit.

    Args:
        group: Its parameters, as FSDP2 keeps them. Their shards move into a window.
        timeout: How long a device waits for the others.

    Attributes:
        size: Bytes of the window.
    """

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self._group, self._params = group, list(group.fsdp_params)
        shards = [param._sharded_param_data for param in self._params]
        starts, self.size = [], 0
        for shard in shards:
            starts.append(self.size)
            self.size += -(-shard.nbytes // ALIGNED) * ALIGNED
        process_group: dist.ProcessGroup = group.mesh_info.shard_process_group
        self._window = window = Window(self.size, process_group, group.device, timeout)
        # By rank, its shard of each parameter.
        all_shards = [
            [part[start : start + own.nbytes].view(own.dtype) for start, own in zip(starts, shards, strict=True)]
            for part in window.parts
        ]
        self._mine = all_shards[window.rank]
        self._addresses = [shard.data_ptr() for shard in self._mine]
        parts = [self._parts(param, mine) for param, mine in zip(self._params, self._mine, strict=True)]
        self._into = [own[rank] for rank in window.nearest_last for own in parts]
        self._out_of = [shard for rank in window.nearest_last for shard in all_shards[rank]]
        self._move_in()
        group.unshard, group.wait_for_unshard, group.finalize_backward = self.start, self.wait, self.finalize

    def _parts(self, param: Any, shard: Tensor) -> Sequence[Tensor]:
        """By rank, its part of a gathered parameter's memory, which is there only while gathered."""
        ranks = len(self._window.parts)
        param.init_all_gather_outputs([shard.numel()], [shard.dtype], ranks, shard.device)
        param.alloc_all_gather_outputs()  # of an earlier run, it may be freed
        (whole,) = param.all_gather_outputs
        # `data`, as autograd must not take filling it for a change of the weight.
        parts = whole.data.view(ranks, -1).unbind()
        param.free_unsharded_param()
        return parts

    @torch.no_grad()
    def _move_in(self) -> None:
        """Bring shards into the window that are not there: all at first, and those that were replaced since."""
        for param, mine, address in zip(self._params, self._mine, self._addresses, strict=True):
            if param._sharded_param_data.data_ptr() == address:
                continue
            mine.copy_(param._sharded_param_data)
            param._sharded_param_data = mine
            rows = mine.view(param.padded_sharded_param_size)[: param.sharded_size[0]]
            param.sharded_param._local_tensor = rows

    def start(self, async_op: bool = False) -> None:
        """Begin to gather; FSDP2's ``unshard``.

        Args:
            async_op: Whether to do so in the current stream, as FSDP2 does then.
        """
        group = self._group
        if group._all_gather_result is not None or group.is_unsharded:
            return
        before_backward = type(group._training_state).PRE_BACKWARD
        if not group.unshard_in_backward and group._training_state == before_backward:
            return
        self._move_in()
        if group.device.type == "cpu":
            self._copy()
            group._all_gather_result = _result(self._mine[0], None)
            return
        current = torch.cuda.current_stream()
        _, stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        # Shards may have been updated in the current stream, and the memory of a unit that was freed is taken again:
        # what used it was started there.
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._copy()
            group._all_gather_result = _result(self._mine[0], stream.record_event())

    @torch.no_grad()
    def _copy(self) -> None:
        for param in self._params:
            param.alloc_all_gather_outputs()
        self._window.read(self._into, self._out_of)

    def wait(self) -> None:
        """Let the current stream wait for what was started, and layers see it; FSDP2's ``wait_for_unshard``."""
        group = self._group
        result = group._all_gather_result
        if result is None:
            return
        if result.all_gather_event is not None:
            torch.cuda.current_stream().wait_event(result.all_gather_event)
        for param in self._params:
            param.init_unsharded_param()
        group._to_unsharded()
        group._all_gather_result = None

    def finalize(self) -> None:
        """The backward pass is over; FSDP2's ``finalize_backward``.

        It drops what was gathered ahead for a unit without backward pass, such as the last frozen one. There that is a
        buffer of its own, here the memory of the gathered parameters.
        """
        in_vain = self._group._all_gather_result is not None
        type(self._group).finalize_backward(self._group)
        if in_vain:
            for param in self._params:
                param.free_unsharded_param()


def _result(some: Tensor, event: Any) -> AllGatherResult:
    """What FSDP2 keeps of a gathering that was not waited for."""
    return AllGatherResult(some, event, None, [], [], [])


def _as_usual(group: Any) -> bool:
    """Whether a gathered unit is nothing but its shards side by side."""
    process_group = getattr(group.mesh_info, "shard_process_group", None)
    if not group.fsdp_params or process_group is None or process_group.size() == 1:
        return False
    if type(group._all_gather_comm).__name__ != "DefaultAllGather" or group.mp_policy.param_dtype is not None:
        return False
    if group.post_forward_mesh_info not in (None, group.mesh_info):
        return False
    if len({param._sharded_param_data.dtype for param in group.fsdp_params}) > 1:
        return False  # torch.save refuses tensors of several dtypes in one memory
    return all(_plain(param) for param in group.fsdp_params)


def _plain(param: Any) -> bool:
    shard: Tensor = param._sharded_param_data
    extended = hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather")
    return param.fsdp_placement.dim == 0 and not extended and not param.offload_to_cpu and shard.numel() > 0
