"""Which layers are sparse, how dense, and when the topology changes."""

from __future__ import annotations

import math

import pytest
from torch import nn

import lightning_memopt as memopt
from lightning_memopt.models.llama import Llama
from lightning_memopt.sparsity.density import densities, erk, matches, sparse_layers
from lightning_memopt.sparsity.schedule import TopologySchedule

SHAPES = {"block.q_proj": (64, 64), "block.kv_proj": (16, 64), "block.up_proj": (256, 64)}


def test_default_layers_of_a_llama() -> None:
    """Projections of every block; neither embedding nor head."""
    names = set(sparse_layers(Llama(vocab_size=32, hidden_size=32, num_layers=2, num_heads=2)))
    assert len(names) == 2 * 7 and not any("head" in name or "embed" in name for name in names)


def test_patterns() -> None:
    """Wildcards are for whole names, other patterns for parts of them."""
    assert matches("q_proj", "model.layers.0.q_proj") and not matches("q_proj", "model.layers.0.k_proj")
    assert matches("*.0.?_proj", "model.layers.0.q_proj") and not matches("*.0", "model.layers.0.q_proj")
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    assert set(sparse_layers(net)) == {"a", "b"}
    assert set(sparse_layers(net, ["b", "c"])) == {"b", "c"}
    assert set(sparse_layers(net, None, ["a"])) == {"b"}
    net["a"].weight.requires_grad_(False)
    assert set(sparse_layers(net)) == {"b"}


def test_density_by_pattern() -> None:
    """The first pattern that fits counts; layers that none fits are left out."""
    assert densities(SHAPES, {"q_proj": 0.5, "proj": 0.1}, "uniform") == {
        "block.q_proj": 0.5,
        "block.kv_proj": 0.1,
        "block.up_proj": 0.1,
    }
    assert set(densities(SHAPES, {"up": 0.2}, "erk")) == {"block.up_proj"}
    with pytest.raises(memopt.UnsupportedError, match="outside"):
        densities(SHAPES, {"up": 0.0}, "uniform")


@pytest.mark.parametrize("density", [0.05, 0.25, 0.6, 0.95, 1.0])
def test_erk(density: float) -> None:
    """The mean over weights is what was asked for, none above 1, smaller layers denser."""
    each = erk(SHAPES, density)
    total = sum(a * b for a, b in SHAPES.values())
    assert sum(each[n] * a * b for n, (a, b) in SHAPES.items()) == pytest.approx(density * total)
    assert all(0 < value <= 1 for value in each.values())
    assert each["block.kv_proj"] >= each["block.q_proj"] >= each["block.up_proj"]


def test_schedule() -> None:
    """Half a cosine, a line, or constant, and no update from the end on."""
    cosine, linear, constant = (TopologySchedule(10, 0.4, decay, 100) for decay in ("cosine", "linear", "constant"))
    assert [step for step in range(200) if cosine.due(step)] == list(range(10, 100, 10))
    assert cosine.at(50) == pytest.approx(0.2) and cosine.at(25) == pytest.approx(0.2 * (1 + math.sqrt(0.5)))
    assert linear.at(75) == pytest.approx(0.1) and constant.at(99) == 0.4
    endless = TopologySchedule(10, 0.4, "constant", math.inf)
    assert endless.due(10**6) and endless.at(10**6) == 0.4
