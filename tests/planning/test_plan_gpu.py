"""The planner against peaks measured on this machine's GPU."""

import gc
from pathlib import Path

import pytest
import torch
import yaml

import lightning_memopt as memopt
from lightning_memopt.bench.job import Job, phases
from lightning_memopt.bench.recorder import Recorder
from lightning_memopt.bench.worker import train
from lightning_memopt.run_config import RunConfig

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
def test_within_eight_percent_of_the_measured_peak(config, method):
    rows = []
    job = Job(str(config), method, "cuda", (TOKENS,), warmup=3, steps=2, profile=False, log="")
    train(RunConfig.read(config), job, Recorder(phases(job), rows.append, lambda error, tokens: None))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    planned = memopt.plan(config, methods=[method])[method]
    assert planned.peak_gib == pytest.approx(rows[0].peak_gib, rel=0.08)
