"""Processes for the sharded tests, started once and shared by all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sharded import Ranks


@pytest.fixture(scope="session")
def one() -> Iterator[Ranks]:
    """A single rank."""
    yield from _started(1)


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two ranks."""
    yield from _started(2)


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four ranks."""
    yield from _started(4)


def _started(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    yield ranks
    ranks.stop()
