"""Which parameters a run updates, and what their optimizers keep of them: slots, and the states behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_memopt.backward import embedding
from lightning_memopt.backward.linear import SLOT, install, remove
from lightning_memopt.backward.slot import Slot
from lightning_memopt.compat import refusal
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.kernels.reference import kept_dtype
from lightning_memopt.rules import Rule, rule_for
from lightning_memopt.rules.foreign import FOREIGN, check_entry
from lightning_memopt.rules.storage import Dense, Storage
from lightning_memopt.sparsity.layer import SparseLayer

# Gradients of up to so many elements wait to be used together, the smallest ones, as long as together they have no more
# than the least budget or this share of all elements. On so few, a launch is bound by the host.
SMALL, LEAST_BUDGET, SHARE = 1 << 16, 1 << 18, 1 / 256
# Options that decide neither which moments there are nor how they are stored.
_FREE_OPTIONS = ("params", "lr")


@dataclass(frozen=True, eq=False)
class _KnownGroup:
    """A parameter group as it was when its parameters were taken in: going through them all again takes a while."""

    group: dict[str, Any]
    options: dict[str, Any]
    ids: list[int]
    frozen: list[nn.Parameter]

    @classmethod
    def of(cls, group: dict[str, Any], frozen: list[nn.Parameter]) -> _KnownGroup:
        return cls(group, options_of(group), list(map(id, group["params"])), frozen)

    def is_still(self, group: dict[str, Any]) -> bool:
        """Whether there is nothing new: no other options or parameters, and none that was unfrozen."""
        return (
            group is self.group
            and list(map(id, group["params"])) == self.ids
            and _same(options_of(group), self.options)
            and not any(param.requires_grad for param in self.frozen)
        )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters and learning rate."""
    return {key: value for key, value in group.items() if key not in _FREE_OPTIONS}


