"""Unmodified models of Hugging Face end in the weights of plain training, whatever they are made of.

Experts as three-dimensional parameters, Conv1D, tied heads, encoder and decoder, convolutions and scans, low-rank
attention, normalisations with and without bias.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import Module, difference, fit, tokens
from sharded import Ranks, furthest, train, train_plain
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, **EXPERTS},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, **EXPERTS},
    "deepseek_v3": {**GROUPS, **EXPERTS, **LATENT},
    "mamba": {"state_size": 4},
    "t5": {**T5, "decoder_start_token_id": 0},
    "deberta-v2": STILL,
}
# Their grouped products know no float64.
SINGLE = {"qwen3_moe", "gpt_oss", "deepseek_v3"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped, accumulated": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
}


def network(kind: str, checkpointing: bool = False) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **SIZES | MODELS[kind])
    auto = {"t5": transformers.AutoModelForSeq2SeqLM, "deberta-v2": transformers.AutoModelForMaskedLM}
    model = auto.get(kind, transformers.AutoModelForCausalLM).from_config(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def own_loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return net(input_ids=batch[0], labels=batch[1]).loss


def module(kind: str, **options: Any) -> Module:
    # A large epsilon: where a gradient is zero but for rounding, Adam would make whole steps of the rounding.
    optimizer = partial(torch.optim.AdamW, lr=3e-3, eps=1e-4, weight_decay=0.1)
    return Module(net=partial(network, kind, **options), optimizer=optimizer, loss=own_loss)


@pytest.mark.parametrize("options", [*OPTIONS, "checkpointed"])
@pytest.mark.parametrize("kind", MODELS)
def test_fused(kind: str, options: str) -> None:
    trainer = OPTIONS.get(options, {}) | {"precision": "32-true" if kind in SINGLE else "64-true", "max_steps": 6}
    runs = [
        fit(module(kind, checkpointing=options == "checkpointed"), s, tokens(), **trainer) for s in ("auto", "forge")
    ]
    assert difference(*runs) <= (2e-6 if kind in SINGLE else 1e-12)
    start = dict(module(kind).named_parameters())
    moved = [not torch.equal(weight.float(), start[name].float()) for name, weight in runs[0].weights.items()]
    assert sum(moved) >= len(moved) * 0.9  # an expert may have seen no token


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "mamba", "t5"])
def test_sharded(two: Ranks, kind: str, options: str) -> None:
    make = partial(module, kind)
    plain, results = train_plain(make, **OPTIONS[options]), two(train, make, **OPTIONS[options])
    assert furthest(results[0], results[1]) == 0
    assert furthest(plain, results[0]) <= 1e-5
