"""The updater of sharded parameters: gradients are summed over ranks before rules see them.

Autograd says when this rank's part of a gradient is complete, as for one device. Then, instead of updating, the factors
are sent to the owners of their rows (`lightning_memopt.backward.shipping`), where they arrive a few layers later. So
communication overlaps the backward computation in between. Every rank sends the same layers in the same order.

    step, immediate    factors are sent, and the owner's rows updated, as soon as they are complete
    step, deferred     factors are sent; their owner keeps them, or the gradient of its rows if that is smaller
    queue              the same, for an earlier micro-batch

What autograd stores (embeddings, norms, biases, a tied weight's other use) is averaged by FSDP2 itself, or together
(`lightning_memopt.backward.averages`), and used at the end of the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.optim import Optimizer

from lightning_memopt.backward import engine
from lightning_memopt.backward.averages import SMALL, Averages
from lightning_memopt.backward.clipping import Clip, Norms, gradient_norms
from lightning_memopt.backward.exchange import Block, Ranks, any_rank, sum_over_shards
from lightning_memopt.backward.nonfinite import NonFiniteReports
from lightning_memopt.backward.passes import PASS
from lightning_memopt.backward.peers import ITEMS, NOTHING, Answers, Item, Peers
from lightning_memopt.backward.sharded_keeper import ShardedKeeper
from lightning_memopt.backward.sharded_slot import ShardedSlot, part_kept
from lightning_memopt.backward.shipping import Parcel, Shipping
from lightning_memopt.backward.slot import Lookup, Slot, versions_of
from lightning_memopt.backward.traffic import Route, Way, said
from lightning_memopt.compat import refusal
from lightning_memopt.kernels import Factors, Update, apply_gradient, apply_gradients, apply_slabs
from lightning_memopt.kernels.dispatch import in_triton
from lightning_memopt.kernels.reference import compute_dtype
from lightning_memopt.kernels.slabs import finite, largest_possible, slab_rows
from lightning_memopt.kernels.update import Beside
from lightning_memopt.rules.storage import Dense

# Kinds of announcements, besides those of factors and passes.
UPDATE, END, REACHED = 2, 3, 5
# Parameters of an item of the last kind: a bit for each, below the number of the item.
BITS = 48


class ShardedUpdater(ShardedKeeper):
    """An updater for parameters sharded by FSDP2. `share` comes before `attach`.

    Attributes:
        route: How gradients of linear layers are summed over ranks; ``"auto"`` takes what moves fewer bytes.
        ahead: Go on with the backward pass before the other hosts have answered an announcement. By default for GPUs,
            whose hosts run ahead of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reports = NonFiniteReports(self.reports.mode, together=True)
        self.route: Way = "auto"
        self.ahead: bool | None = None
        self.peers: Peers | None = None
        self._shipping: Shipping | None = None
        self._averages: Averages | None = None
        self._beside: Beside = "collectives"
        self._units: Mapping[int, Sequence[Any]] = {}
        self._outcomes: list[tuple[Slot, bool]] = []
        self._said_plan = False
        self._ended: list[Answers] = []
        self._reached: dict[int, list[int]] = {}
        self._trained: dict[Any, bool] = {}  # whether each of FSDP2's parameters was, in the last pass

    # ---------------------------------------------------------------- set-up

    @property
    def plan(self) -> Mapping[str, tuple[Route, int]]:
        """Route and bytes received, by parameter name, of the last step."""
        return {} if self._shipping is None else self._shipping.plan

    def share(
        self,
        ranks: Ranks,
        peers: Peers,
        unsharded: Mapping[nn.Parameter, tuple[nn.Parameter, int]],
        units: Mapping[int, Sequence[Any]],
        beside: Beside,
    ) -> None:
        """Say who trains together, which unsharded parameter belongs to each sharded one, of which of FSDP2's units.

        Args:
            ranks: Who trains together.
            peers: How their hosts speak to each other.
            unsharded: By sharded parameter, the one that layers see, and the number of its unit.
            units: By number, the parameters of each as FSDP2 keeps them.
            beside: What runs on the device beside updates.
        """
        self.ranks, self.peers, self._unsharded, self._beside = ranks, peers, unsharded, beside
        self._units = units
        peers.describe = self._describe
        ahead = any(param.is_cuda for param in unsharded) if self.ahead is None else self.ahead
        self._shipping = Shipping(ranks, peers, self, self.route, ahead)
        self._averages = Averages(ranks, units)

    def _describe(self, kind: int, number: int) -> str:
        if kind in (END, PASS):
            return "the end of the step" if kind == END else "the beginning of a backward pass"
        if number == NOTHING:
            return "no further layer"
        names = [slot.name for slot in self.slots.values()]
        if kind == REACHED:
            first = (number >> BITS) * BITS
            missing = [name for i, name in enumerate(names[first : first + BITS]) if number >> i & 1]
            return f"no gradient of {', '.join(missing)}" if missing else "all gradients"
        return names[number] if number < len(names) else "another parameter"

    # ---------------------------------------------------------------- a backward pass

    @contextmanager
    def backward(self, loss: Tensor, queue: bool) -> Iterator[None]:
        """As for one device; the ranks say what is to come."""
        path, self.path = self.path, 0
        ended, self._ended = self._ended, []
        for answers in ended:
            answers.wait()
        self._freeze_as_gathered()
        if self._shipping is None or self._averages is None or not (queue or self.stepping):
            with super().backward(loss, queue):
                yield
            return
        self._shipping.begin((path, id(self._stepping)))
        mine = self.slots.values() if self._stepping is None else self._slots_of(self._stepping)
        self._averages.begin(cast(Iterable[ShardedSlot], mine))
        try:
            with super().backward(loss, queue):
                yield
        finally:
            self._averages.end()

    def _freeze_as_gathered(self) -> None:
        """Freeze or unfreeze shards whose gathered parameter `training_step`, which sees no other, has.

        Raises:
            UnsupportedError: It is the shard that was changed since, which the forward pass did not notice.
        """
        for param in (param for groups in self._units.values() for group in groups for param in group.fsdp_params):
            trained = param.sharded_param.requires_grad
            if param.sharded_state == ShardedState.UNSHARDED and param._unsharded_param.requires_grad != trained:
                if self._trained.get(param, trained) != trained:
                    names = (slot.name for slot in self.slots.values() if slot.param is param.sharded_param)
                    raise refusal("shards toggled while their weights are gathered", next(names, ""))
                trained = param._unsharded_param.requires_grad
                param.sharded_param.requires_grad_(trained)
            self._trained[param] = trained

    def _ready(self, slot: Slot) -> None:
        """This rank's part of the gradient is complete, or one of its parts in a nested pass."""
        assert isinstance(slot, ShardedSlot)
        if not self._owns(slot):
            return
        slot.ready = True
        if slot.looked_up:
            self._send_lookups(slot)
        if not slot.outgoing:
            return
        if engine.current_pass() != self._task:
            self._reentrant = True
            complete = slot.uses == len(slot.outgoing) == 1
        else:
            complete = not self._reentrant
        immediate = self._stepping is not None and not self._deferred
        self._send(slot, immediate and complete and not slot.awaits_average)

    def _send(self, slot: ShardedSlot, complete: bool) -> None:
        """Send what `slot` has; if that makes the gradient `complete`, its owner's update follows."""
        assert self.ranks is not None and self._shipping is not None
        size, (dy, x) = self.ranks.size, slot.take_outgoing()
        slot.sent = True
        if size == 1:
            slot.arrive((dy, x))
            self._arrived(slot, complete)
            return
        bounded = certain = not self._takes_all_or_nothing(slot)
        if not certain:
            bounded = largest_possible(dy, x) < min(slot.rule.limit / size, torch.finfo(torch.float32).max)
        self._shipping.send(Parcel(slot, (dy, x), versions_of(dy, x), complete, bounded, certain))

    def _send_lookups(self, slot: ShardedSlot) -> None:
        """Send what was looked up; the table is updated at the end of the pass."""
        assert self.ranks is not None and self._shipping is not None
        slot.sent = True
        for dy, indices, padding in slot.take_looked_up():
            parcel = Parcel(slot, (dy, indices), versions_of(dy, indices), False, True, True, padding)
            if self.ranks.size == 1:
                self.receive_lookup(parcel, (dy, indices, padding))
            else:
                self._shipping.send(parcel)

    def receive_lookup(self, parcel: Parcel, lookup: Lookup) -> None:
        """What all ranks' tokens looked up in this rank's rows of a table."""
        parcel.slot.queue_lookup(lookup)
        self._fold(parcel.slot)

    def receive_factors(self, parcel: Parcel, factors: Factors) -> None:
        """The factors of this rank's rows, over the tokens of all ranks."""
        slot = parcel.slot
        if parcel.complete and not slot.pending:  # most of them
            update, kept = self._begin(slot), [factors]
            self._settle(slot, self._sound(slot, kept, None) and self._apply(update, kept, None))
            return
        slot.arrive(factors)
        self._arrived(slot, parcel.complete)

    def received(self, parcels: Sequence[Parcel]) -> None:
        """What arrived together has been handed out."""
        keepers = [parcel.slot for parcel in parcels if parcel.slot.factors]
        if keepers:
            part_kept(keepers)

    def receive_block(self, parcel: Parcel, block: Block) -> None:
        """The next rows of the gradient; the first ones decide whether the update consumes them."""
        slot, rows = parcel.slot, block.wait()
        # A block that was consumed cannot be taken back: one that may not be finite waits for the others.
        if block.start == 0 and parcel.complete and parcel.bounded and not slot.pending:
            parcel.update = self._begin(slot)
        if parcel.update is None:
            slot.add_blocks([(block.start, block.stop, rows)] if len(rows) else [])
            if block.last and parcel.complete:
                self._update(slot)
            return
        if len(rows):
            parcel.finite &= apply_gradient(parcel.update.rows(block.start, block.stop), rows, self.kernel)
        if block.last:
            self._settle(slot, parcel.finite)

    def receive_rows(self, parcel: Parcel, rows: Iterator[tuple[int, int, Tensor]]) -> None:
        """All rows of the gradient of a sparse weight."""
        slot = parcel.slot
        if parcel.complete and parcel.bounded and not slot.pending:
            self._settle(slot, apply_slabs(self._begin(slot), rows, self.kernel))
            return
        slot.add_blocks(rows)
        if parcel.complete:
            self._update(slot)

    def _arrived(self, slot: ShardedSlot, complete: bool) -> None:
        if complete:
            self._update(slot)
        else:
            self._fold(slot)

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Send what a nested pass left, wait for the last factors, and use what FSDP2 has averaged meanwhile."""
        for slot in self.slots.values():
            assert isinstance(slot, ShardedSlot)
            if slot.looked_up:
                self._send_lookups(slot)
            if slot.outgoing:
                self._send(slot, complete=False)
        if self._shipping is not None and self._averages is not None:
            self._shipping.flush()
            self._compare_reached()
            self._averages.sum()
        super()._end_pass()

    def _compare_reached(self) -> None:
        """See to it that all ranks have gradients of the same parameters, before what autograd stored is summed.

        A rank that has those of its last pass goes on where hosts run ahead, and hears of the others in the next one.
        """
        assert self.ranks is not None and self.peers is not None and self._shipping is not None
        if self.ranks.size == 1 or not (self.queueing or self.stepping):
            return
        slots, mine = list(self.slots.values()), self._stepping
        parts = [slots[at : at + BITS] for at in range(0, len(slots), BITS)]
        missing = [
            sum((not slot.ready and mine in (None, slot.optimizer)) << i for i, slot in enumerate(part))
            for part in parts
        ]
        items = [Item(number << BITS | bits) for number, bits in enumerate(missing)]
        answers = [self.peers.announce(REACHED, *items[at : at + ITEMS]) for at in range(0, len(items), ITEMS)]
        before, self._reached[id(mine)] = self._reached.get(id(mine)), missing
        if self._shipping.ahead and before == missing:
            self._ended += answers
            return
        for answer in answers:
            answer.wait()

    def drop_queue(self, optimizer: Optimizer | None = None) -> None:
        """Also forget factors under way."""
        super().drop_queue(optimizer)
        if self._shipping is not None:
            self._shipping.forget()
        if optimizer is None:  # a step broke off
            self._outcomes = []

    # ---------------------------------------------------------------- the end of a step

    def _finish(self, clip: Clip | None = None) -> None:
        """As for one device; then all ranks agree which updates were left out."""
        super()._finish(clip)
        outcomes, self._outcomes = self._outcomes, []
        if outcomes:
            for (slot, _), taken in zip(outcomes, self._together(outcomes), strict=True):
                super()._settle(slot, taken)
        self._say_plan()

    def _together(self, outcomes: Sequence[tuple[Slot, bool]]) -> list[bool]:
        """Which updates all ranks have taken."""
        assert self.peers is not None and self._shipping is not None
        taken = [taken for _, taken in outcomes]
        if not self._shipping.ahead or any(self._takes_all_or_nothing(slot) for slot, _ in outcomes):
            return self.peers.all_of(taken, END)
        # Kernels take every update, and tell later what they left out: only that all ranks have come here is of
        # interest, and known early enough when the next pass begins.
        self._ended.append(self.peers.announce(END, Item(len(taken))))
        return taken

    def _update(self, slot: Slot, coefficient: Tensor | None = None) -> None:
        if slot.lookups and self._takes_all_or_nothing(slot):  # then all ranks must know the gradient first
            slot.fold_lookups()
        super()._update(slot, coefficient)

    def _sound(self, slot: Slot, factors: Sequence[Factors], grad: Tensor | None) -> bool:
        """Whether the gradient is finite in the rows of all ranks. GPUs are not asked: their kernels tell later."""
        assert isinstance(slot, ShardedSlot) and self.peers is not None
        if not self._takes_all_or_nothing(slot):
            return True
        limit, dtype = slot.rule.limit, compute_dtype(slot.param)
        if factors:
            sound = finite(factors, grad, dtype, slab_rows(slot.param.shape[1], slot.weight.device), limit)
        else:
            sound = grad is None or bool((grad.abs() < limit).all())
        if slot.sparse is not None and slot.sparse.stored is not None:
            sound = sound and bool((slot.sparse.stored.abs() < limit).all())
        (said,) = self.peers.announce(UPDATE, Item(slot.number, flag=sound)).wait()
        return all(item.flag for item in said)

    def _takes_all_or_nothing(self, slot: Slot) -> bool:
        """Whether an update runs in plain torch, which on one device leaves it out as a whole."""
        if slot.sparse is None:
            assert isinstance(slot, ShardedSlot)
            facts = self.storage(slot), slot.tile, slot.row is None, self.kernel
            if slot.in_torch is None or slot.in_torch[0] != facts:
                slot.in_torch = facts, not in_triton(self._build(slot), self.kernel)
            return slot.in_torch[1]
        codes = not all(isinstance(moment, Dense) for moment in self.storage(slot))
        return codes or self.kernel == "reference" or not slot.weight.is_cuda

    @staticmethod
    def _moved(slot: Slot) -> bool:
        return slot.address != slot.placed

    def _build(self, slot: Slot, coefficient: Tensor | None = None) -> Update:
        update = super()._build(slot, coefficient)
        update.beside = self._beside
        return update

    def _stands(self, slot: Slot) -> bool:
        return slot.sparse is None

    @torch.no_grad()
    def _update_pending(self, coefficient: Tensor | None = None, ready: bool = False) -> None:
        if self._stepping is not None:
            waiting = [slot for slot in self._slots_of(self._stepping) if slot.pending and (slot.ready or not ready)]
            self._update_together([slot for slot in waiting if self._goes_together(slot)], coefficient)
        super()._update_pending(coefficient, ready)

    def _goes_together(self, slot: Slot) -> bool:
        """Whether the gradient is small, stored, and used by a kernel."""
        assert isinstance(slot, ShardedSlot)
        return slot.bytes <= SMALL and slot.only_stored and not self._takes_all_or_nothing(slot)

    def _update_together(self, slots: Sequence[Slot], coefficient: Tensor | None = None) -> None:
        if not slots:
            return
        grads = []
        for slot in slots:
            slot.hold_gradient()
            assert slot.grad is not None
            grads.append(slot.grad)
            slot.drop()
        updates = [self._begin(slot, coefficient) for slot in slots]
        for slot, taken in zip(slots, apply_gradients(updates, grads, self.kernel, self._batches), strict=True):
            self._settle(slot, taken)

    def _apply(self, update: Update, factors: Sequence[Factors], grad: Tensor | None) -> bool:
        if not update.weight.numel():  # this rank has no rows
            return True
        return super()._apply(update, factors, grad)

    def _settle(self, slot: Slot, finite: bool) -> None:
        self._outcomes.append((slot, finite))

    def _norms(self, waiting: Sequence[Slot]) -> Norms:
        ranks = self.ranks
        assert ranks is not None
        return gradient_norms(waiting, lambda squares: sum_over_shards(squares, ranks))

    def _watch_flags(self, slots: Sequence[Slot]) -> None:
        assert self.ranks is not None
        if sys.exc_info()[0] is not None:  # the other ranks may be elsewhere
            return
        for scalars in self._scalars.values():
            if scalars.nonfinite is not None:
                any_rank(scalars.nonfinite, self.ranks)
        super()._watch_flags(slots)

    def _say_plan(self) -> None:
        if self._said_plan or not self.plan:
            return
        self._said_plan = True
        rank_zero_info(said(self.plan))
