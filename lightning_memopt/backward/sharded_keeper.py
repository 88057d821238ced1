"""Which sharded parameters a run updates, and what their optimizers keep of this rank's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lightning_memopt.backward.exchange import Ranks
from lightning_memopt.backward.sharded_slot import ShardedSlot
from lightning_memopt.backward.sharded_states import restored, spread
from lightning_memopt.backward.slot import Slot
from lightning_memopt.backward.updater import Updater
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.rules import Rule
from lightning_memopt.rules.storage import Storage

if TYPE_CHECKING:
    from lightning_memopt.strategies.sharded_checkpoint import SavedOptimizer


class ShardedKeeper(Updater):
    """The part of a `ShardedUpdater` that knows parameters and states.

    Attributes:
        ranks: Who trains together.
        path: A number for the layers that were called in forward, in order, with how many tokens each.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks: Ranks | None = None
        self.path = 0
        self._unsharded: Mapping[nn.Parameter, tuple[nn.Parameter, int]] = {}

    def _new_slot(
        self, name: str, param: nn.Parameter, optimizer: Optimizer, group: dict[str, Any], rule: Rule
    ) -> Slot:
        unsharded = self._unsharded.get(param)
        if unsharded is None:
            raise UnsupportedError(
                f"{name} is trained but not sharded, so its gradient would differ between ranks. Call fully_shard on a "
                "module that holds it, or do not shard in configure_model and let the strategy do so."
            )
        assert self.ranks is not None
        return ShardedSlot(
            self, name, param, optimizer, group, rule, unsharded[0], self.ranks, len(self.slots), unsharded[1]
        )

    def _let_go(self, slot: Slot) -> None:
        """Refused, as ranks speak of parameters by number."""
        raise UnsupportedError(
            f"{slot.name} was taken out of its optimizer. Freeze it instead: parameter.requires_grad_(False)."
        )

    def _spread(self, slot: Slot, storage: Sequence[Storage], state: dict[str, Any]) -> None:
        spread(slot, storage, state)

    def load(self, optimizer: Optimizer, saved: SavedOptimizer) -> None:
        """Make saved options and states the optimizer's own; parameters without a saved state get a fresh one.

        Raises:
            UnsupportedError: A moment was saved in a form that the optimizer does not keep.
        """
        for group, options in zip(optimizer.param_groups, saved.groups, strict=True):
            group.update(options)
        self._adopt(optimizer)
        for param, entries in saved.states.items():
            slot = self.slots.get(param)
            if slot is None:
                continue
            if slot.sparse is not None:
                slot.sparse.restore(slot.state, self.storage(slot), entries)
                self._spread(slot, self.storage(slot), slot.state)
            else:
                state = restored(slot, self.storage(slot), entries)
                slot.state.clear()
                slot.state.update(state)
            self.fill_state(slot)

    def forget_uses(self) -> None:
        """As for one device."""
        super().forget_uses()
        self.path = 0
