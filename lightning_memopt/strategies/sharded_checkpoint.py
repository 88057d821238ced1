"""Checkpoints of sharded runs: complete or not there, with states that fit any number of ranks.

A folder or file is written under another name and renamed when all ranks are through, so a run that is killed leaves
the last complete one. Optimizer states are read in the shapes and precisions in which they were saved, each rank its
rows, and only then turned into what the run's own optimizer keeps; torch's loading would cast and expect equal shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_load
from lightning.fabric.strategies.model_parallel import _load_checkpoint
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lightning_memopt.backward.sharded_states import spread_rows
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.optim.gefen_columns import SCALE
from lightning_memopt.optim.shards import local
from lightning_memopt.sparsity import portable
from lightning_memopt.sparsity.state import COHORT
from lightning_memopt.strategies.aside import aside, completing, remove, take_place

# In a folder that is being written.
INCOMPLETE = "INCOMPLETE"
# What Lightning and torch write last.
CLOSING = ("meta.pt", ".metadata")
# Entries of a parameter's state that are whole on every rank.
WHOLE = ("codebook", SCALE)


class CompleteCheckpoints(ModelParallelStrategy):
    """Lightning's strategy, whose checkpoints get their name only once they are complete."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save a single file or a folder, which at the end replaces the checkpoint of that name, of either form.

        Raises:
            IsADirectoryError: There is a folder of that name with something else in it.
        """
        path = Path(self.broadcast(filepath))
        if path.is_dir() and any(path.iterdir()) and not is_checkpoint(path):
            raise IsADirectoryError(f"{path} is a folder, but not of a checkpoint; it is left as it is.")
        save = self._save_folder if self._save_distributed_checkpoint else self._save_file
        save(checkpoint, path, storage_options)
        self.barrier()

    def _save_folder(self, checkpoint: dict[str, Any], path: Path, storage_options: Any | None) -> None:
        partial = aside(path)
        if self.global_rank == 0:
            remove(partial)
            partial.mkdir(parents=True)
            (partial / INCOMPLETE).touch()
        self.barrier()
        super().save_checkpoint(checkpoint, partial, storage_options)
        self.barrier()
        if self.global_rank == 0:
            (partial / INCOMPLETE).unlink()
            take_place(path)

    def _save_file(self, checkpoint: dict[str, Any], path: Path, storage_options: Any | None) -> None:
        self.barrier()  # all ranks have given what it holds of them
        if self.global_rank == 0:
            completing(self.checkpoint_io).save_checkpoint(checkpoint, path, storage_options=storage_options)

    def teardown(self) -> None:
        """Also wait for what other threads write, and raise what went wrong there, which Lightning's leaves out."""
        super().teardown()
        self.checkpoint_io.teardown()


def is_checkpoint(folder: Path) -> bool:
    """Whether this is the folder of a sharded checkpoint."""
    return any((folder / name).is_file() for name in CLOSING)


def refuse_incomplete(path: Path) -> None:
    """Raise for a folder that was not written to its end.

    Raises:
        UnsupportedError: As said.
    """
    if not path.is_dir():
        return
    missing = [name for name in CLOSING if not (path / name).is_file()]
    if missing or (path / INCOMPLETE).exists():
        raise UnsupportedError(
            f"{path} is not a complete checkpoint: the run that wrote it ended before all ranks were through. "
            "Resume from the one before it."
        )


