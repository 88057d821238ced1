"""Topology updates: exact counts, the right weights, no repetition, the same choice whatever the chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_memopt.kernels.active import Largest
from lightning_memopt.sparsity import bits
from lightning_memopt.sparsity.bits import unpack
from lightning_memopt.sparsity.selection import Smallest
from lightning_memopt.sparsity.topology import Runs, exchange, random_mask

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("chunk", [128, 1 << 20])
@pytest.mark.parametrize("values", [3, 1 << 20])
def test_smallest(width: int, chunk: int, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stable sort, with many ties and with none, for every k."""
    monkeypatch.setattr(bits, "CHUNK", chunk)
    torch.manual_seed(0)
    keys = torch.randint(0, values, (700,)) << (width - 24)
    candidates = torch.rand(700) < 0.6
    order = [i for i in keys.sort(stable=True).indices.tolist() if candidates[i]]
    for k in (0, 1, 7, len(order) // 2, len(order)):
        chosen = Smallest(lambda a, b: (keys[a:b], candidates[a:b]), 700, k, width)
        parts = torch.cat([chosen.chosen(a, b) for a, b in bits.chunks(700)])
        assert parts.nonzero().view(-1).tolist() == sorted(order[:k])


@pytest.mark.parametrize("density", [0.01, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("run", [1, 4])
def test_random_masks(density: float, run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly as many as asked for, spread evenly, whole runs, and the same in other chunks."""
    runs = Runs("layer.weight", 64 * 96, run)
    keep = round(density * runs.count)
    mask = unpack(random_mask(runs, keep, 3, CPU), 0, runs.total)
    assert int(mask.sum()) == keep * run
    assert torch.equal(mask.view(-1, run).all(1), mask.view(-1, run).any(1))
    rows = mask.view(64, 96).float().mean(1)
    assert (rows - density).abs().max() <= 5 * (density * (1 - density) * run / 96) ** 0.5 + 1e-6
    monkeypatch.setattr(bits, "CHUNK", 256)
    assert torch.equal(unpack(random_mask(runs, keep, 3, CPU), 0, runs.total), mask)


def changed(weight: Tensor, mask: Tensor, runs: Runs, k: int, **options: object) -> Tensor:
    packed = bits.pack(runs.total, lambda a, b: mask.view(-1)[a:b], CPU)
    arguments = {"seed": 1, "event": 2, "growth": None} | options
    return unpack(exchange(weight, packed, runs, k, **arguments), 0, runs.total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("run", [1, 3])
def test_the_least_go(dtype: torch.dtype, run: int) -> None:
    """By magnitude, summed over a run; what grows was inactive; counts stay."""
    torch.manual_seed(1)
    runs = Runs("w", 40 * 30, run)
    mask = (torch.rand(40, 30 // run) < 0.4).repeat_interleave(run, 1)
    weight = (torch.randn(40, 30) * mask).to(dtype)
    new = changed(weight, mask, runs, 50)
    old = mask.view(-1)
    assert int(new.sum()) == int(old.sum())
    assert int((old & ~new).sum()) == int((new & ~old).sum()) == 50 * run
    size = weight.double().abs().view(-1, run).sum(1)
    gone, kept = (part.view(-1, run)[:, 0] for part in (old & ~new, old & new))
    assert size[gone].max() <= size[kept].min() + 1e-6


def test_all_free_places_can_be_filled() -> None:
    """At density 0.9 the free places are fewer than the active weights: all are filled, none twice."""
    mask = torch.ones(10, 10, dtype=torch.bool)
    mask[0] = False
    new = changed(torch.randn(10, 10) * mask, mask, Runs("w", 100, 1), 10)
    assert int(new.sum()) == 90 and new[:10].all()


def test_growth_by_gradient() -> None:
    """The largest gradients of inactive weights, also where an active one's is larger."""
    torch.manual_seed(2)
    mask, grad = torch.rand(20, 20) < 0.5, torch.randn(20, 20)
    growth = Largest(15, 1)
    growth.add(0, grad.view(-1)[:200], mask.view(-1)[:200])
    growth.add(200, grad.view(-1)[200:], mask.view(-1)[200:])
    new = changed(torch.randn(20, 20) * mask, mask, Runs("w", 400, 1), 12, growth=growth).view(20, 20)
    inactive = grad.abs().masked_fill(mask, -1).view(-1)
    assert (new & ~mask).view(-1).nonzero().view(-1).tolist() == sorted(inactive.topk(12).indices.tolist())


def test_random_growth_depends_on_seed_event_and_name() -> None:
    mask = torch.zeros(50, 50, dtype=torch.bool)
    mask[:10] = True
    weight = torch.randn(50, 50) * mask
    base = changed(weight, mask, Runs("w", 2500, 1), 100)
    assert torch.equal(base, changed(weight, mask, Runs("w", 2500, 1), 100))
    for name, options in (("w", {"seed": 2}), ("w", {"event": 3}), ("v", {})):
        assert not torch.equal(base, changed(weight, mask, Runs(name, 2500, 1), 100, **options))
