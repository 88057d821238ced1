"""The portable kernels' tests on the CPU, through Triton's interpreter: a process must choose it before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import INTERPRETED

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.parametrize(
    "module",
    [
        "test_flat.py",
        "test_flat_batch.py",
        "test_fused_triton.py",
        "test_embedding.py",
        "test_gram.py",
        "test_sparse.py",
    ],
)
def test_interpreted(module) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / module)]
    result = subprocess.run(
        command,
        env=environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
