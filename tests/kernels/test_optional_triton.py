"""The package works where Triton is not installed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it now raises ImportError
import torch
import lightning_memopt as memopt

weight = torch.nn.Parameter(torch.ones(64, 64))
optimizer = memopt.AdamW8bit([weight])
weight.sum().backward()
optimizer.step()
assert (weight < 1).all()
"""


def test_import_and_step() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
