"""Sharding a module with FSDP2: which submodules become units, and what an optimizer built before must know.

A unit's parameters are gathered together before its forward and backward pass and freed after. Too large units cost
memory, too small ones many short messages; the blocks of a transformer are right. What lies outside all blocks belongs
to the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.optim import Optimizer

from lightning_memopt.compat import refusal
from lightning_memopt.errors import UnsupportedError


def find_blocks(root: nn.Module, wrap: Sequence[str] | str) -> list[nn.Module]:
    """The modules that become units, inner ones first.

    Args:
        root: The whole model.
        wrap: Names of their classes, or ``"auto"``: the children of every ``nn.ModuleList`` or ``nn.Sequential`` that
            holds two or more of one class with parameters in modules of their own; nothing inside of these. What has
            no forward pass, as lists of modules inside it, counts as what it holds.

    Raises:
        UnsupportedError: A class name that no module has.
    """
    if wrap == "auto":
        return list(_repeated(root))
    names = [wrap] if isinstance(wrap, str) else list(wrap)
    found = [module for module in root.modules() if type(module).__name__ in names and module is not root]
    missing = set(names) - {type(module).__name__ for module in found}
    if missing:
        have = sorted({type(module).__name__ for module in root.modules() if any(True for _ in module.children())})
        raise UnsupportedError(
            f"wrap: the model has no {' and no '.join(sorted(missing))}. Modules with parts are: {', '.join(have)}."
        )
    return found[::-1]


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        parts = list(_called(child))
        counts = Counter(type(part) for part in parts if _holds_layers(part))
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and any(count > 1 for count in counts.values()):
            yield from (part for part in parts if _holds_layers(part))
        else:
            yield from _repeated(child)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Its children, but in place of one without forward pass, as a list or dict of modules, those in it."""
    for child in module.children():
        if getattr(child.forward, "__func__", None) is nn.Module.forward:
            yield from _called(child)
        else:
            yield child


