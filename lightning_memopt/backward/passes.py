"""Backward passes that the ranks went through before, so that one like them needs no word between the hosts.

What a bundle's way depends on (layers, every rank's tokens, shared inputs) is the same in most steps, yet asking for it
takes the hosts as long as a layer, and makes all of them wait for the slowest, once per block. So the first pass of a
kind is written down, on all ranks under the same number. Before a later pass each rank says the number of the pass that
its forward pass was like; if all say the same one, bundles are sent as they were then, and nothing is asked.

A rank that comes to another layer than then leaves the written pass and announces again. Legitimate only if all ranks
do so at the same bundle; they announce how many they have sent as well, so that one that does not is found by the end
of the pass at the latest, with an error on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from lightning_memopt.backward.peers import NOTHING, Answers, Item, Peers
from lightning_memopt.backward.traffic import Route

# The kind of the announcements.
PASS = 4
# Kinds of passes that are remembered: numbers of tokens, mostly.
CAPACITY = 64


@dataclass(frozen=True, eq=False)
class Agreed:
    """What the ranks agreed on for a bundle, by layer.

    Attributes:
        said: What this rank said.
        dtypes: Of dY and x.
        tokens: Of every rank.
        sources: Position of the first layer with the same x, on all ranks.
        bounded: Whether the gradient is known to be finite on all ranks.
        routes: How gradients are summed.
        moved: Bytes that a rank receives.
    """

    said: Sequence[Item]
    dtypes: tuple[torch.dtype, torch.dtype]
    tokens: Sequence[Sequence[int]]
    sources: Sequence[int]
    bounded: Sequence[bool]
    routes: Sequence[Route]
    moved: Sequence[int]

    @property
    def most(self) -> int:
        """Largest number of tokens of any rank in any layer."""
        return max(map(max, self.tokens))


@dataclass(frozen=True)
class _Written:
    number: int
    bundles: Sequence[Agreed]


class Passes:
    """The passes that were written down, and the one that runs.

    Args:
        peers: The other ranks' hosts.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._written: dict[Hashable, _Written] = {}
        self._number = 0
        self._kind: Hashable | None = None
        self._answers: Answers | None = None
        self._followed: Sequence[Agreed] | None = None
        self._went: list[Agreed] = []

    def ask(self, kind: Hashable) -> None:
        """A pass begins; `hear` comes later.

        Args:
            kind: Equal for passes that go the same way; unequal wherever this rank's tokens or layers are others.
        """
        self.forget()
        self._kind = kind
        written = self._written.get(kind)
        self._answers = self._peers.announce(PASS, Item(0, written.number if written else NOTHING))

    @property
    def asked(self) -> bool:
        """Whether the answers have not been heard."""
        return self._answers is not None

    def hear(self) -> None:
        """Wait for what the others say of the pass, and follow a written one if all do."""
        assert self._answers is not None
        answers, self._answers = self._answers, None
        (said,) = answers.wait()
        written = self._written.get(self._kind)
        if written is not None and all(item.value == written.number for item in said):
            self._followed = written.bundles

    @property
    def following(self) -> bool:
        """Whether all ranks go a written way."""
        return self._followed is not None

    @property
    def next(self) -> Agreed | None:
        """The bundle that comes next on the written way; None at its end."""
        assert self._followed is not None
        return self._followed[len(self._went)] if len(self._went) < len(self._followed) else None

    def leave(self) -> None:
        """This rank, and so every rank, goes another way from here."""
        self._followed = None

    def went(self, agreed: Agreed) -> None:
        """A bundle is sent."""
        self._went.append(agreed)
        self._peers.bundles += 1

    def end(self, steady: bool) -> None:
        """The pass is over.

        Args:
            steady: Whether bundles are the same the next time; the same on all ranks.
        """
        if self._kind is not None and steady and (self._followed is None or self.next is not None):
            if len(self._written) >= CAPACITY:
                self._written.clear()
            self._written[self._kind] = _Written(self._number, self._went)
        # Counted whether written or not, and so alike on ranks whose passes are of other kinds.
        self._number += 1
        self.forget()

    def forget(self) -> None:
        """Break off the pass."""
        self._kind, self._answers, self._followed, self._went = None, None, None, []
