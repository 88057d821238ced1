"""The way of factors from this rank's backward pass to the owners of their rows: collected, announced, sent, used.

The layers of one unit of FSDP2 go together, so that hosts speak to each other, and devices start collectives, once for
all of them; an input that several layers share is sent once. While one bundle is collected the one before it travels:

    collect    until the unit ends or the bundle is full. Every rank closes it after the same layer.
    announce   the hosts tell each other the layers, their tokens and which of them share an input
    send       once the others have answered, for which they have the time of another layer
    use        when the next bundle is closed: by then it has had the time of a whole unit to arrive

In a pass like an earlier one (`lightning_memopt.backward.passes`) nothing is announced: a bundle is sent with its last
layer, and the one before it used when the next one begins. So updates run while both factors and, on FSDP2's part, the
next weights travel: the update's kernel makes do with the multiprocessors that collectives leave, where a matmul of
cuBLAS takes twice as long (`lightning_memopt.kernels.fused_hopper`).

What is sent and used, and in which order, is the same on all ranks: it depends on layers, and on what was announced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_memopt.backward.exchange import Block, Exchange, Lookups, Ranks, reduce_rows, send_blocks, sources
from lightning_memopt.backward.outbox import Copied
from lightning_memopt.backward.passes import Agreed, Passes
from lightning_memopt.backward.peers import ITEMS, Answers, Item, Peers
from lightning_memopt.backward.sharded_slot import ShardedSlot
from lightning_memopt.backward.slot import Lookup, Versions, check_unchanged
from lightning_memopt.backward.traffic import Layer, Route, Way, chosen_routes, lookup_bytes, received
from lightning_memopt.kernels import Factors, Update
from lightning_memopt.kernels.reference import compute_dtype

# The kind of the announcements.
FACTORS = 1
# Bytes of a bundle's factors on this rank, if every rank had as many tokens as the one that had most in the bundle
# before: the layers of a block of an 8B Llama with 3000 tokens.
BUNDLE_BYTES = 1 << 29
# Blocks of dW that exist at a time: one is formed and sent before the one before it is used.
BLOCKS = 2


@dataclass(slots=True, eq=False)
class Parcel:
    """A layer's factors, until its update.

    Attributes:
        slot: The weight.
        factors: This rank's dY [tokens, R] and x [tokens, C], or of a table dY [tokens, D] and rows [tokens]; None once
            sent.
        versions: Of the factors, which must not change before they are sent (`slot.versions_of`).
        complete: Whether they complete the gradient.
        bounded: Whether the gradient is known to be finite, on all ranks once announced.
        certain: It need not be: its update leaves out what is not, by itself.
        padding: Of a table, the row that takes no gradient, or -1; None for a layer.
        update: The update that blocks of the gradient are consumed by, if they are.
        finite: Whether it was taken so far.
    """

    slot: ShardedSlot
    factors: Factors | None
    versions: Versions
    complete: bool
    bounded: bool
    certain: bool
    padding: int | None = None
    update: Update | None = None
    finite: bool = True

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of dY and x."""
        dy, x = self._unsent
        return dy.dtype, x.dtype

    @property
    def tokens(self) -> int:
        """Of this rank."""
        return len(self._unsent[0])

    @property
    def _unsent(self) -> Factors:
        assert self.factors is not None
        return self.factors

    @property
    def input(self) -> Tensor:
        """What the layer was called with, x."""
        return self._unsent[1]

    def take(self) -> Factors:
        """The factors, which are gone then.

        Raises:
            UpdateError: One was changed in place meanwhile.
        """
        dy, x = self._unsent
        check_unchanged(self.slot.name, (dy, x), self.versions)
        self.factors = None
        return dy, x


class Receiver(Protocol):
    """What is done with what arrives, in the order of sending."""

    def receive_factors(self, parcel: Parcel, factors: Factors) -> None:
        """The factors of this rank's rows, over the tokens of all ranks."""

    def receive_lookup(self, parcel: Parcel, lookup: Lookup) -> None:
        """What all ranks' tokens looked up in this rank's rows of a table."""

    def received(self, parcels: Sequence[Parcel]) -> None:
        """The factors of all of them, which came in one piece of memory, were handed out."""

    def receive_block(self, parcel: Parcel, block: Block) -> None:
        """The next rows of the gradient."""

    def receive_rows(self, parcel: Parcel, rows: Iterator[tuple[int, int, Tensor]]) -> None:
        """All rows of the gradient of a sparse weight, see `reduce_rows`."""


