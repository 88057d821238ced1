"""What README and docs say was measured is what the recorded files say."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def readme():
    sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_what_the_files_say(readme):
    text = (ROOT / "README.md").read_text()
    assert text == readme.inserted(text, readme.measured()), "run `make readme`"
    assert text == readme.inserted(text, readme.brief(), readme.BRIEF), "run `make readme`"


def test_the_page_of_results_is_what_the_files_say(readme):
    page = ROOT / "docs" / "results.md"
    assert (page.read_text() if page.is_file() else "") == readme.results(), "run `make readme`"


def test_pictures_that_are_shown_exist(readme):
    for folder, text in ((ROOT, readme.measured()), (ROOT / "docs", readme.results())):
        for target in re.findall(r"!\[.*?\]\((.+?)\)", text):
            assert (folder / target).is_file(), "run `make readme`"


BENCH = """model,method,label,tokens,status,step_ms,step_ms_low,step_ms_high,steps,tokens_per_s,peak_gib,\
first_peak_gib,reserved_gib,device_gib,gpu_busy_ms,kernels,loss,loss_step,parameters,precision,device,driver,python,torch,triton,\
lightning,transformers,package,date,command
llama3_8b,adamw,"torch AdamW, fused",512,ok,145,144,147,7,3531,59.9,60,61,62,93.6,4419,9.5,11,8030261248,bf16-true,\
H,1,3,2.11,3.6,2.6,5.17,torch 2.11,2026-01-01 00:00,memopt bench
llama3_8b,forge_sgd,"forge, SGD",512,ok,290,289,300,7,1765,20.5,21,22,23,50,3000,9.9,11,8030261248,bf16-true,\
H,1,3,2.11,3.6,2.6,5.17,lightning_memopt 0.1,2026-01-01 00:00,memopt bench
llama3_8b,adamw_foreach,"torch AdamW, foreach",512,out of memory,,,,,,,,,,,,,,,,H,1,3,2.11,3.6,2.6,5.17,,,memopt bench
"""
KERNELS = """# H, torch 2.11; copy 4.27 TB/s; python -m benchmarks.kernels
layer,tokens,rule,limit,matmul,torch,flat,fused,fused/limit,torch/fused,flat/fused,default_route
14336x4096,512,SGD,0.1,0.1,0.3,0.2,0.15,1.5,2.0,1.3333,x
4096x4096,512,SGD,0.1,0.1,,0.2,0.25,2.5,,0.8,x
"""
MULTIGPU = """part,ranks,method,optimizer,route,by,tokens,clip,step_ms,peak_gib,received_mb,predicted_mb,\
exchanged_layers,hidden,loss,difference,seconds,result,device,torch
equal,2,,,exchange,,,0.5,,,,,,,,5.96e-08,,equal,H,2.11
resume,2,,gefen,,,,,,,,,,,,,,equal,H,2.11
kill,2,,,,,,,,,,,,,,,89,"all ended, checkpoint usable",H,2.11
speed,2,fsdp2,adamw_fused,auto,collectives,512,,200.0,33.1,8000.0,8000.0,0,0.5,9.1,,,ran,H,2.11
speed,2,fsdp2,bnb_adamw8bit,auto,,,,,,,,,,,,,failed: mixed tensors,H,2.11
speed,2,forge_fsdp,adamw,reduce,copies,512,1.0,150.0,24.5,4000.4,4000.4,0,0.25,9.2,,,ran,H,2.11
turns,2,fsdp2,adamw_fused,auto,collectives,512,1.0,100.0,,,,,,,,,ran,H,2.11
turns,2,forge_fsdp,adamw,auto,copies,512,1.0,90.0,,,,,,,,,ran,H,2.11
"""


def test_all_sections_appear_with_their_files_and_losing_cases_stay_in(readme, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    shutil.copy(ROOT / "README.md", tmp_path)
    empty = readme.inserted(readme.inserted((ROOT / "README.md").read_text(), ""), "", readme.BRIEF)
    (tmp_path / "README.md").write_text(empty)
    assert readme.measured(tmp_path) == readme.brief(tmp_path) == readme.results(tmp_path) == ""
    (tmp_path / "benchmarks" / "results" / "bench_llama3_8b.csv").write_text(BENCH)
    (tmp_path / "benchmarks" / "results" / "kernels_h200.csv").write_text(KERNELS)
    (tmp_path / "benchmarks" / "results" / "multigpu.csv").write_text(MULTIGPU)
    (tmp_path / "benchmarks" / "results" / "bench_largest.csv").write_text(BENCH.replace("8030261248", "44000000000"))
    readme.main(tmp_path)
    text = (tmp_path / "README.md").read_text()
    top, bottom = text.split("## Measured")
    assert "A Llama of 8.0 B parameters in bf16 on one H:" in top
    assert "| torch AdamW, fused | 145 (1.00) | 59.9 |" in top and "forge, SGD |" not in top
    assert "The largest model trained there: 44.0 B parameters, with torch AdamW, fused, 59.9 GiB." in top
    assert "| forge, SGD | 290 (2.00) | 20.5 |" in bottom
    assert "| torch AdamW, foreach | out of memory | - |" in text
    assert "| 14336x4096 | 512 | SGD | 0.100 | 0.100 | 0.300 | 0.200 | 0.150 | 1.50 | 2.00 | 1.33 |" in text
    assert "In 1 of 2 cases two kernels are faster than the fused one: 4096x4096 at 512 tokens with SGD." in " ".join(
        text.split()
    )
    assert "| GPUs | method | 512 tokens, clipped: ms | 512: peak GiB per rank |" in bottom
    assert "| 2 | FSDP2, torch AdamW, fused | 100 (1.00) | 33.1 |" in bottom
    assert "| 2 | forge_fsdp, AdamW | 90 (0.90) | - |" in bottom
    assert "- 2 GPUs against one, exchange, clipped: weights after 20 steps in float32: equal, at most 6.0e-08" in text
    assert "- Saved on 2 GPUs, loaded on one, Gefen: equal." in text
    assert "- One of 2 GPUs killed in a backward pass: all ended, checkpoint usable, after 89 s." in text
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "| 2 | forge_fsdp, AdamW | 90 (0.90) | - |" in page
    assert "| 2 | FSDP2, torch AdamW, fused | 512 | 200 | 1.00 | 33.1 |" in page
    row = "| 2 | forge_fsdp, AdamW, reduce, by copies, clipped | 512 | 150 | 0.75 | 24.5 | 4000 (4000) | 25% | 9.2 |"
    assert row in page
    assert "| 2 | FSDP2, bitsandbytes AdamW8bit | | mixed tensors |" in page
    assert "| forge, SGD | 512 | 290 (289 to 300) | 2.00 | 50.0 |" in page
    assert "| torch AdamW, foreach | 512 | out of memory |" in page
    assert "| 4096x4096 | 512 | SGD |" in page and "| 4096x4096 |" not in text
    for target in re.findall(r"!\[.*?\]\((.+?)\)", page):
        assert (tmp_path / "docs" / target).is_file()
    readme.main(tmp_path)
    assert (tmp_path / "README.md").read_text() == text  # again changes nothing
