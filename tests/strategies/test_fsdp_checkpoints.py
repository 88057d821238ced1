"""Sharded checkpoints: exact on any number of ranks, exchanged with other strategies, complete or refused."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from harness import Module, Net
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from sharded import (
    Deep,
    Ranks,
    ShardsItself,
    Wide,
    assert_same_states,
    furthest,
    train,
    train_forge,
    train_fsdp2,
)
from torch import nn
from torch.optim import AdamW

import lightning_memopt as memopt
from lightning_memopt.strategies.aside import completing

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": partial(AdamW, lr=3e-3),
    "adamw8bit": partial(memopt.AdamW8bit, lr=3e-3),
    "gefen": partial(memopt.Gefen, lr=3e-3),
}
FORMATS = {"folder": {"save_distributed_checkpoint": True}, "file": {"save_distributed_checkpoint": False}}
# All steps see one batch: Lightning starts the data anew on resume.
FIVE, TEN = {"batches": 1, "max_steps": 5}, {"batches": 1, "max_steps": 10}


@pytest.fixture
def ranks(one: Ranks, two: Ranks) -> dict[int, Ranks]:
    return {1: one, 2: two}


def wide(optimizer: str) -> Any:
    return partial(Module, net=Wide, optimizer=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reshard(ranks: dict[int, Ranks], optimizer: str, form: str, tmp_path: Path) -> None:
    """2 → 1, 1 → 2 and 2 → 2: states are the saved ones to the last bit, and training goes on as if uninterrupted."""
    make, strategy = wide(optimizer), FORMATS[form]
    for before, after in ((2, 1), (1, 2), (2, 2)):
        path = tmp_path / f"{before}{after}.ckpt"
        saved = ranks[before](train, make, strategy, save=path, **FIVE)[0]
        assert path.is_dir() == (form == "folder")
        loaded = ranks[after](train, make, strategy, ckpt_path=path, **FIVE)[0]
        assert loaded["step"] == 5
        assert_same_states(saved, loaded)
        resumed = ranks[after](train, make, strategy, ckpt_path=path, **TEN)[0]
        whole = ranks[after](train, make, strategy, **TEN)[0]
        assert resumed["step"] == 10
        assert furthest(resumed, whole) <= (1e-6 if before == after or optimizer == "adamw" else 1e-3)
        if before == after:
            assert_same_states(resumed, whole)


def test_four_to_two(ranks: dict[int, Ranks], four: Ranks, tmp_path: Path) -> None:
    """Short and empty shards, and replicas."""
    make = partial(Module, net=Deep)
    for i, strategy in enumerate(({}, {"replicate": 2})):
        path = tmp_path / f"{i}.ckpt"
        saved = four(train, make, strategy, save=path, **FIVE)[0]
        assert_same_states(saved, ranks[2](train, make, ckpt_path=path, **FIVE)[0])
        assert_same_states(saved, four(train, make, {"replicate": 2 - i}, ckpt_path=path, **FIVE)[0])


@pytest.mark.parametrize(
    ("form", "optimizer"), [("folder", "adamw"), ("file", "adamw"), ("folder", "adamw8bit"), ("file", "gefen")]
)
def test_to_and_from_plain_fsdp2(ranks: dict[int, Ranks], form: str, optimizer: str, tmp_path: Path) -> None:
    """Lightning's own strategy and the optimizer's own step read what is written here, and the other way round."""
    net = Deep if optimizer == "adamw" else Wide
    make, two = partial(ShardsItself, net=net, optimizer=OPTIMIZERS[optimizer]), ranks[2]
    full = form == "file"
    here, there = tmp_path / "here.ckpt", tmp_path / "there.ckpt"
    saved = two(train, make, FORMATS[form], save=here, **FIVE)[0]
    assert_same_states(saved, two(train_fsdp2, make, full=full, ckpt_path=here, **FIVE)[0])
    saved = two(train_fsdp2, make, full=full, save=there, **FIVE)[0]
    assert_same_states(saved, two(train, make, FORMATS[form], ckpt_path=there, **FIVE)[0])
    whole = two(train_fsdp2, make, full=full, **TEN)[0]
    if optimizer == "adamw":
        assert furthest(two(train, make, FORMATS[form], ckpt_path=there, **TEN)[0], whole) <= 1e-6
    else:  # codes are rounded by other random bits here and there
        assert furthest(two(train_fsdp2, make, full=full, ckpt_path=there, **TEN)[0], whole) == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_to_and_from_one_device(ranks: dict[int, Ranks], optimizer: str, tmp_path: Path) -> None:
    """A single file moves between `forge` and `forge_fsdp`."""
    make, strategy = wide(optimizer), FORMATS["file"]
    here, there = tmp_path / "here.ckpt", tmp_path / "there.ckpt"
    saved = ranks[2](train, make, strategy, save=here, **FIVE)[0]
    assert_same_states(saved, train_forge(make, ckpt_path=here, **FIVE))
    saved = train_forge(make, save=there, **FIVE)
    assert_same_states(saved, ranks[2](train, make, strategy, ckpt_path=there, **FIVE)[0])


def test_a_folder_becomes_a_file_for_one_device(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """The way that the refusal of a folder by `forge` names."""
    folder, file = tmp_path / "folder.ckpt", tmp_path / "file.ckpt"
    saved = ranks[2](train, wide("gefen"), save=folder, **FIVE)[0]
    with pytest.raises(memopt.UnsupportedError, match=r"folder\.ckpt: a folder .*save_distributed_checkpoint=False"):
        train_forge(wide("gefen"), ckpt_path=folder, **FIVE)
    ranks[1](train, wide("gefen"), FORMATS["file"], ckpt_path=folder, save=file, **FIVE)
    assert_same_states(saved, train_forge(wide("gefen"), ckpt_path=file, **FIVE))


def test_whole_moments_become_codes(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """AdamW's checkpoint continues under AdamW8bit and Gefen; codes are not taken for moments."""
    two, path = ranks[2], tmp_path / "a.ckpt"
    saved = two(train, wide("adamw"), save=path, **FIVE)[0]
    for optimizer in ("adamw8bit", "gefen"):
        loaded = two(train, wide(optimizer), ckpt_path=path, **FIVE)[0]
        state = loaded["states"]["net.blocks.0.0.weight"]
        assert state["exp_avg"].dtype == torch.uint8 and state["step"] == 5
        assert two(train, wide(optimizer), ckpt_path=path, **TEN)[0]["step"] == 10
        assert furthest(saved, loaded) == 0
    coded = tmp_path / "b.ckpt"
    two(train, wide("adamw8bit"), save=coded, **FIVE)
    for error in two.attempt(train, wide("adamw"), ckpt_path=coded, **FIVE):
        assert isinstance(error, memopt.UnsupportedError) and "another one saved it" in str(error)


