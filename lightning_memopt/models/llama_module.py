"""The small Llama as a Lightning module: what ``configs/quickstart.yaml`` trains."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lightning.pytorch.cli import OptimizerCallable
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_memopt.errors import MemOptError
from lightning_memopt.models.causal_lm import CausalLM, Schedule, masks_nothing
from lightning_memopt.models.llama import Llama


class LlamaModule(CausalLM):
    """Trains a small Llama from scratch on next-token prediction.

    A batch has ``input_ids``, int64 [B, T], and either ``targets``, the ids moved on by one token, or ``labels``, not
    moved; -100 where nothing is to be predicted. An ``attention_mask`` must have no zeros.

    Args:
        vocab_size: Number of token ids; 256 for bytes.
        hidden_size: Width of the residual stream; a multiple of ``num_heads``.
        num_layers: Number of decoder blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of ``num_heads``; None for as many as query heads.
        intermediate_size: Width of the feed-forward layer; None for 8/3 of ``hidden_size``, rounded up to a
            multiple of 32.
        max_seq_len: Longest sequence the model is meant for; generation keeps within it.
        rope_theta: Base of the rotary frequencies.
        tie_embeddings: Use the embedding matrix as output projection.
        optimizer: Makes the optimizer from the parameter groups; None for ``torch.optim.AdamW`` with its
            defaults.
        schedule: Learning rate over the optimizer steps of the whole run, after the warm-up: "cosine" falls
            to ``min_lr_ratio``, "constant" stays.
        warmup_steps: Optimizer steps over which the learning rate rises linearly from 0.
        min_lr_ratio: Where the cosine ends, as a part of the optimizer's own learning rate.

    Raises:
        MemOptError: The head counts do not divide the width or each other.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 256,
        num_layers: int = 6,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        intermediate_size: int | None = None,
        max_seq_len: int = 1024,
        rope_theta: float = 10000.0,
        tie_embeddings: bool = False,
        optimizer: OptimizerCallable | None = None,
        schedule: Schedule = "cosine",
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__(optimizer, schedule, warmup_steps, min_lr_ratio)
        # The optimizer may be any callable, which a checkpoint that loads safely cannot hold.
        self.save_hyperparameters(ignore=["optimizer"])
        try:
            self.net = Llama(
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                intermediate_size=intermediate_size,
                max_seq_len=max_seq_len,
                rope_theta=rope_theta,
                tie_embeddings=tie_embeddings,
            )
        except ValueError as error:
            raise MemOptError(f"The model cannot be built: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model knows."""
        return self.net.vocab_size

    @property
    def loss_head(self) -> nn.Linear:
        """The output projection."""
        return self.net.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of ids [B, T].

        Raises:
            MemOptError: The attention mask, [B, T], has zeros.
        """
        if attention_mask is not None and not masks_nothing(attention_mask):
            raise MemOptError(
                "LlamaModule attends to all earlier tokens and takes no attention_mask with zeros: pad on the right, "
                "with labels of -100, and leave the mask out."
            )
        return self.net(input_ids)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        stop_id: int | None = None,
    ) -> Tensor:
        """Continue one sequence; see the base class.

        Without a key/value cache each token costs a pass over the last ``max_seq_len`` tokens: enough to look
        at what a small model has learned.
        """
        ids = input_ids
        for _ in range(max_new_tokens):
            logits = self.net(ids[None, -self.net.max_seq_len :])[0, -1].float()
            token = sample(logits, temperature, top_k)
            if stop_id is not None and token.item() == stop_id:
                break
            ids = torch.cat((ids, token))
        return ids[len(input_ids) :]

    def export(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``; :func:`load_llama` and transformers read them."""
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.net.state_dict().items()}
        if self.net.hf_config["tie_word_embeddings"]:
            del weights["lm_head.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = {
            **self.net.hf_config,
            "dtype": str(next(self.net.parameters()).dtype).removeprefix("torch."),
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_llama(folder: str | Path) -> Llama:
    """Read a folder that ``memopt export`` wrote for the small Llama; the weights keep their dtype."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    weights = load_file(Path(folder) / "model.safetensors")
    if config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    net = Llama.from_hf_config(config).to(weights["model.embed_tokens.weight"].dtype)
    net.load_state_dict(weights)
    return net


def sample(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Draw a token id, int64 [1], from logits [V]; temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        kth = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1)
