"""A rule's step on stored gradients: the body of `step` and `load_state_dict` of this package's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.backward.scalars import StepScalars
from lightning_memopt.compat import refusal
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.kernels import Update, apply_gradient
from lightning_memopt.kernels.dispatch import in_triton
from lightning_memopt.kernels.memory import Memory
from lightning_memopt.optim.shards import local, offset, placed_as, sharded, sum_over_ranks
from lightning_memopt.rules import Rule
from lightning_memopt.rules.foreign import FOREIGN, check_entry, check_family
from lightning_memopt.rules.storage import Storage

if TYPE_CHECKING:
    from lightning_memopt.backward.slot import Slot
    from lightning_memopt.optim.base import CheckedOptimizer

# Options of torch's AdamW that choose between its implementations.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


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


@torch._disable_dynamo
def step_parameters(optimizer: Optimizer, rule: Rule) -> None:
    """Take one step of `rule` on every parameter that holds a gradient.

    Reads ``rounding`` and ``seed`` from the parameter groups besides what the rule reads. Creates missing state.

    Raises:
        RuntimeError: A gradient is sparse.
        UnsupportedError: A parameter is complex, or a group has an option that the rule does not know.
    """
    if all(param.grad is None for group in optimizer.param_groups for param in group["params"]):
        return  # as after a backward pass that took the step
    rule.prepare(optimizer)
    kept: _Kept = optimizer.__dict__.setdefault("_kept", _Kept())
    first = 0
    for number, group in enumerate(optimizer.param_groups):
        rule.check(group)
        targets = []
        for name, param in enumerate(group["params"], first):
            if param.grad is not None:
                check_steppable(optimizer, str(name), param)
                state = optimizer.state[param]
                storage = rule.storage(param, group, param.dtype)
                if "step" not in state:  # there may be entries of the user's
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
            # Kernels run on the current device.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                _step([(target, *_update(target, kept)) for target in here])


def check_steppable(optimizer: Optimizer, name: str, param: Tensor) -> None:
    """See to it that a parameter and its gradient are ones that rules know.

    Raises:
        RuntimeError: The gradient is sparse.
        UnsupportedError: The parameter is complex.
    """
    if param.grad is not None and param.grad.layout != torch.strided:
        raise RuntimeError(f"parameter {name} has a sparse gradient; build its layer with sparse=False.")
    if param.is_complex():
        raise UnsupportedError(
            f"parameter {name} is complex; {type(optimizer).__name__} steps on real ones. Let another optimizer have "
            "it, or make it a real parameter that the module views as complex."
        )


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
    # The kernels see this rank's rows; what they write is the state's, by reference.
    weight, grad = local(target.param.detach()), local(placed_as(target.param, grad))
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
    optimizer: CheckedOptimizer, rule: Rule, saved: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Load a state dict without torch's cast of every state tensor to its parameter's dtype.

    Moments saved by an optimizer that keeps them whole (``torch.optim.AdamW``) are encoded. What is loaded is what the
    user's hooks make of `saved`, and hooks that follow see it whole. Nothing is changed before all of it was checked,
    and what was there is let go before what comes is made.

    Args:
        optimizer: The optimizer to load into.
        rule: Its rule.
        saved: What `state_dict` of this or of such an optimizer returned.
        load: The base class's bound ``load_state_dict``.

    Raises:
        UnsupportedError: It is the state of another optimizer, or of active weights only.
        ValueError: An option is out of range.
    """
    coming: dict[Tensor, tuple[Mapping[str, Any], tuple[Storage, ...]]] = {}

    def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        check_family(optimizer, given["param_groups"])
        groups = _merged(optimizer, given["param_groups"])
        others = dict(given["state"])
        for group, loaded in zip(optimizer.param_groups, groups, strict=False):  # torch tells if there are too many
            optimizer.check_options(loaded)
            rule.check(loaded)
            for param, i in zip(group["params"], loaded["params"], strict=False):
                entry, storages = given["state"].get(i, {}), rule.storage(param, loaded, param.dtype)
                if _checked(optimizer, rule, param, storages, entry):
                    coming[param] = entry, storages
                    ours = {*rule.counts, *(key for storage in storages for key in storage.entries())}
                    others[i] = {key: value for key, value in entry.items() if key not in ours}
        return {**given, "state": others, "param_groups": groups}

    def fill(_: Optimizer) -> None:
        for param, (entry, storages) in coming.items():
            state = optimizer.state[param]
            # A copy, as steps are counted in place; on the CPU, whatever implementation of torch's counted them.
            state |= {key: torch.as_tensor(entry[key]).to("cpu", torch.float32, copy=True) for key in rule.counts}
            for storage in storages:
                state |= storage.restore(param, entry)

    hooks = (
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(fill, prepend=True),
    )
    try:
        load(saved)
    finally:
        for hook in hooks:
            hook.remove()


def _merged(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Saved groups; options that the saving optimizer did not have are those of the groups here."""
    # Loading, as copying, makes torch add defaults that no group has.
    own = [{key: group[key] for key in optimizer.defaults if key in group} for group in optimizer.param_groups]
    own += [{}] * len(saved)
    return [
        mine | {key: value for key, value in group.items() if key not in IMPLEMENTATION}
        for mine, group in zip(own, saved, strict=False)
    ]


def _checked(
    optimizer: Optimizer, rule: Rule, param: Tensor, storages: Sequence[Storage], entry: Mapping[str, Any]
) -> bool:
    """Whether a saved state is one to go on from; else no step was taken, and what it has is the user's.

    Raises:
        UnsupportedError: It is another optimizer's, or another weight's.
    """
    name = f"a parameter of shape {tuple(param.shape)}"
    check_entry(optimizer, rule, storages, name, entry)
    needed = (*rule.counts, *(storage.name for storage in storages))
    missing = [key for key in needed if entry.get(key) is None]
    if len(missing) == len(needed):
        return False
    if missing:
        raise refusal(FOREIGN, f"{type(optimizer).__name__}, {missing[0]!r} of {name}")
    for storage in storages:
        storage.check(param, entry)
    return True
