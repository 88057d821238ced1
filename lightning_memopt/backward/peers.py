"""What ranks tell each other on the host during a step: token counts, and that one of them failed.

Collectives on tensors must be issued by all ranks in one order and with sizes that fit. Autograd gives every rank the
same order if all run the same layers. Before each exchange the ranks announce which one comes and how many tokens they
have, so that a rank that ran other layers, or raised an error, stops all of them with a message instead of a hang.

The announcements go through a gloo group of their own: the host waits for the other hosts, never for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_memopt.backward.exchange import all_gather
from lightning_memopt.errors import UpdateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FAILED = -1
# Seconds a failed rank waits for the others to hear of it.
PATIENCE = 10


class Peers:
    """The ranks of a run, on the host. With one rank, everything is answered at once.

    Args:
        size: Number of ranks.
        timeout: Of every announcement.
    """

    def __init__(self, size: int, timeout: timedelta) -> None:
        self.size = size
        self._group: ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
        self._failed = False

    def announce(self, kind: int, number: int, name: str, value: int = 0, flag: bool = True) -> tuple[list[int], bool]:
        """Tell the others what comes next; returns every rank's value, in rank order, and whether all flags are set.

        Args:
            kind: What comes next.
            number: Which one.
            value: What the others want to know of it, for example this rank's tokens.
            flag: Something that must hold on all ranks.
            name: The same in words, for messages.

        Raises:
            UpdateError: Another rank failed, or is about to do something else.
        """
        if self._group is None:
            return [value], flag
        heard = self._gather([kind, number, value, int(flag)])
        if any(other[0] == FAILED for other in heard):
            self._failed = True
            raise UpdateError(self._words(heard))
        if any(other[:2] != [kind, number] for other in heard):
            self._failed = True
            raise UpdateError(
                f"ranks disagree about the layer whose gradient comes next; this one has {name}. Every rank must "
                "run the same layers in the same order in each step: tokens may differ, the path may not."
            )
        return [value for _, _, value, _ in heard], all(flag for *_, flag in heard)

    def all_of(self, flags: Sequence[bool], kind: int) -> list[bool]:
        """Whether each flag is set on all ranks."""
        if self._group is None:
            return list(flags)
        self.announce(kind, len(flags), "the end of the step")
        both = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(both, op=dist.ReduceOp.MIN, group=self._group)
        return [bool(flag) for flag in both.tolist()]

    def fail(self, error: BaseException) -> None:
        """Stop the other ranks at their next announcement, with this rank's error."""
        if self._group is None or self._failed:
            return
        self._failed = True
        words = f"rank {dist.get_rank(self._group)} failed: {type(error).__name__}: {error}"
        try:
            self._words(self._gather([FAILED, 0, 0, 0], timedelta(seconds=PATIENCE)), words)
        except (RuntimeError, ValueError):  # nobody listens any more
            pass

    def _gather(self, header: list[int], timeout: timedelta | None = None) -> list[list[int]]:
        heard = torch.empty(self.size * len(header), dtype=torch.int64)
        work = all_gather(heard, torch.tensor(header), group=self._group, async_op=True)
        work.wait(timeout) if timeout is not None else work.wait()
        return heard.view(self.size, -1).tolist()

    def _words(self, heard: list[list[int]], words: str = "") -> str:
        """What the first of the failed ranks says."""
        box = [words]
        rank = next(rank for rank, (kind, *_) in enumerate(heard) if kind == FAILED)
        dist.broadcast_object_list(box, group=self._group, group_src=rank)
        return box[0]
