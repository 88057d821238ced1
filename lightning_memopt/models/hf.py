"""Any Hugging Face causal language model as a Lightning module."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_memopt.errors import MemOptError
from lightning_memopt.models import hf_layers
from lightning_memopt.models.causal_lm import CausalLM, Schedule

# Architectures whose logits are the output projection of the last hidden states and no more: no scale, no soft cap.
PLAIN_HEADS = frozenset(
    ("gemma", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2")
)


class MissingExtraError(MemOptError, ImportError):
    """A package is needed that only one of the extras installs."""


class HFCausalLM(CausalLM):
    """Fine-tunes or trains a causal language model of the transformers library.

    The weights are loaded as float32 (torch's default dtype) whatever the folder holds; the Trainer's
    ``precision`` decides what they are trained in.

    A batch has ``input_ids``, int64 [B, T], and either ``targets``, the ids moved on by one token, or ``labels``, not
    moved, as Hugging Face's collators make them; -100 where nothing is to be predicted. An ``attention_mask`` with
    zeros goes to the model; one without is better left out, as looking at it makes the host wait for the GPU.

    Args:
        name_or_path: Folder of a saved model, or its name on the hub; not needed with an `architecture`.
        from_config: Read only the configuration and start from random weights.
        architecture: A model configuration with its ``model_type``; when given, ``name_or_path`` is not read and the
            weights are random. Checkpoints fill it in, so that one loads where the original folder is gone.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them.
        chunked_loss: Form the loss a few tokens at a time instead of holding all logits
            (`lightning_memopt.models.linear_cross_entropy`); has an effect where the architecture's logits are the
            plain output projection.
        fused_layers: Norms, gated feed-forward layers and causal masks by formulas that hold less and launch fewer
            kernels (`lightning_memopt.models.hf_layers`), where the architecture has them; equal up to rounding.
        optimizer: Makes the optimizer from the parameter groups; None for ``torch.optim.AdamW`` with its
            defaults.
        schedule: Learning rate over the optimizer steps of the whole run, after the warm-up: "cosine" falls
            to ``min_lr_ratio``, "constant" stays.
        warmup_steps: Optimizer steps over which the learning rate rises linearly from 0.
        min_lr_ratio: Where the cosine ends, as a part of the optimizer's own learning rate.

    Raises:
        MissingExtraError: transformers is not installed.
        MemOptError: The folder or hub name holds no causal language model that transformers can load.
    """

    def __init__(
        self,
        name_or_path: str = "",
        from_config: bool = False,
        architecture: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
        chunked_loss: bool = True,
        fused_layers: bool = True,
        optimizer: OptimizerCallable | None = None,
        schedule: Schedule = "cosine",
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__(optimizer, schedule, warmup_steps, min_lr_ratio)
        # The optimizer may be any callable, which a checkpoint that loads safely cannot hold.
        self.save_hyperparameters(ignore=["optimizer"])
        self.chunked_loss = chunked_loss
        self._fused_layers = False
        self.net = _build(name_or_path, from_config, architecture)
        self.fused_layers = fused_layers
        if gradient_checkpointing:
            self.net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # A trip through JSON leaves plain types only, which load with `weights_only=True`.
        self.hparams["architecture"] = json.loads(self.net.config.to_json_string(use_diff=False))

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model knows."""
        return self.net.get_input_embeddings().num_embeddings

    @property
    def fused_layers(self) -> bool:
        """Whether the layers of `lightning_memopt.models.hf_layers` are in place."""
        return self._fused_layers

    @fused_layers.setter
    def fused_layers(self, fused: bool) -> None:
        hf_layers.remove(self.net)
        if fused:
            hf_layers.install(self.net)
        self._fused_layers = fused

    @property
    def loss_head(self) -> nn.Linear | None:
        """The output projection, where logits are nothing more."""
        if not self.chunked_loss or self.net.config.model_type not in PLAIN_HEADS:
            return None
        head = self.net.get_output_embeddings()
        return head if type(head) is nn.Linear else None

    def setup(self, stage: str) -> None:
        """As the base class; and say which part of a mixture of experts' loss is left out."""
        super().setup(stage)
        if stage == "fit" and getattr(self.net.config, "output_router_logits", False):
            rank_zero_warn(
                "The model's configuration asks for a router loss (output_router_logits), which balances its experts; "
                "HFCausalLM trains on the cross-entropy alone."
            )

    def _run_whole(self, input_ids: Tensor) -> Tensor:
        if not self.fused_layers or self.net.config.model_type not in PLAIN_HEADS:
            return super()._run_whole(input_ids)
        with hf_layers.causal_without_looking(self.net, input_ids.shape[1]):
            return super()._run_whole(input_ids)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of ids [B, T], where the mask, [B, T], has zeros without a look at those tokens."""
        return self.net(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        stop_id: int | None = None,
    ) -> Tensor:
        """Continue one sequence with transformers' own generation; see the base class."""
        out = self.net.generate(
            input_ids[None],
            attention_mask=torch.ones_like(input_ids)[None],
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            temperature=temperature if temperature > 0 else None,
            # transformers reads 0 as "all tokens", and None as its own default of 50.
            top_k=(top_k or 0) if temperature > 0 else None,
            eos_token_id=stop_id,
            pad_token_id=stop_id if stop_id is not None else 0,
        )[0, len(input_ids) :]
        return out[:-1] if stop_id is not None and len(out) and out[-1].item() == stop_id else out

    def export(self, folder: Path) -> None:
        """Write what ``AutoModelForCausalLM.from_pretrained`` loads."""
        self.net.save_pretrained(folder)


def import_transformers() -> ModuleType:
    """The transformers library, or an error that names the extra which installs it."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            "Hugging Face models and tokenizers need transformers: pip install 'lightning-memopt[hf]'."
        ) from error
    return transformers


def _build(name_or_path: str, from_config: bool, architecture: dict[str, Any] | None) -> Any:
    transformers = import_transformers()
    dtype = torch.get_default_dtype()
    try:
        if architecture is not None:
            config = transformers.AutoConfig.for_model(**architecture)
        elif not name_or_path:
            raise MemOptError("HFCausalLM needs a name_or_path, or an architecture.")
        elif from_config or torch.get_default_device().type == "meta":  # a plan needs shapes only
            config = transformers.AutoConfig.from_pretrained(name_or_path)
        else:
            # It comes in evaluation mode, in which Lightning would leave it: no dropout, no gradient checkpointing.
            return transformers.AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype).train()
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MemOptError(
            f"transformers cannot load a causal language model from {name_or_path!r}: {reason}"
        ) from error
