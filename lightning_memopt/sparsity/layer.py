"""One sparse weight of a run: its mask, its ages, what an update needs of them, and its topology updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.kernels.active import Active, Ages, Largest
from lightning_memopt.kernels.reference import compute_dtype
from lightning_memopt.kernels.slabs import Factors, slab_rows
from lightning_memopt.kernels.sparse_gradient import accumulate, active_slabs, masked
from lightning_memopt.optim.shards import local
from lightning_memopt.rules.storage import Storage
from lightning_memopt.sparsity import state as states
from lightning_memopt.sparsity.bits import chunks, unpack
from lightning_memopt.sparsity.shard import Shard
from lightning_memopt.sparsity.state import BIRTHS, COHORT, INDEX, MASK, STEPS
from lightning_memopt.sparsity.topology import Runs, apply_mask, exchange, random_mask
from lightning_memopt.sparsity.untouched import check_count

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot

LrScaling = Literal["none", "sqrt", "linear"]
BiasCorrection = Literal["age", "step"]
Growth = Literal["random", "gradient"]
POWERS: Mapping[str, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True)
class Settings:
    """What all sparse layers of a run have in common; see `lightning_memopt.SMET`."""

    growth: Growth
    warmup_steps: int
    lr_scaling: LrScaling
    bias_correction: BiasCorrection
    run: int
    seed: int


@dataclass(frozen=True)
class Change:
    """What a topology update did to a layer, in weights."""

    pruned: int
    grown: int


class SparseLayer:
    """The sparse side of an updater's slot: of a sharded weight, the rows of this process.

    Args:
        slot: The parameter, [out, in].
        density: Part of its weights that is active, in (0, 1].
        settings: Of the run.

    Attributes:
        shard: Which of the weights are here.
        active: Number of active weights of the layer, the same at any time.
        lr_scale: Factor of the learning rate.
        growth: Where the coming update collects gradients of inactive weights, if that is the one that decides.
        stepped: Number of the optimizer step that last updated the weight.
        buffer: Gradients of active weights here, accumulated over micro-batches, [active], or None.
        stored: The same, handed over to the update.
        restored: Whether the mask came from a checkpoint.
    """

    def __init__(self, slot: Slot, density: float, settings: Settings) -> None:
        self.slot, self.density, self.settings = slot, density, settings
        out, columns = slot.param.shape
        if columns % settings.run:
            raise UnsupportedError(
                f"SMET: rows of {slot.name} have {columns} weights, which block_size={settings.run} does not divide. "
                "Use a block_size that does, or exclude the layer."
            )
        self.shard = Shard.of(slot.param)
        self.runs = Runs(slot.name, out * columns, settings.run, self.shard)
        self.keep = max(1, round(density * self.runs.count))
        self.active = self.keep * settings.run
        self.lr_scale = density ** -POWERS[settings.lr_scaling]
        self.growth: Largest | None = None
        self.stepped = -1
        self.buffer: Tensor | None = None
        self.stored: Tensor | None = None
        self.restored = False
        self._bits: Tensor | None = None
        self._said: set[str] = set()

    @property
    def param(self) -> Tensor:
        """The weight's rows that are here, without gradient."""
        return self.slot.weight

    @property
    def like(self) -> Tensor:
        """What the rule decides by how states are stored: the active weights of the layer."""
        return states.compact_like(self.param, self.active)

    @property
    def _shape(self) -> tuple[int, int]:
        """Rows that are here, and columns."""
        return self.param.shape[0], self.param.shape[1]

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of the weight; where a user cleared it, it begins anew, at the mask that it had."""
        state = self.slot.state
        # Not the mask that is remembered: there is none any more, or the state was moved or loaded.
        if state.get(MASK) is not self._bits:
            self.slot.updater.fill_state(self.slot)
        return state

    @property
    def own(self) -> int:
        """Number of active weights that are here; a topology update may change it."""
        return len(self.state[COHORT])

    @property
    def bits(self) -> Tensor:
        """The mask, packed."""
        return self.state[MASK]

    def scaled(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The parameter group with the learning rate of this layer."""
        return {**group, "lr": float(group["lr"]) * self.lr_scale}

    # ---------------------------------------------------------------- state

    def start(self, bits: Tensor | None) -> None:
        """Begin with the mask that an earlier fit of the weight ended with, if it still is one; else with a random one.

        Args:
            bits: Of the rows that are here.
        """
        fits = bits is not None and len(bits) == (self.shard.count + 7) // 8
        if bits is not None and fits:
            bits = bits.to(self.shard.device)
            fits = not self.param.reshape(-1)[~unpack(bits, 0, self.shard.count)].any()
        # Asked of all parts, whose answers may differ.
        self._bits = bits if all(self.shard.each(int(fits))) else None

    def fill(self, state: dict[str, Any], storage: tuple[Storage, ...]) -> None:
        """Add the mask to a state that has none, and remember it; whole moments that are there become compact.

        Raises:
            UnsupportedError: torch has loaded the state, which casts masks to the weight's dtype.
            UpdateError: The mask was replaced by another, which has not as many active weights as the state is of.
        """
        replaced = MASK in state and state[MASK] is not self._bits
        if MASK not in state:
            self._add_mask(state, storage)
        if state[MASK].dtype != torch.uint8:
            raise UnsupportedError(
                f"SMET: optimizer.load_state_dict cast the state of {self.slot.name}, its mask and all, to the weight's"
                " dtype. Let the Trainer load it, by ckpt_path, or clear the state to begin it anew."
            )
        self._bits = state[MASK]
        if replaced:
            check_count(self)

    def _add_mask(self, state: dict[str, Any], storage: tuple[Storage, ...]) -> None:
        bits = self._bits
        if bits is None:
            bits = random_mask(self.runs, self.keep, self.settings.seed, self.shard.device)
        if all(moment.name in state for moment in storage) and storage:
            whole = {key: local(value) if isinstance(value, Tensor) else value for key, value in state.items()}
            state |= states.restore(self.param, storage, bits, self.density, whole)
        else:
            state |= states.fresh(bits.to(self.shard.device), self.shard.count)

    def fresh(self, storage: tuple[Storage, ...]) -> dict[str, Any]:
        """The rule's own entries before the first step, for the active weights that are here."""
        rule, group = self.slot.rule, self.slot.group
        return states.initial(rule, group, storage, self._shape, self.own, self.density, self.param)

    def restore(self, state: dict[str, Any], storage: tuple[Storage, ...], saved: Mapping[str, Any]) -> None:
        """Fill the state from a checkpoint, of which `saved` holds the rows that are here.

        Raises:
            UnsupportedError: The checkpoint's mask has another number of active weights.
        """
        if not saved:
            return
        self.restored = MASK in saved
        if not self.restored:
            self.fill(state, storage)
        state |= states.restore(self.param, storage, state.get(MASK, torch.empty(0)), self.density, saved)
        active = sum(self.shard.each(len(state[COHORT])))
        if active != self.active:
            raise UnsupportedError(
                f"SMET: {self.slot.name} has {active} active weights in the checkpoint and "
                f"{self.active} by density {self.density:.4g}. Resume with the density the run began with."
            )

    def zero(self) -> None:
        """Set inactive weights to zero."""
        apply_mask(self.param, self.bits)

    def rest(self) -> None:
        """At the end of a run: remember the mask in host memory, where the optimizer's states go as well."""
        if MASK not in self.slot.state:  # cleared in the last step; a checkpoint may still be written
            self.slot.updater.fill_state(self.slot)
        if self._bits is not None:
            self._bits = self._bits.cpu()

    # ---------------------------------------------------------------- an update

    def update(self) -> Active:
        """What the kernels need."""
        state, ages = self.state, self.slot.ages
        assert ages is not None
        return Active(state[MASK], state[INDEX], state[COHORT], ages, self.growth, self.stored)

    @property
    def accumulates(self) -> bool:
        """Whether gradients of active weights are all that is wanted of this step's."""
        return self.growth is None

    def fold(self, factors: Sequence[Factors], dtype: torch.dtype) -> bool:
        """Add the gradient to `buffer`; returns whether it is the first part."""
        shape, rows = tuple(self.param.shape), slab_rows(self.param.shape[1], self.param.device)
        first, buffer = self.buffer is None, self._buffer(dtype)
        if factors:
            accumulate(buffer, active_slabs(shape, self.bits, factors, None, None, dtype, rows))
        return first

    def fold_blocks(self, blocks: Iterable[tuple[int, int, Tensor]], dtype: torch.dtype) -> None:
        """Add a gradient that comes in parts, (first row, row past the last, gradient of these rows), to `buffer`."""
        accumulate(self._buffer(dtype), masked(blocks, self.bits))

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.zeros(self.own, dtype=dtype, device=self.shard.device)
        return self.buffer

    def ages_of_step(self) -> Ages:
        """Scalars of every cohort for the update about to be taken."""
        slot, settings = self.slot, self.settings
        group, state = self.scaled(slot.group), self.state
        rule = slot.rule
        names = rule.aged_scalars if settings.bias_correction == "age" else ()
        rows = []
        for age in states.ages(state):
            scalars = rule.scalars(group, {**rule.aged(group, state, age + 1)}) if names else {}
            rows.append((self.ramp(age + 1), *(scalars[name] for name in names)))
        return Ages(names, rows)

    def ages_key(self) -> tuple[Any, ...]:
        """Layers with equal keys share `ages_of_step`."""
        state = self.state
        return (id(self.slot.group), self.slot.rule.cache_key(state), self.lr_scale, state[STEPS], state[BIRTHS])

    def ramp(self, age: int) -> float:
        """Factor of the `age`-th update of a weight."""
        return min(1.0, age / self.settings.warmup_steps) if self.settings.warmup_steps > 1 else 1.0

    def counters(self) -> dict[str, Any]:
        """The state's entries that count updates, beside those of the rule."""
        return {STEPS: self.state[STEPS]}

    def advance(self, step: int) -> None:
        """Count an update that was taken, in optimizer step number `step`."""
        self.state[STEPS] += 1
        self.stepped = step

    def collected(self) -> None:
        """The update has seen all of the gradient: of what was collected, keep what a topology update needs."""
        if self.growth is not None:
            self.growth.finish()

    # ---------------------------------------------------------------- topology

    def exchanged(self, fraction: float) -> int:
        """Runs that an event with this prune fraction replaces: no more than there is room for."""
        return min(round(fraction * self.keep), self.runs.count - self.keep)

    def collect(self, fraction: float) -> None:
        """Prepare growth by gradient: the next update collects the largest gradients of inactive weights."""
        k = self.exchanged(fraction)
        if self.settings.growth == "gradient" and k:
            self.growth = Largest(k, self.settings.run)

    def change(self, fraction: float, event: int, storage: tuple[Storage, ...]) -> Change:
        """Prune and grow.

        Raises:
            UpdateError: The mask was written to.
        """
        k, growth, self.growth = self.exchanged(fraction), self.growth, None
        if k < round(fraction * self.keep):
            self._say(
                f"only {self.runs.count - self.keep} of {self.runs.count} places are free at density "
                f"{self.density:.4g}, so topology updates exchange no more than that."
            )
        elif not k and fraction:
            self._say(f"a fraction of {fraction:.3g} of {self.keep} places is less than one: nothing is exchanged.")
        if not k:
            return Change(0, 0)
        seen = 0 if growth is None or growth.runs is None else len(growth.runs)
        if self.settings.growth == "gradient" and sum(self.shard.each(seen)) < k:
            self._say("it had no gradient in the step before a topology update, which leaves it as it is.")
            return Change(0, 0)
        check_count(self)
        state, param = self.state, self.param
        bits = exchange(param, state[MASK], self.runs, k, self.settings.seed, event, growth)
        states.change_mask(state, storage, bits, self._shape, compute_dtype(param), self.shard)
        self.zero()
        count = k * self.settings.run
        return Change(count, count)

    def _say(self, message: str) -> None:
        kind = message[:9]
        if kind not in self._said:
            self._said.add(kind)
            rank_zero_info(f"SMET: {self.slot.name}: {message}")

    # ---------------------------------------------------------------- what users see

    def mask(self) -> Tensor:
        """Bool, shape of the whole weight."""
        return self.slot.whole(self._mask().view(torch.uint8)).view(torch.bool)

    def _mask(self) -> Tensor:
        """Of the rows that are here."""
        flags = torch.zeros(self.shard.count, dtype=torch.bool, device=self.shard.device)
        for start, stop in chunks(len(flags)):
            flags[start:stop] = unpack(self.bits, start, stop)
        return flags.view(self.param.shape)

    def ages(self, coming: bool) -> Tensor:
        """Int32, shape of the whole weight; 0 where inactive.

        Args:
            coming: The age in the update to come, instead of in the last one (a weight that has had none: 1).
        """
        state = self.state
        ages = [max(1, age + 1 if coming else age) for age in states.ages(state)]
        values = torch.tensor(ages, dtype=torch.int32, device=self.shard.device)[state[COHORT].int()]
        result = torch.zeros(self.param.shape, dtype=torch.int32, device=self.shard.device)
        result[self._mask()] = values
        return self.slot.whole(result)

    def bytes(self) -> dict[str, int]:
        """Bytes of the weight and of what belongs to it, as allocated by this process."""
        state = self.state
        own = {"mask": state[MASK].nbytes, "index": state[INDEX].nbytes, "ages": state[COHORT].nbytes}
        others = [local(v) for k, v in state.items() if k not in states.ENTRIES and isinstance(v, Tensor) and v.dim()]
        return {"weight": self.param.nbytes, "moments": sum(tensor.nbytes for tensor in others), **own}
