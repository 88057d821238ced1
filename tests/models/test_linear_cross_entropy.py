from functools import partial

import harness
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_memopt as memopt
from lightning_memopt.backward import Updater
from lightning_memopt.models import HFCausalLM
from lightning_memopt.models.hf import PLAIN_HEADS
from lightning_memopt.models.linear_cross_entropy import linear_cross_entropy, loss_at_head

TOKENS, FEATURES, VOCAB = 13, 6, 11


def tensors(dtype=torch.float64, bias=False, ignored=()):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, FEATURES, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, FEATURES, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    shift = torch.randn(VOCAB, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[list(ignored)] = -100
    return hidden, weight, shift, targets


def plain(hidden, weight, shift, targets):
    return F.cross_entropy(
        F.linear(hidden, weight, shift).to(torch.promote_types(weight.dtype, torch.float32)), targets
    )


def gradients(loss, hidden, weight, shift):
    return torch.autograd.grad(2 * loss, [t for t in (hidden, weight, shift) if t is not None])


@pytest.mark.parametrize("chunk_elements", [1, 4 * VOCAB, 10**6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ignored", [(), (0, 5, 12)])
def test_equals_plain_cross_entropy(chunk_elements, bias, ignored):
    hidden, weight, shift, targets = tensors(bias=bias, ignored=ignored)
    loss = linear_cross_entropy(hidden, weight, targets, shift, chunk_elements=chunk_elements)
    expected = plain(hidden, weight, shift, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(
        gradients(loss, hidden, weight, shift), gradients(expected, hidden, weight, shift), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_many_tokens_sum_the_weight_gradient_over_chunks():
    hidden, weight, _, targets = tensors()
    hidden = hidden.detach().repeat(8, 1).requires_grad_()  # more than the features: dW is smaller than dY
    targets = targets.repeat(8)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_elements=5 * VOCAB)
    expected = plain(hidden, weight, None, targets)
    for got, want in zip(gradients(loss, hidden, weight, None), gradients(expected, hidden, weight, None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_as_close_to_float64_as_the_plain_loss(autocast):
    exact = tensors()
    reference = gradients(plain(*exact), *exact[:3])
    hidden, weight, shift, targets = tensors(torch.float32 if autocast else torch.bfloat16)
    errors = []
    for function in (plain, lambda h, w, b, t: linear_cross_entropy(h, w, t, b, chunk_elements=4 * VOCAB)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = function(hidden, weight, shift, targets)
        assert loss.dtype == torch.float32
        got = gradients(loss, hidden, weight, shift)
        assert all(g.dtype == t.dtype for g, t in zip(got, (hidden, weight), strict=True))
        errors.append(max(float((g.double() - r).abs().max()) for g, r in zip(got, reference, strict=True)))
    assert errors[1] <= 1.5 * errors[0] + 1e-4


def test_nothing_counted_is_nan_as_in_torch():
    hidden, weight, shift, targets = tensors(ignored=range(TOKENS))
    assert torch.isnan(plain(hidden, weight, shift, targets))
    assert torch.isnan(linear_cross_entropy(hidden, weight, targets, shift))


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, _, targets = tensors()
    linear_cross_entropy(hidden.detach(), weight, targets).backward()
    assert weight.grad is not None
    linear_cross_entropy(hidden, weight.detach(), targets).backward()
    assert hidden.grad is not None


class Chunked(harness.Net):
    """The harness's network, its loss by the chunked head."""

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.norm(self.up(x))))
        with loss_at_head(self.head, targets):
            return self.head(x)


class Plain(Chunked):
    """The same network with the plain loss."""

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.norm(self.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2])  # 5 or 10 tokens for 8 features: factors, or dW over chunks
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1, "precision": "64-true"},
    ],
    ids=lambda options: "+".join(options) or "alone",
)
def test_fused_training_equals_the_plain_run(tied, batch_size, options):
    data = partial(harness.tokens, batch_size=batch_size)

    def make(net):
        return harness.Module(partial(net, tied), loss=lambda net, batch: net(*batch))

    plain_run = harness.fit(make(Plain), "auto", data(), **options)
    strategy = memopt.ForgeStrategy(rounding="nearest")
    fused = harness.fit(make(Chunked), strategy, data(), callbacks=[harness.NoGradientLeft()], **options)
    assert harness.difference(plain_run, fused) <= 1e-6


@pytest.mark.parametrize(("batch_size", "handed_over"), [(1, [True, True]), (2, [])], ids=["few tokens", "many"])
def test_the_fused_strategy_takes_the_factors_of_the_head(monkeypatch, batch_size, handed_over):
    taken = []
    takes = Updater.takes

    def spy(updater, slot):
        answer = takes(updater, slot)
        if slot.name == "net.head.weight":
            taken.append(answer)
        return answer

    monkeypatch.setattr(Updater, "takes", spy)
    module = harness.Module(partial(Chunked, False), loss=lambda net, batch: net(*batch))
    harness.fit(module, "forge", harness.tokens(batch_size=batch_size), max_steps=2)
    assert taken == handed_over


def test_the_head_is_itself_again_afterwards():
    head = nn.Linear(4, 5)
    with pytest.raises(RuntimeError), loss_at_head(head, torch.tensor([1])):
        head(torch.ones(1, 3))
    assert head(torch.ones(1, 4)).shape == (1, 5)
    assert "forward" not in head.__dict__


TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.mark.parametrize("model_type", sorted(PLAIN_HEADS))
def test_every_listed_architecture_equals_its_own_loss(model_type):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = HFCausalLM("tiny", architecture={"model_type": model_type, **TINY}).eval()
    ids = torch.randint(1, 40, (2, 9))
    labels = ids.clone()
    labels[0, 3] = -100
    own = module.net(input_ids=ids, labels=labels).loss
    batch = {"input_ids": ids[:, :-1], "targets": labels[:, 1:]}
    assert module.loss_head is not None
    torch.testing.assert_close(module.training_step(batch, 0), own, rtol=1e-5, atol=1e-5)
    module.chunked_loss = False
    torch.testing.assert_close(module.training_step(batch, 0), own, rtol=1e-5, atol=1e-5)


def test_an_architecture_with_scaled_logits_keeps_its_own_forward():
    pytest.importorskip("transformers")
    module = HFCausalLM("tiny", architecture={"model_type": "cohere", "logit_scale": 0.3, **TINY})
    assert module.loss_head is None