class Shipping:
    """Sends factors and hands out what arrives.

    Args:
        ranks: Who takes part.
        peers: Their hosts.
        receiver: What is done with what arrives.
        route: How gradients are summed over ranks; ``"auto"`` takes what moves fewer bytes.
        ahead: Let the hosts' answers take the time of another layer; else they are waited for at once.

    Attributes:
        plan: Route and bytes received, by parameter name, of the last step.
    """

    def __init__(self, ranks: Ranks, peers: Peers, receiver: Receiver, route: Way, ahead: bool) -> None:
        self.ranks, self.peers, self.receiver = ranks, peers, receiver
        self.route, self.ahead = route, ahead
        self.plan: dict[str, tuple[Route, int]] = {}
        self._passes = Passes(peers)
        self._collected: list[Parcel] = []
        self._elements = 0
        self._announced: tuple[list[Parcel], list[Item], Answers] | None = None
        # Whether it is a block, and what hands it out.
        self._flying: deque[tuple[bool, Callable[[], None]]] = deque()
        # How many were sent, used, and are used when the next bundle begins.
        self._sent = self._used = self._due = 0
        # Most tokens of a layer of the last bundle that was sent, 0 before the first one, and before this pass; whether
        # bundles are reduced.
        self._tokens = self._tokens_before = 0
        self._reduced = route == "reduce"

    def begin(self, kind: Hashable) -> None:
        """A backward pass begins, on all ranks; one that waits for answers anyway has nothing to ask.

        Args:
            kind: See `Passes.ask`.
        """
        self._tokens_before = self._tokens
        if self.ahead and self.ranks.size > 1:
            self._passes.ask(kind)

    def send(self, parcel: Parcel) -> None:
        """Take over a layer's factors."""
        if self._passes.asked and self._collected:
            self._hear()
        if self._passes.following:
            if not self._collected:
                self._use(self._due)
            self._collected.append(parcel)
            self._follow()
            return
        if self._collected and not self._fits(parcel):
            self._close()
        elif self._collected:
            self._send_announced()
        self._collected.append(parcel)
        self._elements += sum(parcel.slot.param.shape)

    def flush(self) -> None:
        """Send and use everything: the pass is over."""
        if self._passes.asked:
            self._hear()
        if self._passes.following and self._collected:
            self._leave()
        if self._collected:
            self._close()
        self._send_announced()
        self._use(self._sent)
        self._passes.end(steady=0 < self._tokens == self._tokens_before)

    def forget(self) -> None:
        """Drop everything: the step broke off."""
        self._collected, self._announced, self._elements = [], None, 0
        self._passes.forget()
        if self.ranks.outbox is not None:
            self.ranks.outbox.rest()
        self._flying.clear()
        self._used = self._due = self._sent

    # ---------------------------------------------------------------- as written

    def _hear(self) -> None:
        self._passes.hear()
        if self._passes.following and self._collected:
            self._elements = 0
            self._follow()

    def _follow(self) -> None:
        """Send what is collected once it is the bundle that comes next in the written pass."""
        agreed, bundle = self._passes.next, self._collected
        if agreed is None or not _same(agreed, bundle):
            self._leave()
        elif len(bundle) == len(agreed.said):
            self._collected, self._due = [], self._sent
            for parcel, bounded in zip(bundle, agreed.bounded, strict=True):
                parcel.bounded = bounded and parcel.certain
            self._ship(bundle, agreed)

    def _leave(self) -> None:
        """Announce from here on."""
        bundle, self._collected = self._collected, []
        self._passes.leave()
        for parcel in bundle:
            self.send(parcel)

    # ---------------------------------------------------------------- collect, announce

    def _fits(self, parcel: Parcel) -> bool:
        """Whether the layer may join the bundle; the same on all ranks."""
        # Blocks of gradients fill the link by themselves, and are better spread over the backward pass.
        if not self._tokens or self._reduced or len(self._collected) == ITEMS:
            return False
        first = self._collected[0]
        if first.padding is not None or parcel.padding is not None:
            return False
        if parcel.slot.unit != first.slot.unit or parcel.dtypes != first.dtypes:
            return False
        if any(parcel.slot is other.slot for other in self._collected):  # parts are used in their order
            return False
        elements = self._elements + sum(parcel.slot.param.shape)
        return elements * self._tokens * parcel.dtypes[1].itemsize <= BUNDLE_BYTES

    def _close(self) -> None:
        bundle, self._collected, self._elements = self._collected, [], 0
        items = [
            Item(parcel.slot.number, parcel.tokens, source, parcel.bounded)
            for parcel, source in zip(bundle, _sources(bundle), strict=True)
        ]
        answers, before = self.peers.announce(FACTORS, *items), self._sent
        self._send_announced()
        self._announced = bundle, items, answers
        self._use(before)
        if not self.ahead:
            self._send_announced()

    # ---------------------------------------------------------------- send

    def _send_announced(self) -> None:
        if self._announced is None:
            return
        (bundle, items, answers), self._announced = self._announced, None
        agreed = self._agree(bundle, items, answers.wait())
        for parcel, bounded in zip(bundle, agreed.bounded, strict=True):
            parcel.bounded = bounded
        self._ship(bundle, agreed)

    def _agree(self, bundle: Sequence[Parcel], said: Sequence[Item], heard: Sequence[Sequence[Item]]) -> Agreed:
        tokens = [[item.value for item in items] for items in heard]
        # Shared by all ranks or by none.
        sources = [
            items[0].source if all(item.source == items[0].source for item in items) else i
            for i, items in enumerate(heard)
        ]
        routes, moved = self._choose(bundle, [max(counts) for counts in tokens], sources)
        bounded = [all(item.flag for item in items) for items in heard]
        return Agreed(said, bundle[0].dtypes, tokens, sources, bounded, routes, moved)

    def _ship(self, bundle: Sequence[Parcel], agreed: Agreed) -> None:
        self._passes.went(agreed)
        if bundle[0].padding is None:
            self._tokens = agreed.most
            exchanged = "exchange" in agreed.routes
            if exchanged or len(bundle) > 1:  # a layer alone may be exchanged as soon as it shares its input
                self._reduced = not exchanged
        together: dict[tuple[int, ...], list[int]] = {}
        for i, (parcel, way, moved) in enumerate(zip(bundle, agreed.routes, agreed.moved, strict=True)):
            self.plan[parcel.slot.name] = way, moved
            if parcel.padding is not None:
                lookups = Lookups(*parcel.take(), agreed.most, self.ranks)
                self._fly(False, partial(self._arrive_lookup, parcel, lookups))
            elif way == "exchange":
                together.setdefault(tuple(agreed.tokens[i]), []).append(i)
            else:
                self._reduce(parcel)
        for counts, places in together.items():
            at = {agreed.sources[i]: place for place, i in reversed(list(enumerate(places)))}
            dys, xs = zip(*(bundle[i].take() for i in places), strict=True)
            start = Exchange if self.ranks.outbox is None else Copied
            exchange = start(dys, xs, [at[agreed.sources[i]] for i in places], max(counts), self.ranks)
            self._fly(False, partial(self._arrive, [bundle[i] for i in places], exchange))

    def _choose(
        self, bundle: Sequence[Parcel], tokens: Sequence[int], sources: Sequence[int]
    ) -> tuple[list[Route], list[int]]:
        """Routes, and the bytes that they make a rank receive."""
        size, shards = self.ranks.size, self.ranks.shards
        if bundle[0].padding is not None:
            return ["exchange"], [
                lookup_bytes(bundle[0].slot.param.shape[1], tokens[0], size, bundle[0].dtypes[0].itemsize)
            ]
        layers = []
        for parcel, most, source in zip(bundle, tokens, sources, strict=True):
            rows, columns = parcel.slot.param.shape
            wide = compute_dtype(parcel.slot.param).itemsize
            layers.append(Layer((rows, columns), most, source, parcel.dtypes[0].itemsize, wide))
        routes = chosen_routes(self.route, layers, size, shards)
        return routes, received(layers, routes, size, shards)

    def _reduce(self, parcel: Parcel) -> None:
        dtype = compute_dtype(parcel.slot.param)
        if parcel.slot.sparse is not None:  # kernels of active weights want all rows in one go
            self._use(self._sent)
            self.receiver.receive_rows(parcel, reduce_rows(*parcel.take(), self.ranks, dtype))
            return
        for block in send_blocks(*parcel.take(), self.ranks, dtype):
            self._fly(True, partial(self.receiver.receive_block, parcel, block))
            while sum(is_block for is_block, _ in self._flying) >= BLOCKS:
                self._use(self._used + 1)

    def _fly(self, is_block: bool, hand_out: Callable[[], None]) -> None:
        self._flying.append((is_block, hand_out))
        self._sent += 1

    # ---------------------------------------------------------------- use

    def _arrive(self, parcels: Sequence[Parcel], exchange: Exchange | Copied) -> None:
        for parcel, factors in zip(parcels, exchange.wait(), strict=True):
            self.receiver.receive_factors(parcel, factors)
        self.receiver.received(parcels)

    def _arrive_lookup(self, parcel: Parcel, lookups: Lookups) -> None:
        assert parcel.padding is not None
        rows = self.ranks.rows(parcel.slot.param.shape[0])
        self.receiver.receive_lookup(parcel, lookups.wait(*rows, parcel.padding))

    def _use(self, count: int) -> None:
        """Hand out what was sent, in order, up to that many in all; kernels wait for it, the host does not."""
        while self._used < count:
            self._used += 1
            self._flying.popleft()[1]()


def _sources(bundle: Sequence[Parcel]) -> list[int]:
    return sources([parcel.input for parcel in bundle])


def _same(agreed: Agreed, bundle: Sequence[Parcel]) -> bool:
    """Whether a bundle is, so far as it is collected, what was agreed on."""
    last = len(bundle) - 1
    if bundle[last].dtypes != agreed.dtypes or (bundle[last].slot.number, bundle[last].tokens) != agreed.said[last][:2]:
        return False
    if last + 1 < len(agreed.said):
        return True
    return all(source in (i, own) for i, (source, own) in enumerate(zip(agreed.sources, _sources(bundle), strict=True)))
