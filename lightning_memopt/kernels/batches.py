"""What the kernels remember of updates that are taken together, so that the next step takes them in a few launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from lightning_memopt.kernels.update import Update

# Sets of updates that are remembered; those that a CUDA graph was captured with come on top.
CAPACITY = 8


class Batch(Protocol):
    """The launch for several updates, with what it needs in device memory."""

    def step(self, grads: Sequence[Tensor]) -> None:
        """Take one step on other gradients of the same dtype and shapes."""


class Together(NamedTuple):
    """How a set of updates is taken.

    Attributes:
        batches: Launches, each with the numbers of its updates in the set.
        taken: All of these numbers; other updates need a launch of their own.
    """

    batches: Sequence[tuple[Sequence[int], Batch]]
    taken: Set[int]


@dataclass(slots=True, eq=False)
class _Known:
    updates: Sequence[Update]
    launches: Together | None = None
    captured: bool = False


@dataclass(slots=True, eq=False)
class Batches:
    """The sets of updates that were seen. An `Update` that comes again is taken to be standing (`Update.standing`).

    A set's launches are made when it comes for the second time: which parameters get a gradient may change with every
    step, and then nothing is gained by them.
    """

    _known: dict[Hashable, _Known] = field(default_factory=dict)

    def recall(
        self,
        updates: Sequence[Update],
        grads: Sequence[Tensor],
        kernel: str,
        capturing: bool,
        make: Callable[[], Together],
    ) -> Together | None:
        """The launches for these updates, if they came before; `make` makes them, but not while a graph is captured."""
        key = (kernel, *map(id, updates), *[grad.dtype for grad in grads])
        known = self._known.get(key)
        if known is None:
            if len(self._known) - sum(known.captured for known in self._known.values()) >= CAPACITY:
                self._known = {key: known for key, known in self._known.items() if known.captured}
            self._known[key] = _Known(tuple(updates))  # which also keeps their ids theirs
            return None
        if known.launches is None and not capturing:
            known.launches = make()
        # A graph reads what they have in device memory for as long as it lives.
        known.captured |= capturing
        return known.launches

    def clear(self) -> None:
        """Forget all, with the device memory that goes with it."""
        self._known.clear()
