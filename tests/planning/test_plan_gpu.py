"""The planner against peaks measured on this machine's GPU."""

from pathlib import Path

import pytest
import torch
import yaml

import lightning_memopt as memopt
from lightning_memopt.bench.job import Job
from lightning_memopt.bench.run import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = Path(__file__).parents[2] / "configs" / "bench" / "llama3_8b.yaml"
# About 1 B parameters: large enough that what libraries hold does not matter.
SMALLER = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "vocab_size": 32000}
SMALLER |= {"num_attention_heads": 16, "num_key_value_heads": 8}
TOKENS = 1024


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    content = yaml.safe_load(CONFIG.read_text())
    content["model"]["init_args"]["architecture"] |= SMALLER
    content["data"]["init_args"]["seq_len"] = TOKENS
    path = tmp_path_factory.mktemp("config") / "one_billion.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    "method",
    ["adamw", "adamw_foreach", "adamw_hooks", "forge_adamw", "forge_adamw_clip", "forge_adamw8bit", "forge_gefen"],
)
def test_within_eight_percent_of_the_measured_peak(config, method, tmp_path):
    # In a process of its own, as other tests' leavings would count.
    job = Job(str(config), method, "cuda", (TOKENS,), warmup=3, steps=2, profile=False, log=str(tmp_path / "log"))
    (row,) = run([job], timeout_s=120)
    assert row.status == "ok"
    planned = memopt.plan(config, methods=[method])[method]
    assert planned.peak_gib == pytest.approx(row.peak_gib, rel=0.08)
