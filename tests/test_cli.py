import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_memopt.cli import MemOptCLI, main
from lightning_memopt.commands import COMMANDS
from lightning_memopt.models import LlamaModule, load_llama, load_module

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
RUN = Path("runs", "quickstart")
TINY = [
    "--config",
    str(QUICKSTART),
    "--model.init_args.hidden_size=32",
    "--model.init_args.num_layers=1",
    "--model.init_args.num_heads=2",
    "--model.init_args.num_kv_heads=1",
    "--model.init_args.warmup_steps=2",
    "--data.init_args.paths=[text.txt]",
    "--data.init_args.seq_len=16",
    "--data.init_args.batch_size=4",
    "--data.init_args.val_fraction=0.2",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=12",
    "--trainer.val_check_interval=4",
    "--trainer.limit_val_batches=2",
    "--trainer.log_every_n_steps=1",
]


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(60)))
    return tmp_path


def metrics(column):
    with (RUN / "metrics.csv").open() as file:
        return [(int(row["step"]), float(row[column])) for row in csv.DictReader(file) if row[column]]


def weights(path=RUN / "last.ckpt"):
    return torch.load(path, weights_only=True)["state_dict"]


def error_of(capsys, args):
    """The message of a command that must end with code 2."""
    with pytest.raises(SystemExit) as exit_info:
        main(args)
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def test_fit_leaves_a_complete_run(workdir):
    main(["fit", *TINY])
    assert {"config.yaml", "metrics.csv", "loss.png", "last.ckpt", "best.ckpt"} <= {p.name for p in RUN.iterdir()}
    losses = [value for _, value in metrics("train_loss")]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert len(metrics("val_loss")) == len(metrics("val_ppl")) == 3
    assert len(metrics("tokens_per_second")) == len(metrics("memory_gib")) == 12
    assert yaml.safe_load((RUN / "config.yaml").read_text())["model"]["init_args"]["hidden_size"] == 32
    assert not list(RUN.glob("version_*"))


def test_fit_again_replaces_the_run(workdir):
    main(["fit", *TINY])
    first = weights()
    main(["fit", *TINY])
    assert len(metrics("train_loss")) == 12
    assert len(list(RUN.glob("*.ckpt"))) == 2
    for name, value in weights().items():
        assert torch.equal(value, first[name]), name


def test_resume_equals_the_uninterrupted_run(workdir):
    # A cosine stretches over max_steps, so a run that is cut short by it needs a constant rate to be the
    # same.
    constant = ["fit", *TINY, "--model.init_args.schedule=constant"]
    main(constant)
    whole, curve = weights(), metrics("train_loss")
    main([*constant, "--trainer.max_steps=6"])
    main([*constant, f"--ckpt_path={RUN / 'last.ckpt'}"])
    assert metrics("train_loss") == curve
    for name, value in weights().items():
        assert torch.equal(value, whole[name]), name


def test_other_commands_leave_the_run_alone(workdir):
    main(["fit", *TINY])
    before = {path: path.read_bytes() for path in RUN.iterdir()}
    for command in ("validate", "test", "predict"):
        main([command, *TINY, f"--ckpt_path={RUN / 'last.ckpt'}"])
    assert {path: path.read_bytes() for path in RUN.iterdir()} == before


@pytest.mark.parametrize("resume", [[], [f"--ckpt_path={RUN / 'last.ckpt'}"]])
def test_a_refused_run_leaves_the_run_before_alone(workdir, capsys, resume):
    main(["fit", *TINY])
    before = {path: path.read_bytes() for path in RUN.iterdir()}
    assert "16" in error_of(capsys, ["fit", *TINY, "--trainer.precision=16-true", "--trainer.max_steps=20", *resume])
    assert {path: path.read_bytes() for path in RUN.iterdir()} == before


def test_config_is_not_written_into_the_working_folder_without_a_logger(workdir):
    Path("config.yaml").write_text("mine: true\n")
    main(["fit", *TINY, "--trainer.logger=false", "--trainer.callbacks=[]", "--trainer.max_steps=1"])
    assert Path("config.yaml").read_text() == "mine: true\n"


def test_optimizer_block_of_lightning_cli(workdir):
    args = ["fit", *TINY, "--optimizer=torch.optim.SGD", "--optimizer.lr=0.0", "--trainer.callbacks=[]"]
    cli = MemOptCLI([*args, "--trainer.max_steps=1", "--trainer.logger=false"])
    assert type(cli.trainer.optimizers[0]).__name__ == "SGD"
    fresh = LlamaModule(**{k: v for k, v in cli.model.hparams.items() if not k.startswith("_")})
    assert cli.trainer.global_step == 1
    assert sum(p.numel() for p in fresh.parameters()) == sum(p.numel() for p in cli.model.parameters())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["fit", "--config", "missing.yaml"], ["missing.yaml"]),
        (["fit", *TINY, "--trainer.wrong=1"], ["trainer.wrong"]),
        (["fit", *TINY, "--model.init_args.wrong=1"], ["wrong"]),
        (["fit", *TINY, "--model.init_args.num_heads=5"], ["hidden_size=32", "num_heads=5"]),
        (["fit", *TINY, "--data.init_args.seq_len=0"], ["seq_len=0"]),
        (["fit", *TINY, "--data.init_args.seq_len=100000"], ["tokens", "data.seq_len=100000"]),
        (["fit", *TINY, "--data.init_args.paths=[nothing/*.txt]"], ["data.paths", "nothing/*.txt"]),
        (["fit", *TINY, "--model.init_args.vocab_size=100"], ["256", "100", "vocab_size"]),
        (["fit", *TINY, "--trainer.strategy=nonsense"], ["nonsense"]),
        (["fit", *TINY, "--ckpt_path=missing.ckpt"], ["missing.ckpt"]),
        (["fit", *TINY, "--ckpt_path=text.txt"], ["text.txt", "checkpoint"]),
        (["generate"], ["ckpt"]),
        (["generate", "--ckpt", "missing.ckpt"], ["missing.ckpt"]),
        (["generate", "--ckpt", "text.txt"], ["text.txt", "checkpoint"]),
        (["generate", "--ckpt", "text.txt", "--temperature=-1"], ["temperature"]),
        (["generate", "--ckpt", "text.txt", "--warmth", "1"], ["warmth"]),
        (["export", "--ckpt", "missing.ckpt", "--out", "model"], ["missing.ckpt"]),
        (["nonsense"], ["nonsense", "fit", "predict", *COMMANDS]),
    ],
    ids=lambda value: "-".join(value[-2:])[-60:] if isinstance(value, list) else None,
)
def test_mistakes_are_told_in_a_sentence(workdir, capsys, args, words):
    err = error_of(capsys, args)
    for word in words:
        assert word in err


