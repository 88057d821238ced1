"""Reading the other ranks' memory trains as collectives do, to the last bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from harness import Module
from sharded import Deep, Ranks, furthest, train

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_accumulate": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
}


@pytest.mark.parametrize("route", ["exchange", "reduce"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(two: Ranks, setting: str, route: str) -> None:
    """As by collectives, with rows that the number of ranks does not divide."""
    make, options = partial(Module, net=Deep), SETTINGS[setting]
    results = two(train, make, {"route": route, "peer_memory": True}, **options)
    collectives = two(train, make, {"route": route, "peer_memory": False}, **options)
    assert furthest(results[0], results[1]) == furthest(results[0], collectives[0]) == 0
