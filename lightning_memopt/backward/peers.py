"""What ranks tell each other on the host during a step: token counts, and that one of them failed.

Collectives on tensors must be issued by all ranks in one order and with sizes that fit. Autograd gives every rank the
same order if all run the same layers. Before each exchange the ranks announce which layers come and how many tokens
they have, so that a rank that ran other layers, or raised an error, stops all of them with a message instead of a hang.
An announcement is of up to `ITEMS` layers: it takes the hosts as long as several kernel launches, whatever it says.

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
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memopt.backward.exchange import all_gather
from lightning_memopt.backward.groups import kept_group
from lightning_memopt.errors import UpdateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FAILED = -1
# Number of an item that is not there, and how many there may be: all announcements are of one length, so that two that
# do not belong together can be compared.
NOTHING = -1
ITEMS = 16
# Every run has a key of its own in the store; runs are numbered alike on all ranks.
_runs = count()
# Seconds a failed rank waits for the others to hear of it.
PATIENCE = 3


class Item(NamedTuple):
    """What a rank says of one thing that comes next.

    Attributes:
        number: Which one; equal on all ranks.
        value: What the others want to know of it, for example this rank's tokens.
        source: Position of the item in the same announcement that it shares its input with, its own if none.
        flag: Something that must hold on all ranks.
    """

    number: int
    value: int = 0
    source: int = 0
    flag: bool = True


# Before the items: the kind, and how many bundles were sent.
_HEAD, _WIDTH = 2, len(Item._fields)
_EMPTY = Item(NOTHING)


class Peers:
    """The ranks of a run, on the host. With one rank, everything is answered at once.

    Args:
        size: Number of ranks.
        timeout: Of every announcement.

    Attributes:
        describe: Puts an announcement's kind and number into words.
        bundles: How many of this rank's are on their way or through; it goes with every announcement.
    """

    def __init__(self, size: int, timeout: timedelta) -> None:
        self.size, self.bundles = size, 0
        self.describe: Callable[[int, int], str] = lambda kind, number: f"{kind}/{number}"
        self._group: ProcessGroup | None = kept_group([range(size)], timeout, "gloo") if size > 1 else None
        self._failed = False
        self._key = f"memopt_failure_{next(_runs)}"

    def announce(self, kind: int, *items: Item) -> Answers:
        """Tell the others what comes next, and start listening to them.

        Args:
            kind: What comes next.
            items: Which ones, at most `ITEMS`.
        """
        said = [kind, self.bundles]
        for item in (*items, *[_EMPTY] * (ITEMS - len(items))):
            said += item
        heard = torch.tensor(said * self.size, device="cpu")
        if self._group is None:
            return Answers(self, len(items), said, heard, None)
        work = all_gather(heard, torch.tensor(said, device="cpu"), group=self._group, async_op=True)
        return Answers(self, len(items), said, heard, work)

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
        for at in range(_HEAD, len(said), _WIDTH):
            if any(other[0] != said[0] or other[at] != said[at] for other in heard):
                self._failed = True
                have = (f"rank {rank} has {self.describe(other[0], other[at])}" for rank, other in enumerate(heard))
                raise UpdateError(
                    f"ranks disagree about what comes next in backward: {', '.join(have)}. Every rank must run "
                    "the same layers in the same order in each step: tokens may differ, the path may not."
                )
        if any(other[1] != said[1] for other in heard):
            self._failed = True
            have = (f"rank {rank} has sent {other[1]} bundles of layers" for rank, other in enumerate(heard))
            raise UpdateError(
                f"ranks disagree about what came before in backward: {', '.join(have)}. Every rank must run "
                "the same layers in the same order in each step: tokens may differ, the path may not."
            )

    def all_of(self, flags: Sequence[bool], kind: int) -> list[bool]:
        """Whether each flag is set on all ranks."""
        if self._group is None:
            return list(flags)
        self.announce(kind, Item(len(flags))).wait()
        both = torch.tensor(flags, dtype=torch.int32, device="cpu")
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
            self.announce(FAILED).work.wait(timedelta(seconds=PATIENCE))  # type: ignore[union-attr]

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
        count: Number of items.
        said: Kind, bundles, and what this rank says of each item.
        heard: The same of every rank, one after the other, once `work` is through.
        work: The collective; None with one rank.
    """

    peers: Peers
    count: int
    said: list[int]
    heard: Tensor
    work: dist.Work | None

    def wait(self) -> list[list[Item]]:
        """For each item, what every rank says of it, in rank order.

        Raises:
            UpdateError: Another rank failed, or is about to do something else.
        """
        if self.work is not None:
            self.work.wait()
        heard: list[list[int]] = self.heard.view(self.peers.size, -1).tolist()
        self.peers.check(self.said, heard)
        starts = range(_HEAD, _HEAD + self.count * _WIDTH, _WIDTH)
        return [[_item(other[at : at + _WIDTH]) for other in heard] for at in starts]


def _item(said: Sequence[int]) -> Item:
    number, value, source, flag = said
    return Item(number, value, source, bool(flag))


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