def test_unknown_key_in_the_yaml_file(workdir, capsys):
    config = yaml.safe_load(QUICKSTART.read_text())
    config["trainer"]["max_stepz"] = 3
    Path("typo.yaml").write_text(yaml.safe_dump(config))
    assert "max_stepz" in error_of(capsys, ["fit", "--config", "typo.yaml"])


def test_traceback_on_demand(workdir, monkeypatch):
    monkeypatch.setenv("MEMOPT_TRACEBACK", "1")
    with pytest.raises(Exception, match=r"missing\.ckpt"):
        main(["generate", "--ckpt", "missing.ckpt"])


def test_generate_continues_the_prompt_by_seed(workdir, capsys):
    main(["fit", *TINY])
    capsys.readouterr()
    texts = []
    for seed in ("1", "1", "2"):
        main(
            [
                "generate",
                "--ckpt",
                str(RUN / "last.ckpt"),
                "--prompt",
                "7 squared",
                "--max-new-tokens=40",
                "--seed",
                seed,
            ]
        )
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("7 squared")
    assert len(texts[0]) > len("7 squared") + 1
    assert texts[0] == texts[1] != texts[2]


def test_export_round_trip(workdir, capsys):
    main(["fit", *TINY])
    main(["export", "--ckpt", str(RUN / "last.ckpt"), "--out", "model"])
    module, data = load_module(RUN / "last.ckpt")
    assert data["seq_len"] == 16
    ids = torch.randint(256, (2, 12))
    assert torch.equal(load_llama("model")(ids), module(ids))
    assert json.loads(Path("model", "config.json").read_text())["hidden_size"] == 32
    capsys.readouterr()
    assert "--out model" in error_of(capsys, ["export", "--ckpt", str(RUN / "last.ckpt"), "--out", "model"])


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_help_names_every_command(capsys, args):
    with pytest.raises(SystemExit):
        main(args)
    out = capsys.readouterr().out
    for command in ("fit", "validate", "test", "predict", *COMMANDS):
        assert command in out


def test_help_offers_our_optimizers_and_not_their_base(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--model.help", "LlamaModule"])
    out = "".join(capsys.readouterr().out.split())  # names may be broken over lines
    assert all(f"lightning_memopt.{name}" in out for name in ("AdamW8bit", "Gefen", "Lion"))
    assert "CheckedOptimizer" not in out


def test_the_installed_program_runs():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_memopt.cli", "export", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--ckpt" in done.stdout


def test_resuming_what_does_not_fit(workdir, capsys):
    main(["fit", *TINY])
    resume = ["fit", *TINY, f"--ckpt_path={RUN / 'last.ckpt'}", "--trainer.max_steps=14"]
    other = ["--model.init_args.optimizer=torch.optim.SGD", "--model.init_args.optimizer.init_args.lr=0.1"]
    message = error_of(capsys, [*resume, *other, "--model.init_args.optimizer.init_args.momentum=0.9"])
    assert "SGD, 'momentum'" in message and "another one saved it" in message
    main(["fit", *TINY])
    torch.save({"state_dict": {}}, "weights.ckpt")
    assert "not saved by Lightning" in error_of(capsys, ["fit", *TINY, "--ckpt_path=weights.ckpt"])
    foreign = torch.load(RUN / "last.ckpt", weights_only=True)
    foreign["state_dict"]["stranger"] = torch.zeros(1)
    torch.save(foreign, "foreign.ckpt")
    assert "are not those of this model" in error_of(capsys, ["fit", *TINY, "--ckpt_path=foreign.ckpt"])
    foreign["hyper_parameters"]["_class_path"] = "lightning_memopt.models.HFCausalLM"
    torch.save(foreign, "foreign.ckpt")
    message = error_of(capsys, ["fit", *TINY, "--ckpt_path=foreign.ckpt"])
    assert "is a checkpoint of lightning_memopt.models.HFCausalLM, and the config's model is" in message


def test_resuming_says_which_model_options_it_keeps(workdir):
    main(["fit", *TINY])
    with pytest.warns(UserWarning, match=r"keeps the model options .*warmup_steps=2, not 7"):
        main(
            [
                "fit",
                *TINY,
                f"--ckpt_path={RUN / 'last.ckpt'}",
                "--trainer.max_steps=14",
                "--model.init_args.warmup_steps=7",
            ]
        )
