"""Activation checkpointing by name pattern, and what it saves."""

from functools import partial

import harness
import pytest
import torch
from torch import nn

import lightning_memopt as memopt
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.models import Llama
from lightning_memopt.strategies import checkpointing

SMALL = partial(Llama, vocab_size=11, hidden_size=16, num_layers=3, num_heads=2)


def saved_bytes(module, inputs):
    """What autograd keeps between forward and backward, parameters left out, each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(inputs)
    total = sum(kept.values())
    output.sum().backward()
    return total


def test_a_pattern_means_the_outermost_modules():
    net = SMALL()
    changed = checkpointing.install(net, ["*.layers.*"])
    assert [module for module, _ in changed] == list(net.model.layers)
    checkpointing.remove(changed)
    assert all("forward" not in module.__dict__ for module in net.modules())


def test_activations_shrink_and_gradients_stay():
    torch.manual_seed(0)
    net, ids = SMALL(), torch.randint(0, 11, (2, 32))
    plain = saved_bytes(net, ids)
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    changed = checkpointing.install(net, ["model.layers.*"])
    # Saved tensors of a checkpointed region are replaced, so only the blocks' inputs and what lies outside remain.
    assert saved_bytes(net, ids) < plain / 3
    for p, gradient in zip(net.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    checkpointing.remove(changed)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
def test_fused_training_equals_the_plain_run(options):
    strategy = memopt.ForgeStrategy(rounding="nearest", checkpoint=["*.layers.*"])
    # One rounding of a float32 update may fall the other way where a gradient is nearly zero.
    make = partial(harness.Module, SMALL, partial(torch.optim.AdamW, lr=1e-3, eps=1e-3))
    _, fused = harness.assert_equal_runs(make, strategy=strategy, **options)
    assert all("forward" not in module.__dict__ for module in fused.module.modules())


def test_single_layers_may_be_chosen():
    strategy = memopt.ForgeStrategy(rounding="nearest", checkpoint=["net.up", "net.norm"])
    harness.assert_equal_runs(harness.Module, strategy=strategy)


def test_a_pattern_without_a_match_is_refused():
    with pytest.raises(UnsupportedError, match=r"'\*\.blocks\.\*'.*net\."):
        harness.fit(harness.Module(), memopt.ForgeStrategy(checkpoint=["*.blocks.*"]))


def test_a_single_pattern_needs_no_list():
    strategy = memopt.ForgeStrategy(checkpoint="net.*")
    assert strategy.checkpoint == ("net.*",)
    harness.fit(harness.Module(), strategy, max_steps=1)


def test_keyword_arguments_and_several_outputs_pass_through():
    class Pair(nn.Module):
        def forward(self, x, *, scale):
            return x * scale, x + scale

    net = nn.ModuleDict({"pair": Pair()})
    checkpointing.install(net, ["pair"])
    x = torch.ones(3, requires_grad=True)
    product, total = net["pair"](x, scale=2.0)
    (product + total).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
