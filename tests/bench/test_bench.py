"""`memopt bench` at toy size: through the command once, and its parts in this process."""

import csv
from pathlib import Path

import pytest
import torch
import yaml

from lightning_memopt.bench import report
from lightning_memopt.bench.job import COLUMNS, Job, Row, phases
from lightning_memopt.bench.methods import METHODS, Method, NotInstalledError, chosen
from lightning_memopt.bench.recorder import Recorder, covered
from lightning_memopt.bench.run import Table, described, run
from lightning_memopt.bench.worker import explain, train
from lightning_memopt.cli import main
from lightning_memopt.errors import MemOptError, UnsupportedError
from lightning_memopt.run_config import RunConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "bench"
SMALL = CONFIGS / "small_llama.yaml"


def job(method, **changes):
    options = {"tokens": (16, 32), "warmup": 1, "steps": 2, "profile": False, "device": "cpu", "log": "log"}
    return Job(**{"config": str(SMALL), "method": method, **options, **changes})


def measure(method, trainer=None, **changes):
    """Rows of a method, trained in this process; `trainer`: replaces the config's arguments of the Trainer."""
    rows, todo = [], job(method, **changes)
    config = RunConfig.read(SMALL, {f"trainer.{name}": value for name, value in (trainer or {}).items()})
    train(config, todo, Recorder(phases(todo), rows.append, lambda error, tokens: None))
    return rows


def test_the_command_leaves_table_plots_and_logs(tmp_path, capfd):
    methods = "adamw_hooks,torchao_adamw4bit,forge_adamw_clip"
    out = tmp_path / "run"
    short = ["--methods", methods, "--tokens=128,256", "--steps=2", "--device=cpu"]
    main(["bench", "--config", str(SMALL), "--out", str(out), *short])
    files = {path.name for path in out.iterdir()}
    plots = {"memory.png", "time_over_tokens.png", "memory_over_tokens.png"}
    assert files == {"results.csv", "table.md", "config.yaml", "logs"} | plots
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    measured = [(row["method"], row["tokens"]) for row in rows if row["status"] == "ok"]
    assert measured == [(m, t) for m in ("adamw_hooks", "forge_adamw_clip") for t in ("128", "256")]
    assert all(float(row["step_ms_low"]) <= float(row["step_ms"]) <= float(row["step_ms_high"]) for row in rows[:4])
    assert rows[0]["torch"] == torch.__version__
    assert rows[4]["status"] == "torchao is not installed"
    assert "torchao is not installed" in (out / "table.md").read_text()


@pytest.mark.parametrize(
    "method", ["adamw", "adamw_foreach", "adamw_hooks", "forge_adamw", "forge_gefen", "forge_lion"]
)
def test_methods_train(method):
    first, second = measure(method, steps=6)
    assert (first.tokens, second.tokens) == (16, 32)
    assert first.status == second.status == "ok"
    assert first.loss < 6.3  # log(512) is 6.24
    assert first.loss_step == 7
    assert second.loss_step == 14
    assert first.tokens_per_s == pytest.approx(16e3 / first.step_ms)


def test_the_same_rule_gives_the_same_loss_however_it_is_launched():
    losses = [measure(method, tokens=(16,))[0].loss for method in ("adamw", "adamw_hooks", "forge_adamw")]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-4)


def test_a_step_is_all_of_its_micro_batches():
    """The same tokens in two micro-batches: as many steps, and what a model learns from the shorter sequences."""
    two, once = {"accumulate_grad_batches": 2}, measure("adamw")
    rows = measure("forge_adamw", two)
    assert [row.loss_step for row in rows] == [row.loss_step for row in once] == [3, 6]
    assert [row.tokens for row in rows] == [16, 32]
    assert rows[0].tokens_per_s == pytest.approx(16e3 / rows[0].step_ms)
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in measure("adamw", two)], abs=1e-4)
    # Both micro-batches of a step are the same one.
    assert rows[0].loss == pytest.approx(measure("adamw", tokens=(8,))[0].loss, abs=1e-4)
    with pytest.raises(UnsupportedError, match="accumulate nothing over micro-batches"):
        measure("adamw_hooks", two)
    with pytest.raises(MemOptError, match="18 tokens are no whole number of 4 sequences"):
        measure("adamw", two, tokens=(18,))


