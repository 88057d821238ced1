"""Optimizer states of sharded parameters: DTensors of a rank's rows, and from what was saved."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_memopt.backward.slot import Slot
from lightning_memopt.rules.foreign import check_entry
from lightning_memopt.rules.storage import Dense, Storage


def spread_rows(param: Tensor, value: Tensor) -> DTensor:
    """This rank's rows of a state entry as a DTensor that is sharded like the parameter."""
    assert isinstance(param, DTensor)
    shape = torch.Size((param.shape[0], *value.shape[1:]))
    stride = tuple(shape[i + 1 :].numel() for i in range(len(shape)))
    return DTensor.from_local(value, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride)


def row_entries(storage: Storage, state: MutableMapping[str, Any]) -> list[str]:
    """Those entries of a moment that have a row for each row of the weight; others are the same on all ranks."""
    rows = storage.rows(state, 0, 0)
    return [key for key in storage.entries() if key in state and rows[key] is not state[key]]


def spread(slot: Slot, storage: Sequence[Storage], state: dict[str, Any]) -> None:
    """Make DTensors of those entries that are of this rank's rows, sharded like the parameter.

    Moments of active weights are not: ranks have different numbers of them. Checkpoints have a form for that.
    """
    for moment in storage:
        rows = moment.per_block() if slot.sparse is not None else row_entries(moment, state)
        for key in rows:
            if key in state and not isinstance(state[key], DTensor):
                state[key] = spread_rows(slot.param, state[key])


def restored(slot: Slot, storage: Sequence[Storage], entries: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a dense weight from what was saved of it.

    Raises:
        UnsupportedError: It is the state of another optimizer, or of active weights only.
    """
    check_entry(slot.optimizer, slot.rule, storage, slot.name, entries)
    state: dict[str, Any] = {key: entries[key].float().cpu() for key in slot.rule.counts if key in entries}
    for moment in storage:
        if moment.name in entries:
            fresh = _moment(slot, moment, entries)
            rows = row_entries(moment, fresh)
            state |= {key: spread_rows(slot.param, fresh[key]) if key in rows else fresh[key] for key in fresh}
    return state


def _moment(slot: Slot, moment: Storage, entries: Mapping[str, Any]) -> dict[str, Any]:
    """A moment's entries for this rank's rows, from those saved."""
    if not isinstance(moment, Dense):
        return moment.restore(slot.weight, entries)
    return {moment.name: entries[moment.name].to(slot.weight.device, moment.dtype)}