def load_module(path: Path, module: nn.Module, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Load the weights of a folder or file; returns everything else in it that is small, or in a file everything."""
    return _load_checkpoint(path=path, state={"state_dict": module}, strict=strict, weights_only=weights_only)


@dataclass
class SavedOptimizer:
    """An optimizer's state as saved, this rank's rows of it.

    Attributes:
        groups: Options of each parameter group.
        states: By parameter; tensors with a row for each row of the parameter hold this rank's rows.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    states: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)


def read_optimizers(
    path: Path, checkpoint: Mapping[str, Any], module: nn.Module, optimizers: Sequence[Optimizer]
) -> list[SavedOptimizer]:
    """What was saved for each of the optimizers.

    Args:
        path: Folder or file.
        checkpoint: What `load_module` returned.
        module: The sharded module.
        optimizers: The run's.

    Raises:
        UnsupportedError: There is no state for one of them, or it is of other parameters.
    """
    if path.is_dir():
        return _read_folder(path, module, optimizers)
    saved = checkpoint.get("optimizer_states", [])
    if len(saved) != len(optimizers):
        raise UnsupportedError(f"{path} holds {len(saved)} optimizer states; the module has {len(optimizers)}.")
    return [_read_file(path, state, optimizer) for state, optimizer in zip(saved, optimizers, strict=True)]


def _by_rows(param: Tensor, key: str, shape: Sequence[int]) -> bool:
    return key not in WHOLE and len(shape) > 0 and shape[0] == param.shape[0]


def _read_file(path: Path, saved: Mapping[str, Any], optimizer: Optimizer) -> SavedOptimizer:
    """Parameters are numbered in the order of the groups, as in every ``state_dict`` of an optimizer."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len(numbers) != len(params):
        raise UnsupportedError(f"{path} holds the state of {len(numbers)} parameters; the optimizer has {len(params)}.")
    result = SavedOptimizer([_options(group) for group in saved["param_groups"]])
    for number, param in zip(numbers, params, strict=True):
        entries = saved["state"].get(number)
        if entries is None:
            continue
        if portable.is_sparse(entries):
            result.states[param] = portable.from_whole(param, entries)
            continue
        result.states[param] = {
            key: _my_rows(param, value) if isinstance(value, Tensor) and _by_rows(param, key, value.shape) else value
            for key, value in entries.items()
        }
    return result


def _my_rows(param: Tensor, value: Tensor) -> Tensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)  # type: ignore[attr-defined]
    return value[start[0] : start[0] + shape[0]].to(param.device, copy=True)


def _read_folder(path: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> list[SavedOptimizer]:
    """Parameters go by name. Every rank reads its rows only."""
    metadata = FileSystemReader(path).read_metadata()
    params = dict(module.named_parameters(remove_duplicate=False))
    target: dict[str, Any] = {f"optimizer_{i}": {"state": {}, "param_groups": []} for i in range(len(optimizers))}
    sparse: dict[str, int] = {}  # active weights of sparse parameters
    for flat, way in (metadata.planner_data or {}).items():
        if way[0] in target and way[1] == "state" and way[3] == COHORT:
            sparse[way[2]] = metadata.state_dict_metadata[flat].size[0]  # type: ignore[union-attr]
    for flat, way in (metadata.planner_data or {}).items():
        if way[0] not in target:
            continue
        stored = metadata.state_dict_metadata[flat]
        value: Any = None
        if way[1] == "state":
            if way[2] not in params:
                raise UnsupportedError(f"{path} holds the optimizer's state of {way[2]}, which is not in the module.")
            value = _room(params[way[2]], way[3], stored, sparse.get(way[2]))
        set_element(target, way, value)
    for name, part in target.items():
        if not part["state"] and not part["param_groups"]:
            raise UnsupportedError(f"{path} holds no {name}. Save with the optimizers, or load the weights alone.")
    _distributed_checkpoint_load(target, path)
    return [_from_names(path, target[f"optimizer_{i}"], optimizer, params) for i, optimizer in enumerate(optimizers)]


def _room(param: Tensor, key: str, stored: Any, active: int | None) -> Tensor | None:
    """A tensor to read an entry into, if it is one.

    Args:
        param: The parameter.
        key: Of the entry.
        stored: What the folder says of it.
        active: Active weights, if the parameter was sparse.
    """
    if not isinstance(stored, TensorStorageMetadata):
        return None
    dtype, shape = stored.properties.dtype, tuple(stored.size)
    if active is not None and portable.is_compact(key, shape, active):
        return portable.even_room(param, shape, dtype)
    if not _by_rows(param, key, stored.size):
        return torch.empty(stored.size, dtype=dtype)
    rows = local(param.detach()).shape[0]
    return spread_rows(param, torch.empty((rows, *stored.size[1:]), dtype=dtype, device=param.device))


def _from_names(
    path: Path, saved: Mapping[str, Any], optimizer: Optimizer, params: Mapping[str, nn.Parameter]
) -> SavedOptimizer:
    result = SavedOptimizer()
    mine = {param for group in optimizer.param_groups for param in group["params"]}
    for name, entries in saved["state"].items():
        if params[name] in mine:
            own = {key: local(value) if isinstance(value, Tensor) else value for key, value in entries.items()}
            result.states[params[name]] = portable.from_even(params[name], own) if portable.is_sparse(own) else own
    for group in optimizer.param_groups:
        listed = set(group["params"])
        wanted = {name for name, param in params.items() if param in listed}  # all names of a tied weight
        found = next((old for old in saved["param_groups"] if wanted & set(old["params"])), None)
        if found is None and wanted:
            raise UnsupportedError(f"{path} has no parameter group with {sorted(wanted)[0]}.")
        result.groups.append(_options(found or {}))
    return result


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