def test_phases_follow_each_other_and_profiles_come_last():
    plan = phases(job("adamw", profile=True, warmup=3, steps=5))
    assert [(p.tokens, p.profile) for p in plan] == [(16, False), (32, False), (16, True)]
    assert [p.start for p in plan] == [0, 8, 16]
    assert [p.last for p in plan] == [7, 15, 18]


def test_a_process_that_dies_or_a_config_that_fails_gets_a_row(tmp_path):
    config = yaml.safe_load(SMALL.read_text())
    config["model"]["init_args"]["num_heads"] = 5
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(config))
    rows = list(run([job("adamw", config=str(tmp_path / "bad.yaml"), log=str(tmp_path / "log"))], 60))
    assert len(rows) == 1
    assert rows[0].status.startswith("failed: MemOptError: The model cannot be built")
    assert "Traceback" in (tmp_path / "log").read_text()


def test_what_has_no_time_left_is_said_not_to_have_run():
    rows = list(run([job("adamw"), job("forge_adamw")], 60, budget_s=0))
    assert [row.status for row in rows] == ["not run: the time for all methods was up"] * 2


def test_failures_are_explained_in_a_line():
    assert explain(torch.OutOfMemoryError("CUDA out of memory. Tried ...")) == "out of memory"
    assert explain(NotInstalledError("torchao is not installed")) == "torchao is not installed"
    assert explain(UnsupportedError("no\n such  thing")) == "refused: no such thing"
    assert explain(KeyError("x")) == "failed: KeyError: 'x'"


def test_missing_packages_are_found_before_a_process_starts():
    with pytest.raises(NotInstalledError):
        Method(torch.optim.SGD, "x", package="no_such_package").package_version  # noqa: B018


def test_unknown_methods_are_listed():
    with pytest.raises(MemOptError, match=r"adamv.*forge_gefen"):
        chosen(["adamw", "adamv"])


def test_unknown_settings_are_named(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(SMALL.read_text().replace("warmup:", "warm_up:"))
    with pytest.raises(SystemExit):
        main(["bench", "--config", str(path), "--out", str(tmp_path / "out")])
    assert "knows methods, tokens, warmup, steps, not warm_up" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_busy_time_is_the_union_of_spans():
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4


def test_the_report_needs_only_the_csv(tmp_path):
    results = Table(tmp_path / "results.csv")
    for method, step in (("adamw", 200.0), ("forge_gefen", 90.0)):
        row = Row(tokens=512, step_ms=step, step_ms_low=step, step_ms_high=step, steps=3, tokens_per_s=1.0)
        row = described(row, job(method))
        row.peak_gib, row.loss, row.loss_step = 20.0, 6.0, 3
        results.add(row)
    results.add(described(Row(tokens=512, status="out of memory"), job("adamw_foreach")))
    rows = report.read(results.path)
    text = report.table(rows)
    assert "| forge, Gefen | 512 | 90.0 (90.0 to 90.0) | 0.45 |" in text
    assert "| torch AdamW, foreach | 512 | out of memory |" in text
    assert [path.name for path in report.plots(rows, tmp_path)] == report.pictures(rows) == ["memory.png"]
    again = [row | {"tokens": "1024", "peak_gib": ""} for row in rows]
    assert [path.name for path in report.plots(rows + again, tmp_path)] == report.pictures(rows + again)
    assert len(report.pictures(rows + again)) == 3
    assert report.pictures(again[2:]) == report.plots(again[2:], tmp_path) == []  # nothing was measured
    assert report.caption(rows).startswith("small_llama: ")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_names_known_methods_and_data(path):
    config = RunConfig.read(path)
    assert set(config.bench["methods"]) <= set(METHODS)
    assert config.cli.config.data.class_path == "lightning_memopt.data.RandomTokens"
    assert (
        config.bench["tokens"][0]
        == config.cli.config.data.init_args.seq_len * config.cli.config.data.init_args.batch_size
    )
    head = path.read_text().split("\n\n")[0]
    assert f"memopt bench --config configs/bench/{path.name}" in head
