"""What the benchmark of sharded runs writes down of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from benchmarks.multigpu_rank import way
from lightning_memopt.strategies import sharding


@pytest.mark.parametrize(("copied", "said"), [([True, True], "copies"), ([True, False], "collectives")])
def test_weights_go_by_copies_if_those_of_all_units_do(
    copied: list[bool], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the strategy tells it, which sets up its updates by that."""
    groups = [SimpleNamespace(fsdp_params=[nn.Linear(1, 1)], **{"unshard": None} if own else {}) for own in copied]
    monkeypatch.setattr(sharding, "groups", lambda module: groups)
    assert way(nn.Linear(1, 1)) == said
