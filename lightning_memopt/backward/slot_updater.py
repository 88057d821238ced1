"""The updates of parameters whose gradients are complete: built once for many steps, taken, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.backward.keeper import SlotKeeper
from lightning_memopt.backward.nonfinite import NonFinite, NonFiniteReports
from lightning_memopt.backward.slot import Slot, check_strided, count_updates
from lightning_memopt.backward.standing import Standing
from lightning_memopt.errors import UpdateError
from lightning_memopt.kernels import (
    Factors,
    Kernel,
    Rounding,
    Update,
    apply_embedding,
    apply_factors,
    apply_gradient,
    apply_gradients,
)
from lightning_memopt.kernels.batches import Batches


class SlotUpdater(SlotKeeper):
    """The part of an `Updater` that takes updates; when it may, the updater knows.

    Args:
        rounding, kernel, nonfinite, state_dtype: See `Updater`.
    """

    def __init__(
        self, rounding: Rounding, kernel: Kernel, nonfinite: NonFinite, state_dtype: Literal["param", "float32"]
    ) -> None:
        super().__init__(state_dtype)
        self.rounding, self.kernel = rounding, kernel
        self.reports = NonFiniteReports(nonfinite)
        self._stepping: Optimizer | None = None
        self._step = 0
        self._reentrant: bool | None = None  # not known before the first pass
        self._taken: list[Slot] = []
        self._batches = Batches()
        self._standing: dict[Optimizer, Standing] = {}
        self._checked = False

    def detach(self) -> None:
        """As `SlotKeeper.detach`; flags that have not arrived are forgotten."""
        super().detach()
        self.reports.clear()
        self._batches.clear()
        self._standing.clear()

    @torch.no_grad()
    def _update_pending(self, coefficient: Tensor | None = None, ready: bool = False) -> None:
        """Update what waits; at the end of a pass only what it reached, as another pass may reach the rest."""
        if self._stepping is None:
            return
        waiting = [slot for slot in self._slots_of(self._stepping) if slot.pending and (slot.ready or not ready)]
        small = {slot for slot in waiting if slot.small and slot.plain}
        for slot in waiting:
            if slot not in small:
                self._update(slot, coefficient)
        self._update_together([slot for slot in waiting if slot in small], coefficient)

    def _update_together(self, slots: Sequence[Slot], coefficient: Tensor | None = None) -> None:
        """Update parameters that are entire and whose gradients autograd stored."""
        if not slots:
            return
        grads = [grad for slot in slots if (grad := slot.take_gradient()) is not None]
        updates = [self._begin(slot, coefficient) for slot in slots]
        taken = apply_gradients(updates, grads, self.kernel, self._batches)
        if slots[0].param.is_cuda:
            torch.autograd.graph.increment_version([slot.param for slot in slots])
        self._taken += [slot for slot, finite in zip(slots, taken, strict=True) if finite]
        for slot, finite in zip(slots, taken, strict=True):
            if not finite:
                self.reports.report(slot.name, self._step)

    def _update(self, slot: Slot, coefficient: Tensor | None = None) -> None:
        if slot.plain:
            grad = slot.take_gradient()
            if grad is not None:
                self._settle(slot, apply_gradient(self._begin(slot, coefficient), grad, self.kernel))
            return
        pair = slot.take_pair()
        if pair is not None:
            update = self._begin(slot, coefficient)
            self._settle(slot, apply_factors(update, [pair], None, self.kernel))
            return
        slot.hold_gradient()
        lookup = slot.only_lookup()
        if lookup is not None:
            slot.drop()
            dy, indices, padding = lookup
            update = self._begin(slot, coefficient)
            self._settle(slot, apply_embedding(update, indices, dy, self.kernel, None if padding < 0 else padding))
            return
        factors, grad = slot.collect()
        accumulated = slot.sparse is not None and slot.sparse.stored is not None
        if not factors and grad is None and not accumulated:
            return
        check_strided(slot.name, grad)
        update = self._begin(slot, coefficient)
        finite = self._sound(slot, factors, grad) and self._apply(update, factors, grad)
        self._settle(slot, finite)

    def _apply(self, update: Update, factors: Sequence[Factors], grad: Tensor | None) -> bool:
        if factors or grad is None or update.active is not None:
            return apply_factors(update, factors, grad, self.kernel)
        return apply_gradient(update, grad, self.kernel)

    def _begin(self, slot: Slot, coefficient: Tensor | None = None) -> Update:
        """The one update of the slot's parameter in this step."""
        if slot.updated:
            raise UpdateError(
                f"{slot.name} received another gradient after its update in step {self._step}. "
                + (
                    "It is used without its layer in a segment of reentrant checkpointing; pass use_reentrant=False."
                    if self._reentrant
                    else "Only one backward pass may run in a fused step: add the losses, or run the others before it, "
                    "outside `fused_step`."
                )
            )
        slot.updated = True
        return self._as_update(slot, coefficient)

    def _as_update(self, slot: Slot, coefficient: Tensor | None = None) -> Update:
        """The step's update of the slot's parameter, as kernels take it."""
        update = slot.update
        if update is None or not self._checked or self._moved(slot):
            return self._build(slot, coefficient)
        update.scalars, update.key, update.coefficient = slot.scalars, slot.key, coefficient
        return update

    @staticmethod
    def _moved(slot: Slot) -> bool:
        """Whether the weight lies elsewhere than when its update was built."""
        return slot.param.data_ptr() != slot.placed

    def _stands(self, slot: Slot) -> bool:
        """Whether the slot's update may serve for several steps."""
        return slot.entire

    def _check_updates(self) -> None:
        """See to it that `Slot.update` is right until other code than ours runs."""
        assert self._stepping is not None
        slots = [slot for slot in self._slots_of(self._stepping) if self._stands(slot)]
        standing = self._standing.get(self._stepping)
        if standing is None or standing.slots != slots:
            standing = self._standing[self._stepping] = Standing(slots, self._build)
        standing.check()
        self._checked = True

    def _build(self, slot: Slot, coefficient: Tensor | None = None) -> Update:
        return Update(
            name=slot.name,
            weight=slot.weight,
            state=slot.update_state,
            rule=slot.rule,
            tile=slot.tile,
            storage=self.storage(slot),
            scalars=slot.scalars,
            key=slot.key,
            rounding=self.rounding,
            coefficient=coefficient,
            offset=slot.offset,
            row=slot.row,
            row_key=slot.row_key,
            nonfinite=slot.nonfinite,
            memory=slot.memory,
            active=None if slot.sparse is None else slot.sparse.update(),
        )

    def _sound(self, slot: Slot, factors: Sequence[Factors], grad: Tensor | None) -> bool:
        """Whether the update may be taken as far as others know; kernels look at the gradient themselves."""
        return True

    def _settle(self, slot: Slot, finite: bool) -> None:
        """Note an update that was taken, or report that it was left out."""
        if slot.param.is_cuda:
            # Kernels write behind torch's back: let autograd see that tensors it saved have changed.
            torch.autograd.graph.increment_version(slot.weight)
        if finite:
            self._taken.append(slot)
            if slot.sparse is not None:
                slot.sparse.collected()
        else:
            self.reports.report(slot.name, self._step)

    def _count(self) -> None:
        """Count the updates that were taken."""
        taken, self._taken = self._taken, []
        count_updates(taken, self._step)

    def forget_taken(self) -> None:
        """Updates that were noted since the last count were only recorded, in a capture that broke off."""
        self._taken = []

    def note_replay(self, slots: Sequence[Slot]) -> None:
        """A captured step has taken the updates of these: count them."""
        for slot in slots:
            slot.updated = True
        count_updates(slots, self._step)
