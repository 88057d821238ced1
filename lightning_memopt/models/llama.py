"""A small Llama: the decoder-only transformer that the shipped configs train.

Parameter names and the JSON config follow Hugging Face's ``LlamaForCausalLM``, so that an exported folder
loads there too.

Shape letters: B batch, T tokens, D width, H query heads, K key/value heads, E width of one head, V
vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Llama(nn.Module):
    """Decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

    Weights start from a normal distribution with standard deviation 0.02.

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
        norm_eps: Added to the mean square in every RMSNorm.
        tie_embeddings: Use the embedding matrix as output projection.

    Raises:
        ValueError: The head counts do not divide the width or each other, or a head has an odd width.
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
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        if hidden_size % num_heads or (hidden_size // num_heads) % 2:
            raise ValueError(f"hidden_size={hidden_size} over num_heads={num_heads} must be an even whole number.")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}.")
        intermediate_size = intermediate_size or 32 * -(-hidden_size * 8 // (3 * 32))
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.hf_config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "intermediate_size": intermediate_size,
            "max_position_embeddings": max_seq_len,
            "rope_theta": rope_theta,
            "rms_norm_eps": norm_eps,
            "tie_word_embeddings": tie_embeddings,
            "hidden_act": "silu",
        }
        self.model = Decoder(
            vocab_size,
            hidden_size,
            num_layers,
            num_heads,
            num_kv_heads,
            intermediate_size,
            rope_theta,
            norm_eps,
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.apply(_init_weights)
        if tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> Llama:
        """Build the model that ``hf_config`` of another instance describes, with fresh weights."""
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            intermediate_size=config["intermediate_size"],
            max_seq_len=config["max_position_embeddings"],
            rope_theta=config["rope_theta"],
            norm_eps=config["rms_norm_eps"],
            tie_embeddings=config["tie_word_embeddings"],
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next token.

        Args:
            input_ids: int64 [B, T].

        Returns:
            Logits [B, T, V] in the dtype of the weights.
        """
        return self.lm_head(self.model(input_ids))


class Decoder(nn.Module):
    """Embedding, decoder blocks and the last norm: ids [B, T] to hidden states [B, T, D]."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        intermediate_size: int,
        rope_theta: float,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.rope_theta = rope_theta
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            Block(hidden_size, num_heads, num_kv_heads, intermediate_size, norm_eps) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(hidden_size, eps=norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Hidden states [B, T, D] of ids [B, T]."""
        x = self.embed_tokens(input_ids)
        cos, sin = rotary_tables(input_ids.shape[1], self.head_size, self.rope_theta, x.device)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Block(nn.Module):
    """One decoder block: attention and feed-forward, each behind a norm and a residual connection."""

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, intermediate_size: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.self_attn = Attention(hidden_size, num_heads, num_kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.mlp = SwiGLU(hidden_size, intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states [B, T, D] to the same shape; ``cos`` and ``sin`` are [T, E]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Causal self-attention with rotary positions; key/value heads may be shared by several query heads."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        head_size = hidden_size // num_heads
        self.head_size = head_size
        self.groups = num_heads // num_kv_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * head_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_size, bias=False)
        self.o_proj = nn.Linear(num_heads * head_size, hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states [B, T, D] to the same shape."""
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, H or K, T, E]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True, enable_gqa=self.groups > 1
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """Feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [B, T, D] to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_tables(length: int, head_size: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, float32 [T, E].

    They are computed for each forward pass, a few thousand numbers: a buffer would follow the module into
    bf16 and lose the far positions' angles.
    """
    exponent = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), theta**-exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head in ``x`` [..., T, E] by its position's angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
