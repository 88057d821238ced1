"""Memory of each rank that the other ranks of its host can read: copied from by copy engines, not by a collective.

A collective of NCCL holds 24 or 32 of an H200's 132 multiprocessors for as long as it runs, and takes the host half a
millisecond to start. A copy out of another device's memory is done by a copy engine, which no kernel misses. What is
left of a collective is to agree on when to read: a barrier between the devices, before reading (all have written) and
after it (none reads any more).

On GPUs such memory is torch's symmetric memory, which lies outside of its caching allocator. On CPUs, where it serves
tests, it is a file that all processes map.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

# Where a tensor in a window may begin: as in memory that torch allocates.
ALIGNED = 512

_windows: WeakSet[Window] = WeakSet()


class Window:
    """As many bytes of every rank of a group, readable by all of them. All ranks must create it together.

    Args:
        size: Bytes of each rank.
        group: Who takes part, all on one host.
        device: Where this rank's bytes are.
        timeout: How long a barrier waits for the others.

    Attributes:
        size: Bytes of each rank.
        rank: This rank's number in the group.
        parts: uint8 [size] of every rank; one's own is for writing, the others' for reading.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self.size, self.rank, self._group, self._device = size, group.rank(), group, device
        self._handle: Any = None
        self._timeout = int(timeout.total_seconds() * 1000)
        _windows.add(self)
        if device.type == "cpu":
            self.parts = _mapped(size, group)
            return
        memory = _symmetric()
        mine = _beside_cache(partial(memory.empty, size, dtype=torch.uint8, device=device))
        # Signals of the barrier lie in it as well. They are cleared in the default stream, behind all that waits there:
        # one that another rank sets before would be lost, and the barrier never end. And where the others' signals are
        # is uploaded there.
        torch.cuda.synchronize(device)
        self._handle = memory.rendezvous(mine, group)
        torch.cuda.synchronize(device)
        self.parts = [
            mine if rank == self.rank else self._handle.get_buffer(rank, (size,), torch.uint8)
            for rank in range(group.size())
        ]

    def barrier(self) -> None:
        """The current stream goes on once the current streams of all ranks have come here; the host does not wait.

        A device that waits for longer than the time-out ends with an error.
        """
        if self._handle is None:
            dist.barrier(self._group)
        else:
            self._handle.barrier(0, self._timeout)

    def read(self, into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
        """Copy parts of windows once all ranks have come here, in the current stream; then none reads any more.

        Args:
            into: Contiguous tensors of this rank.
            out_of: For each, an equally long part of any rank's window.
        """
        self.barrier()
        for whereto, part in zip(into, out_of, strict=True):
            # One by one: only that is done by copy engines, where a `foreach` is a kernel.
            whereto.copy_(part, non_blocking=True)
        self.barrier()

    @property
    def nearest_last(self) -> Sequence[int]:
        """All ranks, this one last: so each reads from another one at any time."""
        size = len(self.parts)
        return [(self.rank + step) % size for step in range(1, size + 1)]


def held(device: torch.device) -> int:
    """Bytes of this process's windows on a GPU, which ``torch.cuda.memory_allocated`` does not count."""
    return sum(window.size for window in _windows if window._device == device and device.type == "cuda")


def why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why ranks cannot read each other's memory, or None; the same on all ranks, which must ask together."""
    index = device.index or 0
    said = _told((_host(), index), group)
    if len({host for host, _ in said}) > 1:
        return "the ranks are on several hosts"
    if device.type == "cuda":
        others = {other for _, other in said} - {index}
        seen = len(others) == len(said) - 1 and max(others, default=0) < torch.cuda.device_count()
        if not all(_told(seen, group)):
            return "ranks do not see the devices of the others"
        if not all(_told(all(torch.cuda.can_device_access_peer(index, other) for other in others), group)):
            return "the devices have no direct connection"
    elif device.type != "cpu":
        return f"there is no such memory for {device.type}"
    return any_reason(_failure(group, device), group)


def any_reason(mine: str | None, group: dist.ProcessGroup) -> str | None:
    """That of the first rank that has one; the same on all ranks, which must ask together."""
    return next((reason for reason in _told(mine, group) if reason is not None), None)


def _failure(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """What goes wrong in a trial: such memory may be forbidden in a container."""
    try:
        window = Window(ALIGNED, group, device, timedelta(seconds=60))
        window.parts[window.rank].fill_(window.rank)
        window.barrier()
        read = [int(part[0]) for part in window.parts]
        window.barrier()
    except (RuntimeError, ImportError, OSError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None if read == list(range(group.size())) else "other bytes were read than written"


def _told(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank says, by rank."""
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, mine, group=group)
    return said


def _host() -> str:
    """What is equal for processes of one host, and of one only."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _beside_cache(allocate: Callable[[], Tensor]) -> Tensor:
    """Memory beside torch's caching allocator, which gives up what it holds unused only for allocations of its own."""
    try:
        return allocate()
    except RuntimeError:
        torch.cuda.empty_cache()
        return allocate()


def _symmetric() -> Any:
    # Only copies and barriers are used, so nothing is ever registered for multicast.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def _mapped(size: int, group: dist.ProcessGroup) -> list[Tensor]:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(size)
        paths = _told(file.name, group)
        parts = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
        dist.barrier(group)  # files are gone then, their memory is not
    return parts
