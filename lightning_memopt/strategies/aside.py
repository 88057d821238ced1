"""Checkpoints that are written aside, under another name, and renamed once they are complete."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO


def aside(path: Path) -> Path:
    """Where what will be called `path` is written."""
    return path.with_name(path.name + ".partial")


def take_place(path: Path) -> None:
    """Rename what was written aside: a file over a file at once, else what was there is kept until then as ``.old``."""
    new, old = aside(path), path.with_name(path.name + ".old")
    if path.is_dir() or (path.exists() and new.is_dir()):
        remove(old)
        path.rename(old)
    new.replace(path)
    remove(old)


def remove(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def completing(io: CheckpointIO) -> CheckpointIO:
    """What saves as `io` does, but gives a file its name only once it is complete.

    An `AsyncCheckpointIO` and other wrappers write later, in a thread of theirs, so whatever they write by is replaced.
    """
    if not isinstance(io, _WrappingCheckpointIO):
        return io if isinstance(io, _Completing) else _Completing(io)
    if io.checkpoint_io is not None:
        io._checkpoint_io = completing(io.checkpoint_io)
    return io


class _Completing(CheckpointIO):
    """Writes files aside and renames them, in the thread that writes."""

    def __init__(self, io: CheckpointIO) -> None:
        self.io = io

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        path = Path(path)
        remove(aside(path))
        self.io.save_checkpoint(checkpoint, aside(path), storage_options=storage_options)  # as Lightning calls it
        take_place(path)

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.io.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: _PATH) -> None:
        self.io.remove_checkpoint(path)

    def teardown(self) -> None:
        self.io.teardown()
