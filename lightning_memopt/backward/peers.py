"""What ranks tell each other on the host during a step: token counts, and that one of them failed.

Collectives on tensors must be issued by all ranks in one order and with sizes that fit. Autograd gives every rank the
same order if all run the same layers. Before each exchange the ranks announce which one comes and how many tokens they
have, so that a rank that ran other layers, or raised an error, stops all of them with a message instead of a hang.

The announcements go through a gloo group of their own: the host waits for the other hosts, never for a device. A rank
that failed also leaves its error in the ranks' common store, for those that wait elsewhere: in a collective of FSDP2,
which ends with an error of its own when the failed process is gone or the timeout is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memopt.backward.exchange import all_gather
from lightning_memopt.errors import UpdateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FAILED = -1
# Every run has a key of its own in the store; runs are numbered alike on all ranks.
_runs = count()
# Seconds a failed rank waits for the others to hear of it.
PATIENCE = 3


class Peers:
    """The ranks of a run, on the host. With one rank, everything is answered at once.

    Args:
        size: Number of ranks.
        timeout: Of every announcement.

    Attributes:
        describe: Puts an announcement's kind and number into words.
    """

    def __init__(self, size: int, timeout: timedelta) -> None:
        self.size = size
        self.describe: Callable[[int, int], str] = lambda kind, number: f"{kind}/{number}"
        self._group: ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
        self._failed = False
        self._key = f"memopt_failure_{next(_runs)}"

    def announce(self, kind: int, number: int, value: int = 0, flag: bool = True) -> Answers:
        """Tell the others what comes next, and start listening to them.

        Args:
            kind: What comes next.
            number: Which one.
            value: What the others want to know of it, for example this rank's tokens.
            flag: Something that must hold on all ranks.
        """
        said = [kind, number, value, int(flag)]
        heard = torch.tensor(said * self.size)
        if self._group is None:
            return Answers(self, said, heard, None)
        return Answers(self, said, heard, all_gather(heard, torch.tensor(said), group=self._group, async_op=True))

    def check(self, said: Sequence[int], heard: Sequence[Sequence[int]]) -> None:
        """Compare what the ranks announced.

        Raises:
            UpdateError: Another rank failed, or is about to do something else.
        """
        failed = [rank for rank, (kind, *_) in enumerate(heard) if kind == FAILED]
        if failed:
            words = self._left_words()
            self._failed = True
            raise UpdateError(words or f"rank {failed[0]} failed.")
        if any(other[:2] != said[:2] for other in heard):
            self._failed = True
            listed = (f"rank {rank} has {self.describe(kind, number)}" for rank, (kind, number, *_) in enumerate(heard))
            raise UpdateError(
                f"ranks disagree about what comes next in backward: {', '.join(listed)}. Every rank must run "
                "the same layers in the same order in each step: tokens may differ, the path may not."
            )

    def all_of(self, flags: Sequence[bool], kind: int) -> list[bool]:
        """Whether each flag is set on all ranks."""
        if self._group is None:
            return list(flags)
        self.announce(kind, len(flags)).wait()
        both = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(both, op=dist.ReduceOp.MIN, group=self._group)
        return [bool(flag) for flag in both.tolist()]

    def fail(self, error: BaseException) -> None:
        """Stop the other ranks at their next announcement, with this rank's error."""
        if self._group is None or self._failed:
            return
        self._failed = True
        words = f"rank {dist.get_rank(self._group)} failed: {type(error).__name__}: {error}"
        with suppress(RuntimeError):
            _store().set(self._key, words)
        with suppress(RuntimeError):  # nobody listens any more
            self.announce(FAILED, 0).work.wait(timedelta(seconds=PATIENCE))  # type: ignore[union-attr]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Inside, an error that another rank's failure caused says so.

        Raises:
            UpdateError: With the other rank's error, instead of that of a collective.
        """
        try:
            yield
        except RuntimeError as error:
            words = self._left_words()
            if words is None:
                raise
            self._failed = True
            raise UpdateError(words) from error

    def _left_words(self) -> str | None:
        if self._group is None or self._failed:
            return None
        with suppress(RuntimeError):
            if _store().check([self._key]):
                return _store().get(self._key).decode()
        return None


@dataclass
class Answers:
    """What the other ranks announce, on its way.

    Attributes:
        peers: Who listens.
        said: Kind, number, value and flag of this rank.
        heard: Those of every rank, one after the other, once `work` is through.
        work: The collective; None with one rank.
    """

    peers: Peers
    said: list[int]
    heard: Tensor
    work: dist.Work | None

    def wait(self) -> tuple[list[int], bool]:
        """Every rank's value, in rank order, and whether all flags are set.

        Raises:
            UpdateError: Another rank failed, or is about to do something else.
        """
        if self.work is not None:
            self.work.wait()
        heard = self.heard.view(self.peers.size, -1).tolist()
        self.peers.check(self.said, heard)
        return [value for _, _, value, _ in heard], all(flag for *_, flag in heard)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
