"""The fused embedding layer: plain autograd where its updater declines, look-ups handed over where it accepts."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from kernel_cases import check, make_update, twin
from torch import nn

from lightning_memopt.backward.embedding import install
from lightning_memopt.backward.linear import SLOT, remove
from lightning_memopt.kernels import apply_embedding, reference


@dataclass
class StandIn:
    """As much of a slot as the layer needs."""

    accepts: bool
    uses: int = 0
    taken: list = field(default_factory=list)

    def count_use(self, x) -> None:
        self.uses += 1

    def take_lookup(self, dy, indices, padding_idx) -> bool:
        if self.accepts:
            self.taken.append((dy, indices, padding_idx))
        return self.accepts


def make_layer(accepts: bool, **options) -> tuple[nn.Embedding, nn.Embedding, StandIn]:
    """A fused layer, its plain twin, and the stand-in for its slot."""
    torch.manual_seed(0)
    plain = nn.Embedding(20, 8, **options)
    fused = copy.deepcopy(plain)
    slot = StandIn(accepts)
    setattr(fused.weight, SLOT, slot)
    assert install(nn.Sequential(fused)) == [fused]
    return fused, plain, slot


INDICES = torch.tensor([[3, 3, 0], [19, 7, 3]])


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": -1}])
def test_declined_look_ups_become_a_gradient(options) -> None:
    fused, plain, slot = make_layer(False, **options)
    for layer in (fused, plain):
        layer(INDICES).sin().sum().backward()
    assert slot.uses == 1 and torch.equal(fused.weight.grad, plain.weight.grad)


def test_double_backward() -> None:
    fused, plain, _ = make_layer(False)
    second = []
    for layer in (fused, plain):
        (first,) = torch.autograd.grad(layer(INDICES).pow(3).sum(), layer.weight, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), layer.weight)[0])
    torch.testing.assert_close(*second)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_accepted_look_ups_make_the_same_update(padding_idx) -> None:
    fused, plain, slot = make_layer(True, padding_idx=padding_idx)
    for layer in (fused, plain):
        layer(INDICES).sin().sum().backward()
    assert fused.weight.grad is None
    ((dy, indices, padding),) = slot.taken
    update = make_update("adamw", (20, 8))
    expected = twin(update)
    reference.apply_gradient(expected, plain.weight.grad.double())
    assert apply_embedding(update, indices, dy, "auto", None if padding < 0 else padding)
    check(update, expected)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_other_kinds_of_embedding_stay_as_they_are(options) -> None:
    fused, plain, slot = make_layer(True, **options)
    for layer in (fused, plain):
        layer(INDICES).sin().sum().backward()
    assert not slot.taken and torch.equal(fused.weight.grad.to_dense(), plain.weight.grad.to_dense())


def test_removal_and_copies_restore_the_plain_layer() -> None:
    fused, plain, _ = make_layer(True)
    for layer in (copy.deepcopy(fused), fused):
        if layer is fused:
            remove([fused])
            delattr(fused.weight, SLOT)
        layer(INDICES).sin().sum().backward()
    plain(INDICES).sin().sum().backward()
    assert torch.equal(fused.weight.grad, plain.weight.grad)
    with torch.no_grad():
        assert torch.equal(fused(INDICES), plain(INDICES))
