"""Leaner layers of Hugging Face models: the same numbers, and fewer tensors kept."""

from functools import partial

import harness
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_memopt as memopt
from lightning_memopt.models import HFCausalLM, hf_layers
from lightning_memopt.models.hf import PLAIN_HEADS
from lightning_memopt.planning.trace import trace

pytest.importorskip("transformers")

TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def module_of(model_type, **options):
    torch.manual_seed(0)
    return HFCausalLM(architecture={"model_type": model_type, **TINY}, **options).eval()


def batch(length=9):
    ids = torch.randint(1, 40, (2, length + 1), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def loss_and_gradients(module):
    loss = module.training_step(batch(), 0)
    return loss, torch.autograd.grad(loss, list(module.parameters()))


@pytest.mark.parametrize("model_type", sorted(PLAIN_HEADS))
def test_loss_and_gradients_are_the_models_own(model_type):
    module = module_of(model_type, fused_layers=False)
    plain = loss_and_gradients(module)
    module.fused_layers = True
    torch.testing.assert_close(loss_and_gradients(module), plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_bf16_is_as_exact_as_the_models_own(model_type):
    exact, _ = loss_and_gradients(module_of(model_type, fused_layers=False).double())
    losses = [loss_and_gradients(module_of(model_type, fused_layers=f).bfloat16())[0] for f in (False, True)]
    assert abs(losses[1].double() - exact) <= abs(losses[0].double() - exact) + 0.01


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
def test_fused_training_equals_the_plain_run(options):
    runs = []
    for fused, strategy in ((False, "auto"), (True, memopt.ForgeStrategy(rounding="nearest"))):
        module = module_of("llama", fused_layers=fused, schedule="constant")
        module.make_optimizer = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
        data = DataLoader([batch(7 + i) for i in range(6)], batch_size=None)
        runs.append(harness.fit(module.train(), strategy, data, max_steps=3, **options))
    assert harness.difference(*runs) <= 1e-5
    assert runs[1].trainer.global_step == 3


def test_the_last_layers_factors_are_handed_over():
    module = module_of("llama")
    found = trace(module.to("meta"), batch(), "stored").end
    assert found.gradients > 0
    assert trace(module, batch(), "fused").peak().gradients == 0  # of no layer is dW formed


def test_a_last_layer_with_hooks_or_another_class_keeps_its_own_forward():
    module = module_of("llama")
    mlp, x = module.net.model.layers[0].mlp, torch.randn(2, 3, 16)
    seen = []
    plain = mlp(x)
    handle = mlp.down_proj.register_forward_hook(lambda layer, args, out: seen.append(args[0].shape))
    torch.testing.assert_close(mlp(x), plain)
    handle.remove()
    assert seen == [(2, 3, 24)]


def test_layers_are_replaced_and_put_back():
    module = module_of("llama")
    own = [m for m in module.modules() if "forward" in m.__dict__]
    assert len(own) == 2 * 3 + 1  # two norms and a feed-forward layer each, and the last norm
    module.fused_layers = False
    assert not any("forward" in m.__dict__ for m in module.modules())


def test_less_is_kept():
    module = module_of("llama").bfloat16().to("meta")
    lean = sum(trace(module, batch(512), "fused").peak())
    module.fused_layers = False
    assert lean < 0.75 * sum(trace(module, batch(512), "fused").peak())


def test_no_mask_is_made_and_nothing_is_asked_of_the_device(monkeypatch):
    from transformers import masking_utils

    looked = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda ids: looked.append(ids))
    module = module_of("llama")
    module.training_step(batch(), 0)
    assert not looked
    assert module.net.config._attn_implementation == "sdpa"
    module(batch()["input_ids"])
    assert looked


def test_a_short_sliding_window_is_respected():
    module = module_of("mistral")
    module.net.config.sliding_window = 4
    with hf_layers.causal_without_looking(module.net, 9):
        assert module.net.config._attn_implementation == "sdpa"


def test_weights_in_another_precision_keep_the_models_own_norm():
    module = module_of("llama")
    norm = module.net.model.norm
    x = torch.randn(3, 16).bfloat16()
    assert torch.equal(norm(x), type(norm).forward(norm, x))


def test_the_fused_strategys_own_forward_counts_as_plain(monkeypatch):
    module, calls = module_of("llama"), []
    apply = hf_layers.GatedLinear.apply
    monkeypatch.setattr(hf_layers.GatedLinear, "apply", lambda *args: calls.append(args[3]) or apply(*args))
    data = DataLoader([batch()] * 2, batch_size=None)
    harness.fit(module.train(), "forge", data, max_steps=2)
    assert len(calls) == 4 and None not in calls  # two layers, two steps, each with the updater's slot
