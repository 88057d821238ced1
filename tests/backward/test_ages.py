"""Tables of ages: where they lie, what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt.backward import Updater
from lightning_memopt.backward.ages import StepAges
from lightning_memopt.backward.slot import Slot
from lightning_memopt.sparsity.layer import Settings, SparseLayer
from lightning_memopt.sparsity.state import BIRTHS

sparse_arguments = pytest.importorskip("lightning_memopt.kernels.sparse_arguments", exc_type=ImportError)


class Run:
    """Three layers, of which the first two are sparse and alike, with tables as on a GPU."""

    def __init__(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(StepAges, "_read_by_kernels", lambda self: True)
        self.module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        self.optimizer = make(self.module.parameters(), lr=0.1)
        self.updater = Updater("nearest", "auto", "raise", "param", 0)
        self.layers: list[SparseLayer] = []
        self.updater.sparsity = self.sparse
        self.updater.attach(self.module, [self.optimizer])
        self.steps = 0

    def sparse(self, slot: Slot) -> SparseLayer | None:
        if slot.param is self.module[2].weight:
            return None
        self.layers.append(SparseLayer(slot, 0.5, Settings("random", 4, "sqrt", "age", 1, 0)))
        self.layers[-1].start(None)
        return self.layers[-1]

    def step(self) -> list[torch.Tensor]:
        """One step; the tables it had, which are checked."""
        with self.updater.armed(self.optimizer, self.steps):
            tables = []
            for layer in self.layers:
                ages = layer.slot.ages
                assert ages is not None and ages.table is not None
                expected = sparse_arguments.ages_table(layer.ages_of_step(), layer.slot.tile, layer.slot.scalars)
                assert torch.equal(ages.table, expected) and ages.rows == layer.ages_of_step().rows
                tables.append(ages.table)
            loss = self.module(torch.ones(2, 8)).square().sum()
            with self.updater.backward(loss, queue=False):
                loss.backward()
        self.steps += 1
        return tables

    def change(self, layer: SparseLayer) -> None:
        layer.change(0.3, self.steps, self.updater.storage(layer.slot))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
def test_each_weight_has_a_place_of_its_own(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over steps, topology updates, and for layers whose cohorts are no longer alike."""
    run = Run(make, monkeypatch)
    places = [table.data_ptr() for table in run.step()]
    assert len(set(places)) == 2 and all((place - places[0]) % 16 == 0 for place in places)
    for changed in ([], run.layers, [], run.layers[:1], [], run.layers[1:]):
        for layer in changed:
            run.change(layer)
        assert [table.data_ptr() for table in run.step()] == places
    first, second = run.layers
    assert first.state[BIRTHS] == (0, 2, 4) and second.state[BIRTHS] == (0, 2, 6)
    assert run.updater.slots[run.module[2].weight].ages is None


def test_a_table_says_whether_any_weight_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last column; kernels then look at no ramp."""
    run = Run(torch.optim.AdamW, monkeypatch)
    warming = [bool(run.step()[0][3 * sparse_arguments.COHORTS]) for _ in range(5)]
    assert warming == [True, True, True, False, False]
    run.change(run.layers[0])
    first, second = run.step()
    assert first[3 * sparse_arguments.COHORTS] and not second[3 * sparse_arguments.COHORTS]
