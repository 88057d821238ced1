"""SMET (arXiv 2606.00888): dynamic sparse training whose optimizer state exists for active weights only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_memopt.backward.linear import own_weight
from lightning_memopt.backward.slot import Slot
from lightning_memopt.backward.updater import Updater
from lightning_memopt.compat import refusal
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.sparsity.density import densities, sparse_layers
from lightning_memopt.sparsity.layer import Settings, SparseLayer
from lightning_memopt.sparsity.schedule import TopologySchedule
from lightning_memopt.sparsity.untouched import Untouched, check_count
from lightning_memopt.strategies.mixin import ForgeMixin, averaging_callbacks

# Steps before and after a topology update whose mean loss is logged.
WINDOW = 10


class SMET(pl.Callback):
    """Train linear layers sparsely under the fused strategies: most weights are zero, and which ones changes.

    Every `update_every` optimizer steps each layer drops its active weights of least magnitude and grows as many
    others, which start at zero. A grown weight has an age of its own, the number of updates it has taken; bias
    correction goes by that age, and its first `warmup_steps` updates are multiplied by age / `warmup_steps`, so it
    neither jumps nor disturbs the loss. Moments exist for active weights only.

    The learning rate of a layer of density d is that of its parameter group times d^(-p). Weight decay acts on active
    weights, with that learning rate and without the warm-up (coupled decay is part of the gradient and so warms up).
    The warm-up by age applies to every weight, so all of a run's sparse layers warm up when it begins.

    Masks and ages are part of the optimizer's state (`lightning_memopt.sparsity.state`), so a checkpoint resumes
    exactly. Logged around each update: ``smet/density``, ``smet/pruned``, ``smet/regrown`` (weights),
    ``smet/loss_before`` and, some steps later, ``smet/loss_after`` and ``smet/loss_jump``.

    Under ``strategy="forge_fsdp"`` each rank has mask, ages and moments of its own rows. `masks` and `ages` gather
    them, so all ranks must ask for them together.

    Args:
        density: Part of the weights that is active, in (0, 1]: of all sparse layers, or by pattern of the layer's name.
            A layer takes the first pattern that fits; one that none fits stays dense. A pattern with ``*``, ``?`` or
            ``[`` stands for the whole name; any other is a part of it.
        update_every: Optimizer steps between topology updates.
        prune_fraction: Part of a layer's active weights that the first updates replace.
        prune_schedule: How that part falls to zero when topology updates end: "cosine", "linear", or not ("constant").
        stop_at: Part of training after which the topology is fixed; None for never.
        growth: Grow at "random", or where the "gradient" of the step before the update was largest.
        distribution: "uniform", or "erk": layers of equal pattern share its density by (out + in) / (out in).
        include: Patterns of layers to make sparse; None for every ``nn.Linear`` but the output head.
        exclude: Patterns of layers to leave dense.
        warmup_steps: W, the updates over which a weight's updates rise to full size; 0 for none.
        lr_scaling: p = 0 ("none"), 0.5 ("sqrt") or 1 ("linear").
        bias_correction: By the "age" of a weight, or by the "step" of its parameter, as other methods do: the first
            updates of a grown weight are then several times too large.
        block_size: Prune and grow runs of so many consecutive weights of a row.
        seed: Seed of masks and random growth. Masks depend on it, the number of the update, the name of the parameter
            and the place of a weight, and on nothing else.

    Raises:
        UnsupportedError: An argument out of range; at set-up, what cannot be done exactly.
    """

    def __init__(
        self,
        density: float | dict[str, float] = 0.25,
        update_every: int = 100,
        prune_fraction: float = 0.2,
        prune_schedule: Literal["cosine", "constant", "linear"] = "cosine",
        stop_at: float | None = 0.75,
        growth: Literal["random", "gradient"] = "random",
        distribution: Literal["uniform", "erk"] = "uniform",
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        warmup_steps: int = 10,
        lr_scaling: Literal["none", "sqrt", "linear"] = "sqrt",
        bias_correction: Literal["age", "step"] = "age",
        block_size: int = 1,
        seed: int = 0,
    ) -> None:
        for name, value, choices in (
            ("prune_schedule", prune_schedule, ("cosine", "constant", "linear")),
            ("growth", growth, ("random", "gradient")),
            ("distribution", distribution, ("uniform", "erk")),
            ("lr_scaling", lr_scaling, ("none", "sqrt", "linear")),
            ("bias_correction", bias_correction, ("age", "step")),
        ):
            if value not in choices:
                raise UnsupportedError(f"SMET: {name}={value!r} is not one of {', '.join(map(repr, choices))}.")
        if update_every < 1 or block_size < 1 or warmup_steps < 0:
            raise UnsupportedError("SMET: update_every and block_size must be at least 1, warmup_steps at least 0.")
        if not 0 <= prune_fraction <= 1 or not (stop_at is None or 0 < stop_at <= 1):
            raise UnsupportedError("SMET: prune_fraction must lie in [0, 1] and stop_at in (0, 1].")
        densities({}, density, distribution)
        self.density, self.distribution = density, distribution
        self.update_every, self.prune_fraction, self.prune_schedule = update_every, prune_fraction, prune_schedule
        self.stop_at, self.include, self.exclude = stop_at, include, list(exclude or ())
        self.settings = Settings(growth, warmup_steps, lr_scaling, bias_correction, block_size, seed)
        if warmup_steps >= update_every:
            rank_zero_warn(
                f"SMET: warmup_steps={warmup_steps} is not below update_every={update_every}: weights meet the next "
                "topology update before their updates have full size, and are likely to be pruned again."
            )
        self._begin()

    def _begin(self) -> None:
        self.layers: dict[str, SparseLayer] = {}
        self._schedule: TopologySchedule | None = None
        self._targets: dict[int, tuple[str, float]] | None = None
        self._kept: dict[str, Tensor] = {}
        self._trainer: pl.Trainer | None = None
        self._step = 0
        self._untouched = Untouched()
        self._saved: set[str] = set()  # parameters that a checkpoint has masks of
        self._losses: deque[Tensor] = deque(maxlen=WINDOW)
        self._before: Tensor | None = None
        self._after: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy is for another run: it has the settings and no masks."""
        blank = SMET.__new__(SMET)
        blank._begin()
        return {key: value for key, value in self.__dict__.items() if key not in blank.__dict__}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        self.__dict__.update(settings)
        self._begin()

    # ---------------------------------------------------------------- what users read

    @property
    def masks(self) -> dict[str, Tensor]:
        """Active weights by parameter name: bool, shape of the parameter; of sharded ones, gathered from all ranks."""
        return {name: layer.mask() for name, layer in self.layers.items()}

    @property
    def ages(self) -> dict[str, Tensor]:
        """Ages by parameter name: int32, shape of the parameter; 0 for inactive weights.

        While a batch is processed, the age that its step goes by; between batches, that of the last step. A weight has
        age 1 in its first update, and from the moment it is grown. Gathered like `masks`.
        """
        return {name: layer.ages(self._coming(layer)) for name, layer in self.layers.items()}

    def memory(self) -> dict[str, int]:
        """Bytes of all sparse layers in this process: weight, moments, mask, index, ages."""
        total: dict[str, int] = {}
        for layer in self.layers.values():
            for part, size in layer.bytes().items():
                total[part] = total.get(part, 0) + size
        return total

    def _coming(self, layer: SparseLayer) -> bool:
        trainer = self._trainer
        if trainer is None or not trainer.training:
            return False
        batches = trainer.fit_loop.epoch_loop.batch_progress.total
        processed = batches.processed  # type: ignore[attr-defined]
        return batches.ready > processed and layer.stepped != trainer.global_step

    # ---------------------------------------------------------------- set-up

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Tell the strategy which weights will be sparse, before it creates the optimizer's states.

        Raises:
            UnsupportedError: The strategy does not fuse updates, there is another `SMET`, or a callback averages
                weights whose masks change.
            UpdateError: Masks of an earlier fit, which training goes on with, were written to.
        """
        if stage != "fit":
            return
        for layer in self.layers.values():
            check_count(layer)
        strategy = trainer.strategy
        if not isinstance(strategy, ForgeMixin):
            raise refusal("SMET under another strategy", f"SMET under {type(strategy).__name__}")
        if sum(isinstance(callback, SMET) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise UnsupportedError("SMET: only one per run; give several densities by pattern.")
        if self.prune_fraction and (names := averaging_callbacks(trainer)):
            raise refusal("weight averaging callbacks with SMET", names[0])
        self._kept = {name: layer.bits for name, layer in self.layers.items()}
        self.layers, self._targets, self._trainer = {}, None, trainer
        self._saved = set()
        self._losses.clear()
        self._before, self._after = None, []

        def sparse(slot: Slot) -> SparseLayer | None:
            return self._adopt(slot, pl_module)

        strategy.updater.sparsity = sparse

    def _adopt(self, slot: Slot, module: pl.LightningModule) -> SparseLayer | None:
        if self._targets is None:
            self._targets = self._find(module)
        layer_name, density = self._targets.get(id(slot.param), ("", 0.0))
        if not density:
            return None
        if any(own_weight(m) is slot.param for m in module.modules() if isinstance(m, torch.nn.Embedding)):
            raise refusal("SMET on a weight that is shared with an embedding", layer_name)
        layer = SparseLayer(slot, density, self.settings)
        layer.start(self._kept.get(slot.name))
        self.layers[slot.name] = layer
        return layer

    def _find(self, module: pl.LightningModule) -> dict[int, tuple[str, float]]:
        found = sparse_layers(module, self.include, self.exclude)
        shapes = {name: (m.out_features, m.in_features) for name, m in found.items()}
        each = densities(shapes, self.density, self.distribution)
        if not each:
            linear = ", ".join(name for name, m in module.named_modules() if isinstance(m, torch.nn.Linear)) or "none"
            raise UnsupportedError(
                f"SMET: no layer to make sparse: only nn.Linear can be, no other class (GPT-2's Conv1D, say). The "
                f"model's linear layers are: {linear}. By default the last one, the output head, stays dense; name the "
                "layers you mean in `include`."
            )
        targets: dict[int, tuple[str, float]] = {}
        for name, density in each.items():
            first, other = targets.setdefault(id(found[name].weight), (name, density))
            if density != other:
                raise refusal("SMET with two densities for one weight", f"{first} and {name}")
        return targets

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate what will be trained."""
        self._zero(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Zero inactive weights, unless a checkpoint has; say what is sparse.

        Raises:
            UnsupportedError: No layer is trained, or a schedule needs an end that training does not have.
        """
        if not self.layers:
            raise UnsupportedError("SMET: none of the layers to make sparse is trained by an optimizer.")
        self._zero(trainer)
        if self._saved and (new := [name for name in self.layers if name not in self._saved]):
            rank_zero_warn(
                f"SMET: {', '.join(new)} had no mask in the run that wrote the checkpoint. Masks were drawn at random, "
                "and what they leave out is zero from here on."
            )
        self._step = trainer.global_step
        total = trainer.estimated_stepping_batches
        if math.isinf(total) and (self.stop_at is not None or self.prune_schedule != "constant"):
            raise UnsupportedError(
                "SMET: training has no end, so neither stop_at nor a falling prune_schedule has a meaning. Set "
                "max_steps or max_epochs, or stop_at=None and prune_schedule='constant'."
            )
        end = total if self.stop_at is None else self.stop_at * total
        self._schedule = TopologySchedule(self.update_every, self.prune_fraction, self.prune_schedule, end)
        memory = self._memory_of_all()
        weights = sum(layer.runs.total for layer in self.layers.values())
        rank_zero_info(
            f"SMET: {len(self.layers)} layers with {weights:,} weights, {self._density():.3f} of them active; bytes "
            f"per weight: {memory['moments'] / weights:.2f} of moments, {memory['ages'] / weights:.2f} of ages, "
            f"{(memory['mask'] + memory['index']) / weights:.2f} of mask and index."
        )

    def _zero(self, trainer: pl.Trainer) -> None:
        lost = next((name for name, layer in self.layers.items() if name in self._saved and not layer.restored), None)
        if lost is not None:
            raise UnsupportedError(
                f"SMET: {lost} was sparse in the run that wrote the checkpoint, which lacks its mask: the optimizer's "
                "state was cleared after the fit. Save the checkpoint before that."
            )
        for layer in self.layers.values():
            layer.zero()
        assert isinstance(trainer.strategy, ForgeMixin)
        trainer.strategy.free_gathered()

    def _memory_of_all(self) -> dict[str, int]:
        """As `memory`, over all rows of the weights."""
        own, shards = self.memory(), [layer.shard for layer in self.layers.values()]
        shard = next((shard for shard in shards if shard.group is not None), shards[0])
        return {part: sum(shard.each(size)) for part, size in own.items()}

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the strategy as it was; masks and ages stay readable."""
        if stage == "fit" and isinstance(trainer.strategy, ForgeMixin):
            trainer.strategy.updater.sparsity = Updater.dense
            self._untouched.forget()
            for layer in self.layers.values():
                layer.rest()

    # ---------------------------------------------------------------- a step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Before the step whose gradient decides what grows, let its update collect the largest.

        Raises:
            UpdateError: Masks or ages were written to, here or in the hooks below.
        """
        assert self._schedule is not None
        self._untouched.check()
        self._untouched.note(self.layers.values())
        coming = range(trainer.global_step + 1, trainer.global_step + 1 + len(trainer.optimizers))
        step = next((step for step in coming if self._schedule.due(step)), None)
        if step is not None:
            for layer in self.layers.values():
                if layer.growth is None:
                    layer.collect(self._schedule.at(step))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Updates come next, which go by masks and ages."""
        self._untouched.check()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step that is due, change the topology; checkpoints of the step come later."""
        assert self._schedule is not None
        self._untouched.check()
        last, self._step = self._step, trainer.global_step
        if self._step == last:
            return
        self._watch(trainer, outputs)
        assert isinstance(trainer.strategy, ForgeMixin)
        slots = trainer.strategy.updater.slots
        # Of a weight that was taken out of its optimizer there is no state any more.
        self.layers = {name: layer for name, layer in self.layers.items() if layer.slot.param in slots}
        due = next((step for step in range(last + 1, self._step + 1) if self._schedule.due(step)), None)
        if due is not None and self.layers:
            self._change(trainer, due)

    def _change(self, trainer: pl.Trainer, step: int) -> None:
        assert self._schedule is not None and isinstance(trainer.strategy, ForgeMixin)
        fraction, event = self._schedule.at(step), step // self.update_every
        updater = trainer.strategy.updater
        changes = [layer.change(fraction, event, updater.storage(layer.slot)) for layer in self.layers.values()]
        self._untouched.note(self.layers.values())
        trainer.strategy.free_gathered()
        metrics: dict[str, float | Tensor] = {
            "smet/density": self._density(),
            "smet/pruned": float(sum(change.pruned for change in changes)),
            "smet/regrown": float(sum(change.grown for change in changes)),
        }
        if self._losses:
            self._before, self._after = self._mean(trainer, self._losses), []
            metrics["smet/loss_before"] = self._before
        self._log(trainer, metrics)

    def _watch(self, trainer: pl.Trainer, outputs: Any) -> None:
        """Follow the loss around updates."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            return
        loss = loss.detach().float().reshape(())
        self._losses.append(loss.clone())
        if self._before is None:
            return
        self._after.append(self._losses[-1])
        if len(self._after) == min(WINDOW, self.update_every):
            after = self._mean(trainer, self._after)
            self._log(trainer, {"smet/loss_after": after, "smet/loss_jump": after - self._before})
            self._before = None

    @staticmethod
    def _mean(trainer: pl.Trainer, losses: Iterable[Tensor]) -> Tensor:
        """Over steps and ranks."""
        mean = trainer.strategy.reduce(torch.stack(list(losses)).mean(), reduce_op="mean")
        assert isinstance(mean, Tensor)
        return mean

    def _log(self, trainer: pl.Trainer, metrics: Mapping[str, float | Tensor]) -> None:
        # Straight to the loggers: Lightning writes only every log_every_n_steps, and these are rare.
        numbers = {name: float(value) for name, value in metrics.items()}
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in numbers.items()})
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)

    def _density(self) -> float:
        return sum(x.active for x in self.layers.values()) / sum(x.runs.total for x in self.layers.values())

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Where to find each mask: parameter name -> (optimizer, number of the parameter) in the checkpoint."""
        return {"block_size": self.settings.run, "parameters": self._places()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Masks and ages are in the optimizer's state.

        Raises:
            UnsupportedError: The run began with another block size.
        """
        saved = state_dict["block_size"]
        if saved != self.settings.run:
            raise UnsupportedError(f"SMET: the run began with block_size={saved}, not {self.settings.run}.")
        self._saved = set(state_dict["parameters"])

    def _places(self) -> dict[str, list[int]]:
        places: dict[str, list[int]] = {}
        names = {layer.slot.param: name for name, layer in self.layers.items()}
        for number, optimizer in enumerate(self._trainer.optimizers if self._trainer is not None else ()):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            places |= {names[param]: [number, i] for i, param in enumerate(params) if param in names}
        return places
