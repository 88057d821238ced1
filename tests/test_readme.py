"""The README's examples must run as they stand; only their length is cut."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

import lightning_memopt
from lightning_memopt.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# What makes a run of the shipped configs short.
SHORT = [
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.val_check_interval=2",
    "--trainer.accelerator=cpu",
]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    return tmp_path


def test_python_examples_train(workdir):
    sources = blocks("python")
    shown = [line for line in sources[0].splitlines() if line.strip()]
    assert len(shown) <= 15, "the example has grown long"
    names = {}
    for source, optimizer in zip(sources, (torch.optim.AdamW, lightning_memopt.Gefen), strict=True):
        exec(compile(source, "README.md", "exec"), names)
        trainer = names["trainer"]
        assert isinstance(trainer.strategy, lightning_memopt.ForgeStrategy)
        assert isinstance(trainer.optimizers[0], optimizer)
        assert trainer.global_step == 5 * 16
        assert all(parameter.grad is None for parameter in trainer.lightning_module.parameters())
        batch = torch.randn(64, 8).to(trainer.lightning_module.net[0].weight.dtype)
        assert trainer.lightning_module.training_step(batch, 0) < batch.sum(dim=1).square().mean() / 4


def test_yaml_example_trains(workdir):
    (source,) = blocks("yaml")
    Path("example.yaml").write_text(source)
    Path("texts").mkdir()
    Path("texts", "a.txt").write_text("All work and no play. " * 1000)
    small = ["--model.init_args.hidden_size=32", "--model.init_args.num_layers=1"]
    fast = ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    main(["fit", "--config", "example.yaml", *SHORT, *small, *fast])


def test_commands_run(workdir, capsys):
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("memopt ")]
    verbs = [shlex.split(command)[1] for command in commands]
    assert verbs == ["fit", "fit", "generate", "export", "plan", "bench"]
    steps = iter((2, 3))
    for command in commands:
        args = shlex.split(command)[1:]
        if args[0] == "fit":
            args += [*SHORT, f"--trainer.max_steps={next(steps)}"]
        if args[0] == "generate":
            args += ["--max-new-tokens=5"]
        if args[0] == "bench":
            args += ["--methods=forge_adamw", "--steps=1", "--device=cpu"]
        capsys.readouterr()
        main(args)
        if args[0] == "generate":
            assert capsys.readouterr().out.startswith("def main(")
    assert Path("my-model", "model.safetensors").is_file()
    assert Path("runs", "quickstart", "loss.png").is_file()
    assert Path("runs", "bench", "small_llama", "table.md").is_file()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = [line.split()[1] for block in blocks("sh") for line in block.splitlines() if line.startswith("make ")]
    assert targets == ["train", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_every_config_is_listed_and_every_link_leads_somewhere():
    listed = re.findall(r"^\| \[`(configs/.+?)`\]\((.+?)\)", README, flags=re.MULTILINE)
    assert {name for name, _ in listed} == {f"configs/{path.name}" for path in ROOT.glob("configs/*.yaml")}
    for _, target in listed:
        assert yaml.safe_load((ROOT / target).read_text())