def _same(options: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Whether no option is another one. What cannot be compared, as tensors of several elements, is another one."""
    try:
        return options.keys() == known.keys() and all(x is known[key] or x == known[key] for key, x in options.items())
    except (RuntimeError, ValueError):
        return False


def _fills_a_span(weight: Tensor) -> bool:
    """Whether its elements fill a span of memory, in whatever order of dimensions."""
    step = 1
    for stride, size in sorted(zip(weight.stride(), weight.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return weight.numel() > 0 and not weight.is_meta


class SlotKeeper:
    """The part of an `Updater` that knows parameters and states.

    Args:
        state_dtype: Precision of the moments of bf16 weights, and of gradients that wait: that of the weight (torch's
            own), or float32.

    Attributes:
        slots: What is known of each parameter.
        sparsity: Says of a new slot whether, and how, its weight is sparse.
    """

    def __init__(self, state_dtype: Literal["param", "float32"]) -> None:
        self.state_dtype = state_dtype
        self.slots: dict[nn.Parameter, Slot] = {}
        self.sparsity: Callable[[Slot], SparseLayer | None] = self.dense
        self._known: dict[Optimizer, list[_KnownGroup]] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._modules: list[nn.Module] = []
        self._addresses: list[int] = []
        self._written: set[int] = set()

    def _ready(self, slot: Slot) -> None:
        """The engine ran the parameter's AccumulateGrad node."""
        raise NotImplementedError

    def attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Check every parameter group, fill the optimizers' states and hook module and parameters.

        Raises:
            UnsupportedError: An optimizer, an option or a parameter that cannot be updated exactly.
        """
        self._names = {param: name for name, param in module.named_parameters()}
        for optimizer in optimizers:
            self._adopt(optimizer)
        self._modules = install(module) + embedding.install(module)
        self._note_storages()

    def detach(self) -> None:
        """Undo `attach`; weights and optimizer states stay."""
        remove(self._modules)
        for slot in self.slots.values():
            _release(slot)
        self.slots.clear()
        self._known.clear()

    def _adopt(self, optimizer: Optimizer) -> None:
        """Take in the optimizer's trainable parameters, also those added or unfrozen since, and let go of others."""
        rule = rule_for(optimizer)
        known = self._known.pop(optimizer, [])
        groups, new = [], len(known) > len(optimizer.param_groups)
        for i, group in enumerate(optimizer.param_groups):
            rule.check(group)
            if i >= len(known) or not known[i].is_still(group):
                self._adopt_group(optimizer, group, rule)
                new = True
                groups.append(_KnownGroup.of(group, [p for p in group["params"] if p not in self.slots]))
            else:
                groups.append(known[i])
        self._known[optimizer] = groups
        if new:
            listed = {param for group in optimizer.param_groups for param in group["params"]}
            for slot in self._slots_of(optimizer):
                if slot.param not in listed:
                    self._let_go(slot)
            self._choose_small()
            self._refuse_overlaps()

    def _refuse_overlaps(self) -> None:
        """See to it that no weight lies where another one does: each is updated when its own gradient is complete.

        Raises:
            UnsupportedError: One does.
        """
        frozen = [param for param in self._names if param not in self.slots and not isinstance(param, DTensor)]
        weights = [(slot.weight, slot.name, True) for slot in self.slots.values()]
        weights += [(param.detach(), self._names[param], False) for param in frozen]
        spans = sorted(
            (str(weight.device), weight.data_ptr(), weight.data_ptr() + weight.nbytes, name, trains)
            for weight, name, trains in weights
            if _fills_a_span(weight)
        )
        for (device, _, end, name, trains), (other_device, start, _, other, other_trains) in pairwise(spans):
            if device == other_device and start < end and (trains or other_trains):
                raise UnsupportedError(
                    f"{name} and {other} are two parameters in the same memory, as if by "
                    "`b.weight.data = a.weight.data`: one would be updated before the gradient of the other is formed. "
                    "Make them one parameter: `b.weight = a.weight`."
                )

    def _let_go(self, slot: Slot) -> None:
        """The optimizer has the parameter no longer."""
        _release(self.slots.pop(slot.param))

    def _changed(self, optimizer: Optimizer) -> bool:
        """Whether there is anything to adopt."""
        known, groups = self._known.get(optimizer, []), optimizer.param_groups
        return len(known) != len(groups) or not all(map(_KnownGroup.is_still, known, groups))

    def _choose_small(self) -> None:
        """Choose the parameters whose gradients wait to be used together."""
        sizes = {slot: slot.param.numel() for slot in self.slots.values()}
        budget = max(LEAST_BUDGET, sum(sizes.values()) * SHARE)
        for slot, size in sorted(sizes.items(), key=lambda item: item[1]):
            slot.small = slot.entire and size <= min(SMALL, budget)
            if slot.small:
                budget -= size
            else:
                self.watch(slot)

    def watch(self, slot: Slot) -> None:
        """See to it that the engine tells when it has run the parameter's AccumulateGrad node.

        It takes its time to. What autograd stores of a small parameter's gradient is found without at the end.
        """
        if slot.handle is None:
            slot.handle = slot.node.register_hook(lambda *_: self._ready(slot))

    def _adopt_group(self, optimizer: Optimizer, group: dict[str, Any], rule: Rule) -> None:
        tile = rule.tile(group)
        for param in group["params"]:
            slot = self.slots.get(param)
            if slot is None:
                if param.requires_grad:
                    self._add(param, optimizer, group, rule)
            elif slot.optimizer is not optimizer:
                raise UnsupportedError(
                    f"{slot.name} belongs to two optimizers; give each parameter to one of them only."
                )
            else:
                loaded = slot.group is not group  # load_state_dict replaces the group dictionaries
                slot.group, slot.storage = group, None
                # What was loaded may lack entries or have other dtypes; a schedule may have switched a moment on.
                if slot.tile != tile or (loaded and slot.sparse is None):
                    self.fill_state(slot)
        listed = [param for param in group["params"] if param in self.slots]
        if len(set(listed)) < len(listed):
            twice = next(param for i, param in enumerate(listed) if param in set(listed[:i]))
            raise refusal("a parameter twice in one optimizer", self.slots[twice].name)

    def _add(self, param: nn.Parameter, optimizer: Optimizer, group: dict[str, Any], rule: Rule) -> None:
        name = self._names.get(param, f"parameter of shape {tuple(param.shape)} (not in the module)")
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise UnsupportedError(
                f"{name} is {str(param.dtype).removeprefix('torch.')}; fused updates need float32, bfloat16 or float64 "
                "weights. Use precision='32-true', 'bf16-true' or 'bf16-mixed', or on one device '64-true'."
            )
        slot = self._new_slot(name, param, optimizer, group, rule)
        self.slots[param] = slot
        setattr(slot.leaf, SLOT, slot)
        slot.sparse = self.sparsity(slot)
        slot.entire = slot.leaf is param and slot.sparse is None
        self.fill_state(slot)

    def _new_slot(
        self, name: str, param: nn.Parameter, optimizer: Optimizer, group: dict[str, Any], rule: Rule
    ) -> Slot:
        raise NotImplementedError

    def fill_state(self, slot: Slot) -> None:
        """Create the state entries that are missing, as torch would before the first step."""
        slot.tile = slot.rule.tile(slot.group)
        state, storage = slot.state, self.storage(slot)
        if slot.sparse is not None:
            slot.sparse.fill(state, storage)
            self._spread(slot, storage, state)
        for moment in storage:
            if isinstance(moment, Dense) and state.get(moment.name) is not None:
                state[moment.name] = state[moment.name].to(moment.dtype)
        wanted = [*slot.rule.counts, *(key for moment in storage for key in moment.entries())]
        if any(state.get(key) is None for key in wanted):
            sparse, rule = slot.sparse, slot.rule
            fresh = rule.init_state(slot.weight, slot.group, storage) if sparse is None else sparse.fresh(storage)
            self._spread(slot, storage, fresh)
            state.update({key: value for key, value in fresh.items() if state.get(key) is None})

    def _spread(self, slot: Slot, storage: Sequence[Storage], state: dict[str, Any]) -> None:
        """Give entries of this process's rows the form in which the optimizer keeps them: here as they are."""

    def filled_states(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The states of the optimizer's parameters; those that were cleared, to start the moments anew, are created."""
        slots = self._slots_of(optimizer)
        states = [slot.state for slot in slots]
        for slot, state in zip(slots, states, strict=True):
            if not state:
                self.fill_state(slot)
        return states

    # ---------------------------------------------------------------- where weights lie

    def will_write(self, x: Tensor) -> bool:
        """Whether `x` lies in the memory of a parameter, whose update may come before that of a weight it meets."""
        return x.untyped_storage().data_ptr() in self._written

    def places(self) -> list[Any]:
        """Rule and addresses of each parameter, its state and the scalars that kernels read."""
        facts: list[Any] = []
        for slot in self.slots.values():
            ages = slot.ages.table if slot.ages is not None else None
            tensors = [slot.row, ages, *slot.state.values()]
            facts += (slot.tile, slot.address)
            facts += [value.data_ptr() for value in tensors if isinstance(value, Tensor) and value.is_cuda]
        return facts

    def _note_storages(self) -> None:
        slots = self.slots.values()
        addresses = [slot.param.data_ptr() if slot.entire else slot.address for slot in slots]
        if addresses != self._addresses:
            self._addresses = addresses
            self._written = {slot.weight.untyped_storage().data_ptr() for slot in self.slots.values()}

    # ---------------------------------------------------------------- checkpoints

    def loadable(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """`saved` without the states of sparse weights, which an optimizer cannot load; `restore` brings them."""
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        slots = (self.slots.get(param) for param in params)
        sparse = {i for i, slot in zip(ids, slots, strict=False) if slot is not None and slot.sparse is not None}
        return {**saved, "state": {i: entry for i, entry in saved["state"].items() if i not in sparse}}

    def restore(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Complete what ``optimizer.load_state_dict(saved)`` left.

        torch casts every moment to the weight's dtype, so moments kept in another precision are taken from `saved`
        again, and parameters that `saved` knows nothing of get a fresh state.

        Raises:
            UnsupportedError: It is the state of another optimizer, or of active weights only.
        """
        for group in optimizer.param_groups:
            # Those that are off need not be there.
            missing = [option for option, value in optimizer.defaults.items() if value and option not in group]
            if missing:
                raise refusal(FOREIGN, f"{type(optimizer).__name__}, {missing[0]!r}")
        self._adopt(optimizer)
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for i, param in zip(ids, params, strict=True):
            slot = self.slots.get(param)
            if slot is None:
                continue
            entry = saved["state"].get(i, {})
            if slot.sparse is not None:
                slot.sparse.restore(slot.state, self.storage(slot), entry)
                self.fill_state(slot)
                continue
            check_entry(optimizer, slot.rule, self.storage(slot), slot.name, entry)
            for storage in self.storage(slot):
                value = entry.get(storage.name)
                if isinstance(storage, Dense) and value is not None:
                    slot.state[storage.name] = value.to(device=param.device, dtype=storage.dtype)
            slot.state.update({key: entry[key].float().cpu() for key in slot.rule.counts if key in entry})
            self.fill_state(slot)

    # ---------------------------------------------------------------- questions

    @property
    def fused_layers(self) -> Sequence[nn.Module]:
        """The linear and embedding layers whose forward pass was replaced."""
        return self._modules

    def _slots_of(self, optimizer: Optimizer) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.optimizer is optimizer]

    @staticmethod
    def dense(slot: Slot) -> SparseLayer | None:
        """The default of `sparsity`."""
        return None

    def storage(self, slot: Slot) -> tuple[Storage, ...]:
        """How each moment of the slot's parameter lies in its state."""
        if slot.sparse is not None:  # follows the density
            return self._storage(slot)
        if slot.storage is None or slot.storage[0] != slot.param.dtype:
            slot.storage = slot.param.dtype, self._storage(slot)
        return slot.storage[1]

    def _storage(self, slot: Slot) -> tuple[Storage, ...]:
        param, group = slot.param, slot.group
        dtype = kept_dtype(param, self.state_dtype == "float32")
        if slot.sparse is not None:
            return slot.rule.storage(slot.sparse.like, slot.sparse.scaled(group), dtype)
        return slot.rule.storage(param, group, dtype)


def _release(slot: Slot) -> None:
    """Leave the slot's parameter to autograd and whoever steps it."""
    if slot.handle is not None:
        slot.handle.remove()
    if getattr(slot.leaf, SLOT, None) is slot:
        delattr(slot.leaf, SLOT)


def by_device(slots: Iterable[Slot]) -> dict[torch.device, list[Slot]]:
    """Slots by where their parameter lies, in order."""
    devices: dict[torch.device, list[Slot]] = {}
    for slot in slots:
        devices.setdefault(slot.param.device, []).append(slot)
    return devices
