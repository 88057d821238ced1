"""Every shipped YAML file must parse through the real program, and say what its comments say."""

from pathlib import Path

import pytest
import yaml

from lightning_memopt.cli import main

CONFIGS = sorted(Path(__file__).parent.parent.joinpath("configs").glob("*.yaml"))


def parsed(path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", "--config", str(path), "--print_config"])
    out, err = capsys.readouterr()
    assert not exit_info.value.code, err
    return yaml.safe_load(out)


def test_there_are_configs():
    assert {"quickstart", "text_files", "hf_finetune"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_parses(path, capsys):
    config, raw = parsed(path, capsys), yaml.safe_load(path.read_text())
    for section in ("model", "data"):
        assert config[section]["class_path"] == raw[section]["class_path"]
        assert raw[section]["init_args"].keys() <= config[section]["init_args"].keys()
    assert config["trainer"]["max_steps"] == raw["trainer"]["max_steps"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_run_folder_is_named_after_the_file(path):
    trainer = yaml.safe_load(path.read_text())["trainer"]
    logger = trainer["logger"]["init_args"]
    assert (logger["save_dir"], logger["name"], logger["version"]) == ("runs", path.stem, "")
    assert f"runs/{path.stem}" in [c.get("init_args", {}).get("dirpath") for c in trainer["callbacks"]]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_commands_in_the_comments_name_this_file(path):
    head = path.read_text().split("\n\n")[0]
    assert f"memopt fit --config configs/{path.name}" in head
    assert f"--ckpt_path runs/{path.stem}/last.ckpt" in path.read_text()