def test_float32_moments_of_bf16_weights(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """They are not rounded on the way."""
    strategy, options = {"state_dtype": "float32"}, {"precision": "bf16-true"}
    for form in FORMATS.values():
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.ckpt"
        saved = ranks[2](train, wide("adamw"), strategy | form, save=path, **options, **FIVE)[0]
        assert saved["states"]["net.head.weight"]["exp_avg"].dtype == torch.float32
        loaded = ranks[1](train, wide("adamw"), strategy | form, ckpt_path=path, **options, **FIVE)[0]
        assert_same_states(saved, loaded)


def table_alone(net: nn.Module) -> list[dict[str, Any]]:
    table = net.embedding.weight
    return [{"params": [table], "lr": 1e-3}, {"params": [p for p in net.parameters() if p is not table]}]


def test_a_tied_weight_in_a_group_of_its_own(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """A folder names it once, by either of its names."""
    make = partial(Module, net=Net, groups=table_alone)
    ranks[2](train, make, None, tmp_path / "checkpoint", batches=1, max_steps=3)
    whole = ranks[2](train, make, batches=1, max_steps=6)[0]
    resumed = ranks[2](train, make, None, ckpt_path=tmp_path / "checkpoint", batches=1, max_steps=6)[0]
    assert furthest(whole, resumed) == 0


class Dies(pl.Callback):
    """Kills rank 1 while the second checkpoint is written, or in the middle of a backward pass."""

    def __init__(self, when: str, path: Path) -> None:
        self.when, self.path = when, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.save_checkpoint(self.path)
        if batch_idx == 4 and self.when.startswith("save"):
            if self.when == "save as a file":
                trainer.strategy._save_distributed_checkpoint = False
            if trainer.global_rank == 1:
                trainer.strategy.barrier = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            trainer.save_checkpoint(self.path)
        if batch_idx == 4 and self.when == "backward" and trainer.global_rank == 1:
            module.net.blocks[0].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("when", ["save", "save as a file", "backward"])
def test_killed_rank_leaves_the_last_complete_checkpoint(ranks: dict[int, Ranks], when: str, tmp_path: Path) -> None:
    """The other rank ends with an error, and the folder is the one of three steps, whole."""
    path = tmp_path / "last.ckpt"
    doomed = Ranks(2)
    try:
        results = doomed.attempt(train, partial(Module, net=Deep), callbacks=[Dies(when, path)], max_steps=8)
    finally:
        doomed.stop()
    assert isinstance(results[0], RuntimeError) and isinstance(results[1], EOFError)
    resumed = ranks[1](train, partial(Module, net=Deep), ckpt_path=path, max_steps=4)[0]
    assert resumed["step"] == 4
    expected = ranks[1](train, partial(Module, net=Deep), max_steps=3)[0]
    loaded = ranks[1](train, partial(Module, net=Deep), ckpt_path=path, max_steps=3)[0]
    assert furthest(expected, loaded) <= 1e-6
    if when == "save":
        partly = tmp_path / "last.ckpt.partial"
        assert partly.is_dir()
        (error,) = ranks[1].attempt(train, partial(Module, net=Deep), ckpt_path=partly)
        assert isinstance(error, memopt.UnsupportedError) and "not a complete checkpoint" in str(error)


def test_a_checkpoint_replaces_one_of_the_other_form(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """A file over a folder and back, of the same name, and nothing beside it; other folders are left alone."""
    two, make, path = ranks[2], partial(Module, net=Deep), tmp_path / "last.ckpt"
    for form in ("folder", "file", "file", "folder", "folder"):
        saved = two(train, make, FORMATS[form], save=path, **FIVE)[0]
        assert path.is_dir() == (form == "folder") and [*tmp_path.iterdir()] == [path]
        assert_same_states(saved, two(train, make, ckpt_path=path, **FIVE)[0])
    for strategy in FORMATS.values():
        for error in two.attempt(train, make, strategy, save=tmp_path, **FIVE):
            assert isinstance(error, IsADirectoryError) and "not of a checkpoint" in str(error)
    assert [*tmp_path.iterdir()] == [path]


class Twice(pl.Callback):
    """Saves after three steps, and again after five."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (2, 4):
            trainer.save_checkpoint(self.path)


def train_and_break_off(path: Path, later: list[Any], breaks: bool) -> dict[str, Any]:
    """Train with saves in another thread, of which the second breaks off in the middle of the file."""
    calls = count()

    def save(checkpoint: Any, into: Any) -> None:
        torch.save(checkpoint, into)
        if next(calls) and breaks:
            os.truncate(into, os.path.getsize(into) // 2)
            raise OSError("no space left on device")

    io = AsyncCheckpointIO(*later)
    with mock.patch("lightning.fabric.plugins.io.torch_io._atomic_save", save):
        options: dict[str, Any] = {"callbacks": [Twice(path)], "plugins": [io], "max_steps": 6}
        return train(partial(Module, net=Deep), FORMATS["file"], **options)


@pytest.mark.parametrize("later", [[], [TorchCheckpointIO()]], ids=["alone", "given"])
def test_a_save_in_another_thread_leaves_the_last_complete_file(
    ranks: dict[int, Ranks], later: list[Any], tmp_path: Path
) -> None:
    """Of which there is one under the name at any time, also where a folder was."""
    make, path = partial(Module, net=Deep), tmp_path / "last.ckpt"
    ranks[1](train, make, FORMATS["folder"], save=path, **FIVE)
    assert path.is_dir()
    (error,) = ranks[1].attempt(train_and_break_off, path, later, breaks=True)
    assert isinstance(error, OSError) and "no space left" in str(error)
    assert path.is_file() and ranks[1](train, make, ckpt_path=path, max_steps=4)[0]["step"] == 4
    assert torch.load(path, weights_only=False)["global_step"] == 3
    ranks[2](train_and_break_off, path, later, breaks=False)
    assert torch.load(path, weights_only=False)["global_step"] == 5
    assert [*tmp_path.iterdir()] == [path]


def test_wrappers_of_wrappers_give_files_their_names_once_complete(tmp_path: Path) -> None:
    """However often they are asked to: what writes in the end does so once."""
    io: Any = _WrappingCheckpointIO(_WrappingCheckpointIO(TorchCheckpointIO()))
    assert completing(completing(io)) is io
    assert completing(innermost := io.checkpoint_io.checkpoint_io) is innermost
    seen = list[list[str]]()

    def save(checkpoint: Any, into: Path) -> None:
        torch.save(checkpoint, into)
        seen.append([path.name for path in tmp_path.iterdir()])

    with mock.patch("lightning.fabric.plugins.io.torch_io._atomic_save", save):
        io.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    assert seen == [["a.ckpt.partial"]] and io.load_checkpoint(tmp_path / "a.ckpt") == {"step": 1}
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert not [*tmp_path.iterdir()]


class TakesNames(TorchCheckpointIO):
    """Takes options by their names, as Lightning gives them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, **options: Any) -> None:
        assert options == {"storage_options": None}
        super().save_checkpoint(checkpoint, path)


@pytest.mark.parametrize("later", [False, True])
def test_files_are_written_by_the_users_own_means(ranks: dict[int, Ranks], later: bool, tmp_path: Path) -> None:
    io = AsyncCheckpointIO(TakesNames()) if later else TakesNames()
    path = tmp_path / "a.ckpt"
    ranks[1](train, partial(Module, net=Deep), FORMATS["file"], callbacks=[Twice(path)], plugins=[io], max_steps=6)
    assert torch.load(path, weights_only=False)["global_step"] == 5


def test_incomplete_folders_are_refused(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """Whichever of the closing files is missing; and a checkpoint of another optimizer or module says so."""
    two, make, path = ranks[2], partial(Module, net=Deep), tmp_path / "a.ckpt"
    two(train, make, save=path, **FIVE)
    for missing in ("meta.pt", ".metadata"):
        broken = tmp_path / f"without{missing}"
        shutil.copytree(path, broken)
        (broken / missing).unlink()
        for error in two.attempt(train, make, ckpt_path=broken, **FIVE):
            assert isinstance(error, memopt.UnsupportedError) and "Resume from the one before" in str(error)
