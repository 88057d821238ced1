"""What every language-model module here shares: losses, metrics, optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from lightning_memopt.errors import MemOptError
from lightning_memopt.models.linear_cross_entropy import IGNORE_INDEX, loss_at_head
from lightning_memopt.optim.decay import decay_groups

Schedule = Literal["cosine", "constant"]


class CausalLM(pl.LightningModule):
    """Base of the language-model modules.

    A batch is ``{"input_ids": int64 [B, T], "targets": int64 [B, T]}``, the targets being the inputs moved on
    by one token, or as Hugging Face's collators make it, with ``labels`` in their place: the inputs not moved. Where
    either is -100, nothing is to be predicted. An ``attention_mask`` may be there too, see the modules.

    Logs ``train_loss`` per step, and ``val_loss`` and ``val_ppl`` per validation run (``test_loss`` and ``test_ppl`` in
    ``Trainer.test``): the mean over all tokens, in nats, and its exponential.

    Args:
        optimizer: Makes the optimizer from the parameter groups; None for ``torch.optim.AdamW`` with its
            defaults.
        schedule: Learning rate over the optimizer steps of the whole run, after the warm-up: "cosine" falls
            to ``min_lr_ratio``, "constant" stays.
        warmup_steps: Optimizer steps over which the learning rate rises linearly from 0.
        min_lr_ratio: Where the cosine ends, as a part of the optimizer's own learning rate.
    """

    def __init__(
        self,
        optimizer: OptimizerCallable | None,
        schedule: Schedule,
        warmup_steps: int,
        min_lr_ratio: float,
    ) -> None:
        super().__init__()
        self.make_optimizer = optimizer
        self.schedule = schedule
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        self.eval_loss = MeanMetric()
        # Where the cosine ends, and where it ended in the run that this one goes on from.
        self._end: int | None = None
        self._resumed_end: int | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids the model knows."""

    @property
    def loss_head(self) -> nn.Linear | None:
        """The layer whose output ``forward`` returns as it is, for a loss that never holds all logits; None without."""
        return None

    @abstractmethod
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        stop_id: int | None,
    ) -> Tensor:
        """Continue one sequence.

        Args:
            input_ids: The prompt, int64 [T], at least one token.
            max_new_tokens: Most tokens to add.
            temperature: Divides the logits before sampling; 0 takes the likeliest token.
            top_k: Sample among the k likeliest tokens; None for all.
            stop_id: Token after which to stop, not part of the answer; None for never.

        Returns:
            The new tokens, int64 [at most ``max_new_tokens``].
        """

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write config and weights (safetensors) into an existing ``folder``."""

    def setup(self, stage: str) -> None:
        """Refuse data whose token ids the model has no embedding for."""
        data_vocab = getattr(getattr(self.trainer, "datamodule", None), "vocab_size", None)
        if data_vocab is not None and data_vocab > self.vocab_size:
            raise MemOptError(
                f"The tokenizer has {data_vocab} token ids but the model only {self.vocab_size}: "
                f"set the model's vocab_size to {data_vocab}, or data.tokenizer to the model's own."
            )

    def on_train_start(self) -> None:
        """Say so where a resumed run's cosine ends elsewhere now, as the learning rate then jumps."""
        old, new = self._resumed_end, self._end
        if old is None or new is None or old == new:
            return
        step = self.trainer.global_step
        before, after = (lr_factor(step, end, self.warmup_steps, self.min_lr_ratio) for end in (old, new))
        rank_zero_info(
            f"The cosine of the resumed run was to end at step {old}, and now ends at step {new}: at step {step} the "
            f"learning rate goes from {before:.2g} to {after:.2g} times the optimizer's own."
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of one batch, in nats per token."""
        loss = self._token_loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add one batch to the validation loss."""
        self.eval_loss.update(self._token_loss(batch), weight=(targets_of(batch) != IGNORE_INDEX).sum())

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add one batch to the test loss."""
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The likeliest next token after each position, int64 [B, T]."""
        return self._run(batch).argmax(dim=-1)

    def on_validation_epoch_start(self) -> None:
        """Keep the sums in float32."""
        # Half precision casts them with the weights, and a sum in bf16 soon stops growing.
        self.eval_loss.set_dtype(torch.float32)

    def on_test_epoch_start(self) -> None:
        """As before a validation run."""
        self.on_validation_epoch_start()

    def on_validation_epoch_end(self) -> None:
        """Log the mean over the validation run."""
        self._log_eval("val")

    def on_test_epoch_end(self) -> None:
        """Log the mean over the test run."""
        self._log_eval("test")

    def configure_optimizers(self) -> Any:
        """The optimizer, without decay for biases and norms, and a schedule by optimizer step."""
        optimizer = (self.make_optimizer or torch.optim.AdamW)(decay_groups(self))
        if self.schedule == "constant" and not self.warmup_steps:
            return optimizer
        total = self.trainer.estimated_stepping_batches
        if self.schedule == "cosine" and math.isinf(total):
            raise MemOptError(
                'schedule="cosine" needs an end: set trainer.max_steps or max_epochs, or schedule="constant".'
            )
        self._end = int(total) if self.schedule == "cosine" else None
        factor = partial(
            lr_factor,
            total_steps=self._end,
            warmup_steps=self.warmup_steps,
            min_ratio=self.min_lr_ratio,
        )
        scheduler = LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the class, so that the checkpoint alone is enough to rebuild the module, and the end of the schedule."""
        checkpoint["module_class"] = type(self).__name__
        checkpoint["schedule_end"] = self._end

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember where the run that is resumed was to end."""
        self._resumed_end = checkpoint.get("schedule_end")

    def _token_loss(self, batch: dict[str, Tensor]) -> Tensor:
        targets = targets_of(batch)
        if self.loss_head is not None:
            with loss_at_head(self.loss_head, targets):
                return self._run(batch)
        # float32 whatever the weights are: a bf16 sum over thousands of tokens has two digits.
        logits = self._run(batch).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)

    def _run(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The network on a batch's inputs."""
        mask = batch.get("attention_mask")
        return (
            self._run_whole(batch["input_ids"])
            if mask is None or masks_nothing(mask)
            else self(batch["input_ids"], mask)
        )

    def _run_whole(self, input_ids: Tensor) -> Tensor:
        """The network on rows without padding."""
        return self(input_ids)

    def _log_eval(self, prefix: str) -> None:
        loss = self.eval_loss.compute()
        self.eval_loss.reset()
        self.log_dict({f"{prefix}_loss": loss, f"{prefix}_ppl": loss.exp()}, prog_bar=True)


def targets_of(batch: Mapping[str, Tensor]) -> Tensor:
    """What to predict after each position, int64 [B, T]: the batch's ``targets``, or its ``labels`` moved on by one.

    Raises:
        MemOptError: The batch has neither.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch or not {"targets", "labels"} & batch.keys():
        found = "{" + ", ".join(map(str, batch)) + "}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise MemOptError(
            "A batch must be a dictionary of input_ids and either targets (the ids moved on by one token) or labels "
            f"(not moved, as Hugging Face's collators make them), not {found}."
        )
    if "targets" in batch:
        return batch["targets"]
    return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)


def masks_nothing(mask: Tensor) -> bool:
    """Whether an attention mask has no zeros; one that cannot be looked at, as a CUDA graph is captured, may have some.

    Looking makes the host wait for the GPU, as transformers does at every mask.
    """
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing()) and bool(mask.all())


def lr_factor(step: int, total_steps: int | None, warmup_steps: int, min_ratio: float) -> float:
    """Factor of the learning rate at a step: linear from 0, then a half cosine down to ``min_ratio``.

    Args:
        step: Optimizer steps done.
        total_steps: Steps of the whole run, where the cosine ends; None for no cosine.
        warmup_steps: Steps of the linear rise; the first step already has 1 / warmup_steps.
        min_ratio: The factor at the end.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if total_steps is None:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
