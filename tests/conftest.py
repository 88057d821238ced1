"""Shared set-up: `tests/harness.py` is importable, Lightning keeps quiet, few threads."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def quiet_lightning() -> None:
    """Keep the set-up lines of hundreds of short runs out of the report."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny matmuls are faster on one thread, and their sums always have the same order."""
    torch.set_num_threads(1)