def _holds_layers(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def parts(root: nn.Module, wrap: Sequence[str] | str) -> list[list[nn.Parameter]]:
    """Parameters that are gathered together: of each block, what no block inside of it has, and last, of the root."""
    taken: set[nn.Parameter] = set()
    found = []
    for module in (*find_blocks(root, wrap), root):
        own = [param for param in module.parameters() if param not in taken]
        taken.update(own)
        found.append(own)
    return found


def is_sharded(module: nn.Module) -> bool:
    """Whether the user sharded (a part of) the module already."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def shard(
    roots: Sequence[nn.Module],
    mesh: DeviceMesh,
    wrap: Sequence[str] | str,
    reshard_after_forward: bool,
    place: Callable[[nn.Module], object],
    keep_roots: bool = True,
) -> None:
    """Shard each root and the blocks in it, in place.

    Args:
        roots: Modules whose forward passes run separately.
        mesh: Of one dimension, or replicate × shard.
        wrap: See `find_blocks`.
        reshard_after_forward: Free a block's gathered parameters between forward and backward.
        place: Moves a module to its device in its precision; called for one block at a time.
        keep_roots: Leave roots gathered between forward and backward.

    Raises:
        UnsupportedError: A parameter is shared between blocks, a scalar, or without elements.
    """
    blocks = [(root, find_blocks(root, wrap)) for root in roots]
    _refuse_shared(list(chain.from_iterable(found for _, found in blocks)), roots)
    for name, param in chain.from_iterable(root.named_parameters() for root in roots):
        if param.dim() == 0:
            raise refusal("scalar parameters, sharded", name)
        if param.numel() == 0:
            raise refusal("parameters without elements, sharded", name)
    done: set[Tensor] = set()
    for root, found in blocks:
        for block in found:
            _prepare(block, place, done)
            _shard_unit(block, mesh, reshard_after_forward)
        _prepare(root, place, done)
        _shard_unit(root, mesh, not keep_roots)
        _gather_ahead(root)


def _gather_ahead(root: nn.Module) -> None:
    """Let each unit's gathering start before the forward pass of the one before it.

    By itself FSDP2 starts it when the unit is called, which is early enough only where the host runs far ahead.
    """
    units = [part for part in root.modules() if isinstance(part, FSDPModule)]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])


def _shard_unit(module: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool) -> None:
    whole = [param for param in module.parameters() if not hasattr(param, "device_mesh")]
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    for param in whole:
        # An optimizer may still hold it, but its memory must not outlive the shards' creation.
        param.data = param.new_empty(0)


def _refuse_shared(blocks: Sequence[nn.Module], roots: Sequence[nn.Module]) -> None:
    owner: dict[nn.Parameter, nn.Module] = {}
    for module in (*blocks, *roots):
        for param in module.parameters():
            holder = owner.setdefault(param, module)
            if holder is not module and not any(part is holder for part in module.modules()):
                name = next(name for root in roots for name, p in root.named_parameters() if p is param)
                raise refusal("weight shared between sharded blocks", name)
    inside = [{id(part) for part in block.modules()} for block in blocks]
    for root in roots:
        mine = [part for part in root.modules() if not any(id(part) in parts for parts in inside)]
        for part in mine:
            for name, param in part.named_parameters(recurse=False):
                if param in owner and owner[param] not in roots:
                    raise refusal("weight shared between sharded blocks", name)


def _prepare(module: nn.Module, place: Callable[[nn.Module], object], done: set[Tensor]) -> None:
    """Put a module on the device, with rank 0's values: ranks that initialised it themselves had other random bits."""
    tensors = [tensor for tensor in chain(module.parameters(), module.buffers()) if tensor not in done]
    if any(tensor.is_meta for tensor in tensors):
        return
    place(module)
    # Moving may have replaced tensors.
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor not in done and not hasattr(tensor, "device_mesh"):
            if dist.get_world_size() > 1:
                dist.broadcast(tensor.detach(), src=0)
            done.add(tensor)


def units(module: nn.Module) -> dict[int, list[Any]]:
    """FSDP2's units by number: the parameters of each, as FSDP2 keeps them."""
    return {unit: _groups(part) for unit, part in enumerate(module.modules()) if isinstance(part, FSDPModule)}


def groups(module: nn.Module) -> list[Any]:
    """The parameters of every unit, as FSDP2 keeps them."""
    return list(chain.from_iterable(units(module).values()))


def unsharded_parameters(module: nn.Module) -> dict[nn.Parameter, tuple[nn.Parameter, int]]:
    """For each sharded parameter, the one that layers use, and the number of the unit that both are of (see `units`).

    FSDP2 creates the one that layers use when a unit is gathered first: now.

    Raises:
        UnsupportedError: A unit that the user sharded keeps its parameters in CPU memory.
    """
    pairs: dict[nn.Parameter, tuple[nn.Parameter, int]] = {}
    for unit, part in enumerate(module.modules()):
        if not isinstance(part, FSDPModule):
            continue
        with torch.no_grad():
            part.unshard()
            part.reshard()
        for group in _groups(part):
            if isinstance(group.offload_policy, CPUOffloadPolicy):
                raise refusal("CPU offload", type(part).__name__)
            pairs |= {param.sharded_param: (param._unsharded_param, unit) for param in group.fsdp_params}
    return pairs


def reshard(module: nn.Module) -> None:
    """Free gathered parameters that a forward pass without backward left behind, or gathered for a unit it left out."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            if any(group._all_gather_result is not None for group in _groups(part)):
                part.unshard()
            part.reshard()


def abandon(module: nn.Module) -> None:
    """End what an error left open, in the middle of a pass, so that the module can be trained again.

    As ``FSDPModule.reset_iter_state`` of torch 2.13; gradients of that pass are lost.
    """
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        state: Any = part._get_fsdp_state()
        if state._is_root is None:  # no pass has begun yet
            continue
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        state._comm_ctx.post_forward_order.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        for group in _groups(part):
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
    reshard(module)


def _groups(part: FSDPModule) -> list[Any]:
    """The parameters of a unit, as FSDP2 keeps them."""
    state: Any = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def rebind(optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str], module: nn.Module) -> None:
    """Give optimizers that were built before sharding the parameters of the same names now; in place.

    Sharding replaces every parameter. An optimizer that the command line built from the model's parameters would go on
    holding the old ones, and train nothing.

    Args:
        optimizers: Any of which may hold parameters of before.
        names: Of the parameters before sharding.
        module: The sharded module.

    Raises:
        UnsupportedError: A parameter that is not of the module, now or before.
    """
    now = dict(module.named_parameters(remove_duplicate=False))
    known = set(now.values())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for i, param in enumerate(group["params"]):
                if param in known:
                    continue
                if param not in names or names[param] not in now:
                    raise UnsupportedError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that is not in "
                        "the module. Build optimizers in configure_optimizers, from the module's own parameters."
                    )
                group["params"][i] = now[names[param]]
                optimizer.state.pop(param, None)


def is_root(module: nn.Module) -> bool:
    """Whether a forward pass of the module itself gathers parameters."""
    return isinstance(module, FSDPModule)
