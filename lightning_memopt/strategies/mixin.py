"""What the fused strategies share: arming the updater around Lightning's step, checks, checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer, do_nothing_closure
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.backward import Clip, NonFinite, Updater
from lightning_memopt.compat import refusal
from lightning_memopt.errors import UpdateError
from lightning_memopt.kernels import Kernel, Rounding, check_kernel
from lightning_memopt.rules.foreign import FOREIGN
from lightning_memopt.strategies import checkpointing
from lightning_memopt.strategies.guards import GradientGuards


class ForgeMixin(GradientGuards):
    """Optimizer updates inside backward, under Lightning's automatic and manual optimization.

    Lightning runs forward, ``zero_grad`` and backward of a step's last micro-batch inside `optimizer_step`, and those
    of the others outside it. So arming the updater there, and only there, is exact accumulation.

    Its arguments are those of `lightning_memopt.ForgeStrategy`; the rest go on to Lightning's strategy.
    """

    strategy_name: str
    updater_class: ClassVar[type[Updater]] = Updater

    def __init__(
        self,
        rounding: Rounding = "stochastic",
        kernel: Kernel = "auto",
        nonfinite: NonFinite = "raise",
        state_dtype: Literal["param", "float32"] = "param",
        seed: int = 0,
        checkpoint: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_choice("rounding", rounding, ("stochastic", "nearest"))
        check_choice("kernel", kernel, ("auto", "reference", "two_pass", "fused"))
        check_choice("nonfinite", nonfinite, ("raise", "skip"))
        check_choice("state_dtype", state_dtype, ("param", "float32"))
        self.updater = self.updater_class(rounding, kernel, nonfinite, state_dtype, seed)
        self.checkpoint = (checkpoint,) if isinstance(checkpoint, str) else tuple(checkpoint)
        self._checkpointed: list[tuple[torch.nn.Module, Any]] = []
        self._queues = True
        self._reported_skips = 0

    # ---------------------------------------------------------------- set-up

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Create the optimizers, refuse what cannot be exact, fill their states and hook the model."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        self._fused_optimizers.clear()
        self._prepare_optimizers()
        self._check(trainer, self.lightning_module)
        self.updater.attach(self.lightning_module, self.optimizers)
        # After the updater, so that a layer runs its fused forward again, and may itself be checkpointed.
        self._checkpointed = checkpointing.install(self.lightning_module, self.checkpoint)

    def _prepare_optimizers(self) -> None:
        """What must be done to fresh optimizers before the updater sees them."""

    def setup_precision_plugin(self) -> None:
        """Connect the precision plugin; the optimizers are in their final wrappers only after that."""
        super().setup_precision_plugin()
        self._guard()

    def _check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        where = f"strategy '{self.strategy_name}'"
        if self.updater.kernel == "fused" and self.root_device.type == "cpu":
            raise refusal("kernel 'fused' on a CPU", where)
        check_kernel(self.updater.kernel, self.root_device)
        precision = self.precision_plugin
        if precision.precision == "16-mixed":
            raise refusal("precision 16-mixed", where)
        if precision.precision == "16-true":
            raise refusal("precision 16-true", where)
        if type(precision) not in (Precision, HalfPrecision, MixedPrecision, DoublePrecision):
            raise refusal("other precision plugins", f"{type(precision).__name__} under {where}")
        # A module that zeroes or steps in its own way might drop micro-batches, so their gradients stay autograd's.
        self._queues = not any(is_overridden(hook, module) for hook in ("optimizer_zero_grad", "optimizer_step"))
        if any(isinstance(optimizer, _MockOptimizer) for optimizer in self.optimizers):
            raise refusal("configure_optimizers that returns None", type(module).__name__)
        for name, submodule in module.named_modules():
            if getattr(submodule, "sparse", False) and isinstance(
                submodule, (torch.nn.Embedding, torch.nn.EmbeddingBag)
            ):
                raise refusal("sparse embedding gradients", name)
        self._warn_of_hooks(trainer, module)
        for optimizer in self.optimizers:
            for option in ("foreach", "fused"):
                if any(group.get(option) for group in optimizer.param_groups):
                    rank_zero_info(f"{type(optimizer).__name__}({option}=True) has no effect: the update is fused.")
            self._warn_of_overruled_options(optimizer)

    def _warn_of_overruled_options(self, optimizer: Optimizer) -> None:
        """Say which options of this package's optimizers the strategy's own overrule.

        What the user left at its default cannot be told from what was passed, so only other values are meant.
        """
        for option, default in (("rounding", "stochastic"), ("seed", 0)):
            ours = getattr(self.updater, option)
            for value in {group.get(option, default) for group in optimizer.param_groups} - {default, ours}:
                rank_zero_warn(
                    f"{type(optimizer).__name__}({option}={value!r}) has no effect: {option}={ours!r} of strategy "
                    f"'{self.strategy_name}' holds. Set it there."
                )

    def teardown(self) -> None:
        """Report what the device still has to say and leave a plain module behind."""
        try:
            if sys.exc_info()[0] is None:
                self.updater.reports.poll(wait=True)
                self._log_skips()
                if self._fused_optimizers:
                    rank_zero_warn(
                        "the run ended without optimizer.step() after its last fused_step, which has updated the "
                        "weights: neither Lightning nor schedules have counted that step."
                    )
        finally:
            checkpointing.remove(self._checkpointed)
            self.updater.detach()
            self._unguard()
            super().teardown()

    # ---------------------------------------------------------------- a step

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure with the updater armed; the optimizer's own step then finds nothing left to do."""
        if closure is do_nothing_closure:
            self._close_manual_step(optimizer)
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        module, trainer = self.lightning_module, self._trainer
        assert module is not None
        clip = self._trainer_clip()
        self._clip_called = False

        def fused_closure() -> Any:
            result = closure()
            # Before the optimizer's own step, which must find no gradient: update what waits for the clip
            # coefficient and what this pass did not reach (earlier micro-batches, no loss). An overridden clipping
            # hook comes next and does so itself.
            if not self._clips_itself:
                self.updater.finish()
            return result

        self.updater.forget_uses()
        with self.updater.armed(optimizer, trainer.global_step, clip, deferred=self._clips_itself):
            result = super().optimizer_step(optimizer, fused_closure, model, **kwargs)
            if self._clips_itself and not self._clip_called:
                raise refusal("configure_gradient_clipping without self.clip_gradients", type(module).__name__)
        self._log_skips()
        return result

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's backward; inside an armed step it updates the weights."""
        module = self.lightning_module
        assert module is not None
        with self.updater.backward(closure_loss, queue=module.automatic_optimization and self._queues):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        """Drop what was queued for a step that will not come."""
        self.updater.drop_queue()
        super().on_exception(exception)

    def free_gathered(self) -> None:
        """Free copies of weights that were gathered from shards; on one device there are none."""

    # ---------------------------------------------------------------- manual optimization

    @contextmanager
    def open_manual_step(self, optimizer: Optimizer, clip: Clip) -> Iterator[None]:
        """The armed context behind `lightning_memopt.fused_step`."""
        if self.updater.dirty:
            raise refusal("an error in the backward pass that the module catches", "the fused_step before")
        if id(optimizer) in self._fused_optimizers:
            raise refusal("second fused_step before optimizer.step()")
        self._fused_optimizers.add(id(optimizer))
        try:
            with self.updater.armed(optimizer, self._trainer.global_step, clip):
                yield
        except BaseException:
            if not self.updater.dirty:  # then it is as if it had not begun
                self._fused_optimizers.discard(id(optimizer))
            raise

    def _close_manual_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._fused_optimizers:
            self._fused_optimizers.discard(id(optimizer))
            self._log_skips()
        elif any(param.grad is not None for group in optimizer.param_groups for param in group["params"]):
            raise refusal("manual optimization without fused_step", type(self.lightning_module).__name__)

    def _log_skips(self) -> None:
        skipped = self.updater.reports.skipped
        if skipped == self._reported_skips:
            return
        trainer = self._trainer
        if not self._reported_skips:
            rank_zero_warn(
                f"Non-finite gradients at step {trainer.global_step}: {skipped} parameter updates were left out. "
                "The running count is logged as 'skipped_updates'."
            )
        self._reported_skips = skipped
        trainer.callback_metrics["skipped_updates"] = torch.tensor(float(skipped))
        for logger in trainer.loggers:
            logger.log_metrics({"skipped_updates": float(skipped)}, step=trainer.global_step)

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save, unless a step broke off half-way: such weights must not look resumable.

        Raises:
            UpdateError: Weights are half-updated, and no interrupt is being handled (there it only warns, so as not to
                hide the error that caused it).
        """
        self.updater.reports.poll(wait=True)
        if self.updater.dirty:
            message = (
                f"{filepath} was not written: the last step broke off inside its backward pass, so some weights are "
                "one update ahead of others. Resume from the previous checkpoint."
            )
            module = self.lightning_module
            if module is not None and module.trainer.state.status == TrainerStatus.INTERRUPTED:
                rank_zero_warn(message)
                return
            raise UpdateError(message)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What a checkpoint holds of it; of a state that was cleared since the last step, what the next begins with."""
        self.updater.filled_states(optimizer)
        with self._states_to_save(optimizer):
            return super().optimizer_state(optimizer)

    def _states_to_save(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Inside, the optimizer's states, all of which are there, are in the form that a checkpoint holds."""
        return nullcontext()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load, then complete what plain optimizers leave out of their states.

        Raises:
            UnsupportedError: The state is that of another optimizer.
        """
        saved_states = list(zip(self.optimizers, checkpoint["optimizer_states"], strict=True))
        loadable = [self.updater.loadable(optimizer, saved) for optimizer, saved in saved_states]
        try:
            super().load_optimizer_state_dict({**checkpoint, "optimizer_states": loadable})
            for optimizer, saved in saved_states:
                self.updater.restore(optimizer, saved)
        except KeyError as error:  # torch's own look for what theirs have
            names = " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise refusal(FOREIGN, f"{names}, {error}") from error
        self.updater.mend()


def averaging_callbacks(trainer: pl.Trainer) -> list[str]:
    """Class names of the callbacks that average weights over steps."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [type(c).__name__ for c in callbacks if isinstance(c, (StochasticWeightAveraging, WeightAveraging))]


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise for a value that is none of the choices.

    Raises:
        ValueError: As said.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.")
