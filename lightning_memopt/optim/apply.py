"""A rule's step on stored gradients: the body of `step` and `load_state_dict` of this package's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.backward.scalars import StepScalars
from lightning_memopt.kernels import Update, apply_gradient
from lightning_memopt.kernels.dispatch import in_triton
from lightning_memopt.kernels.memory import Memory
from lightning_memopt.optim.shards import local, offset, sharded, sum_over_ranks
from lightning_memopt.rules import Rule
from lightning_memopt.rules.foreign import check_entry
from lightning_memopt.rules.storage import Storage

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot


@dataclass(slots=True, eq=False)
class _Target:
    """A parameter that holds a gradient: the part of a `Slot` that `StepScalars` reads and fills in."""

    name: str
    param: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    rule: Rule
    storage: tuple[Storage, ...]
    scalars: Mapping[str, float] = field(default_factory=dict)
    key: int = 0
    row: Tensor | None = None
    row_key: Tensor | None = None
    nonfinite: Tensor | None = None
    mean: float = 1.0
    sparse: None = None


@dataclass(slots=True, eq=False)
class _Kept:
    """What an optimizer keeps between steps, beside its state: tables of scalars, and each parameter's launches."""

    tables: dict[tuple[int, torch.device], StepScalars] = field(default_factory=dict)
    memories: dict[int, Memory] = field(default_factory=dict)


def step_parameters(optimizer: Optimizer, rule: Rule) -> None:
    """Take one step of `rule` on every parameter that holds a gradient.

    Reads ``rounding`` and ``seed`` from the parameter groups besides what the rule reads. Creates missing state.

    Raises:
        RuntimeError: A gradient is sparse.
    """
    if all(param.grad is None for group in optimizer.param_groups for param in group["params"]):
        return  # as after a backward pass that took the step
    rule.prepare(optimizer)
    kept: _Kept = optimizer.__dict__.setdefault("_kept", _Kept())
    first = 0
    for number, group in enumerate(optimizer.param_groups):
        targets = []
        for name, param in enumerate(group["params"], first):
            if param.grad is not None:
                state = optimizer.state[param]
                storage = rule.storage(param, group, param.dtype)
                if not state:
                    state.update(rule.init_state(param, group, storage))
                targets.append(_Target(str(name), param, group, state, rule, storage))
        first += len(group["params"])
        for device in {target.param.device for target in targets}:
            here = [target for target in targets if target.param.device == device]
            rule.settle_all([target.state for target in here])
            # Any number that grows with the steps and survives a checkpoint keeps the random bits fresh.
            taken = max(int(target.state["step"]) for target in here)
            table = kept.tables.setdefault((number, device), StepScalars(device))
            table.fill(cast("list[Slot]", here), group["seed"], taken, None)
            _step([(target, *_update(target, kept)) for target in here])


def _step(taken: Sequence[tuple[_Target, Update, Tensor]]) -> None:
    bad = _bad_elsewhere(taken)
    counted = []
    try:
        for target, update, grad in taken:
            if target not in bad and apply_gradient(update, grad, "auto"):
                counted.append(target)
    finally:  # also of those before one that raised
        if counted:
            counted[0].rule.advance_all([(target.group, target.state) for target in counted])


def _bad_elsewhere(taken: Sequence[tuple[_Target, Update, Tensor]]) -> set[_Target]:
    """Sharded parameters whose gradient is not finite in the rows of any rank.

    Plain torch leaves such an update out as a whole, on all ranks, as those that do not count the same steps would not
    learn at the same one either. Kernels leave out elements, and count.
    """
    groups: dict[Any, list[tuple[_Target, Tensor]]] = {}
    for target, update, grad in taken:
        distributed = sharded(target.param)
        if distributed is not None and not in_triton(update, "auto"):
            bad = ~(grad.abs() < target.rule.limit).all()
            groups.setdefault((distributed.device_mesh, distributed.placements), []).append((target, bad))
    found = set()
    for targets in groups.values():
        flags = torch.stack([bad for _, bad in targets]).float()
        sum_over_ranks(targets[0][0].param, flags)
        found |= {target for (target, _), flag in zip(targets, flags.tolist(), strict=True) if flag}
    return found


def _update(target: _Target, kept: _Kept) -> tuple[Update, Tensor]:
    """The update of this rank's rows, and their gradient."""
    grad = target.param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(f"parameter {target.name} has a sparse gradient; build its layer with sparse=False.")
    # The kernels see this rank's rows; what they write is the state's, by reference.
    weight, grad = local(target.param.detach()), local(grad)
    state = {key: local(value) for key, value in target.state.items()}
    first = state[target.storage[0].name] if target.storage else weight
    if first.dim() > weight.dim():  # a flat shard, whose state is kept as one row
        weight, grad = weight.view(first.shape), grad.view(first.shape)
    update = Update(
        name=target.name,
        weight=weight,
        state=state,
        rule=target.rule,
        tile=target.rule.tile(target.group),
        storage=target.storage,
        scalars=target.scalars,
        key=target.key,
        rounding=target.group["rounding"],
        offset=offset(target.param),
        row=target.row,
        row_key=target.row_key,
        nonfinite=target.nonfinite,
        # A parameter may take the place, and the id, of one that is gone: what is remembered is compared at every step.
        memory=kept.memories.setdefault(id(target.param), Memory()),
    )
    return update, grad


def load_exactly(
    optimizer: Optimizer, rule: Rule, saved: Mapping[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Load a state dict without torch's cast of every state tensor to its parameter's dtype.

    Moments saved by an optimizer that keeps them whole (``torch.optim.AdamW``) are encoded.

    Args:
        optimizer: The optimizer to load into.
        rule: Its rule.
        saved: What `state_dict` of this or of such an optimizer returned.
        load: The base class's bound ``load_state_dict``.

    Raises:
        UnsupportedError: It is the state of another optimizer, or of active weights only.
    """
    whole: Mapping[Any, Mapping[str, Any]] = saved["state"]
    # A copy, as steps are counted in place; on the CPU, whatever implementation of torch's counted them.
    only_steps = {
        i: {"step": torch.as_tensor(entry["step"]).to("cpu", torch.float32, copy=True)}
        for i, entry in whole.items()
        if "step" in entry
    }
    # Options that the saving optimizer did not have keep their defaults.
    groups = [{**optimizer.defaults, **group} for group in saved["param_groups"]]
    load({**saved, "state": only_steps, "param_groups": groups})
    numbers = (i for group in saved["param_groups"] for i in group["params"])
    for group in optimizer.param_groups:
        for param, i in zip(group["params"], numbers, strict=False):
            if i not in whole:
                continue
            state, entry = optimizer.state[param], whole[i]
            storages = rule.storage(param, group, param.dtype)
            check_entry(optimizer, rule, storages, f"a parameter of shape {tuple(param.shape)}", entry)
            for storage in storages:
                state.update(storage.restore(param, entry))
