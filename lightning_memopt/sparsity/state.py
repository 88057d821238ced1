"""Optimizer state of a sparse weight: what torch's optimizer would keep, for active weights only, and the mask.

Entries beside the rule's own, all in ``optimizer.state[param]`` so that checkpoints carry them:

    smet_mask     uint8 [ceil(weights / 8)]         bit i % 8 of byte i // 8: weight i is active
    smet_index    int32 [ceil(weights / 128) + 1]   active weights before each segment, see `sparsity.bits`
    smet_cohort   uint8 [active]                    which cohort an active weight belongs to
    smet_births   tuple of int                      updates the parameter had taken when each cohort was born
    smet_steps    int                               updates the parameter has taken

A cohort is the weights that were grown in one event; all of them have the same age, so one byte per active weight and
one number per cohort hold all ages exactly. Where more cohorts than a byte can tell apart are alive, the two whose ages
differ least in proportion become one. Moments lie as one row, [1, active], in the order of the weights; what 8-bit
moments keep for a block of them, in rows as the weight has them (`sparsity.spans`).

Of a sharded weight each process keeps the entries of its own rows. Cohorts are numbered alike everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.optim.shards import local
from lightning_memopt.rules.base import Group, Rule
from lightning_memopt.rules.storage import Dense, Storage
from lightning_memopt.sparsity.bits import MASK, SEGMENT, chunks, flat_bits, make_index, move, unpack
from lightning_memopt.sparsity.shard import Shard
from lightning_memopt.sparsity.spans import WHERE, Where, spans

INDEX, COHORT, BIRTHS, STEPS = "smet_index", "smet_cohort", "smet_births", "smet_steps"
ENTRIES = (MASK, INDEX, COHORT, BIRTHS, STEPS)
# Cohorts that one byte tells apart.
COHORTS = 256

State = dict[str, Any]


def metadata_bytes(total: int, active: int) -> dict[str, int]:
    """Bytes that a layer of `total` weights, `active` of them active, takes beside its weight and moments."""
    return {"mask": (total + 7) // 8, "index": 4 * (-(-total // SEGMENT) + 1), "ages": active}


def compact_like(param: Tensor, active: int) -> Tensor:
    """A tensor that states can be created from as if it were the row of active weights; it takes no memory."""
    return param.detach().new_empty(()).expand(1, active)


def moments(storage: Sequence[Storage], shape: tuple[int, int], active: int, density: float, like: Tensor) -> State:
    """Entries of moments that have seen no gradient.

    Args:
        storage: Of the moments.
        shape: Rows and columns of the weight.
        active: Active weights in these rows.
        density: Of the whole weight.
        like: Of the weight's dtype and device.
    """
    state: State = {}
    for moment in storage:
        state |= moment.create(compact_like(like, active))
        for key, block in moment.per_block().items():
            state[key] = state[key].new_zeros(spans(shape, block, density))
    return state


def initial(
    rule: Rule,
    group: Group,
    storage: Sequence[Storage],
    shape: tuple[int, int],
    active: int,
    density: float,
    like: Tensor,
) -> State:
    """The rule's own entries before the first step: what it counts, and `moments`."""
    counts = rule.init_state(compact_like(like, 0), group, ())
    return counts | moments(storage, shape, active, density, like)


def fresh(bits: Tensor, total: int) -> State:
    """Entries of a mask whose weights have taken no update."""
    index = make_index(bits, total)
    cohort = torch.zeros(int(index[-1]), dtype=torch.uint8, device=bits.device)
    return {MASK: bits, INDEX: index, COHORT: cohort, BIRTHS: (0,), STEPS: 0}


def ages(state: State) -> list[int]:
    """Updates that the weights of each cohort have taken."""
    return [state[STEPS] - birth for birth in state[BIRTHS]]


def gather(dense: Tensor, bits: Tensor) -> Tensor:
    """The active elements of a tensor of the weight's shape, [1, active]."""
    flat = dense.reshape(-1)
    return torch.cat([flat[:0], *(flat[a:b][unpack(bits, a, b)] for a, b in chunks(len(flat)))])[None]


def restore(param: Tensor, storage: Sequence[Storage], bits: Tensor, density: float, saved: Mapping[str, Any]) -> State:
    """Entries from a saved state, of a sparse weight or, at the mask `bits`, of a dense one; of the rows in `param`.

    Raises:
        UnsupportedError: The saved state is neither.
    """
    total = param.numel()
    if MASK in saved:
        _check_form(param, storage, saved)
        state = {key: _copy(value, param.device) for key, value in saved.items()}
        state[MASK] = flat_bits(state[MASK], param.shape[1])
        return state | {INDEX: make_index(state[MASK], total)}
    names = [moment.name for moment in storage]
    dense = all(name in saved and saved[name].shape == param.shape for name in names)
    if not dense or not all(saved[name].is_floating_point() for name in names):
        raise UnsupportedError(
            f"SMET: the saved optimizer state of a weight of shape {tuple(param.shape)} is neither that of a sparse "
            "weight nor whole moments. Resume from a checkpoint of SMET or of a plain optimizer."
        )
    state = fresh(bits, total)
    shape = (param.shape[0], param.shape[1])
    state |= moments(storage, shape, len(state[COHORT]), density, param)
    state[WHERE] = Where.of(bits, total, shape[1])
    for moment in storage:
        moment.take(state, gather(saved[moment.name].to(param.device), bits))
    del state[WHERE]
    state |= {key: _copy(value, param.device) for key, value in saved.items() if key not in names}
    state[STEPS] = int(saved.get("step", 0))
    return state


def _check_form(param: Tensor, storage: Sequence[Storage], saved: Mapping[str, Any]) -> None:
    for moment in storage:
        blocks = moment.per_block()
        codes = not isinstance(moment, Dense) and moment.name not in blocks
        wrong = moment.name in saved and (saved[moment.name].dtype == torch.uint8) != codes
        if wrong or any(key in saved and len(saved[key]) != len(param) for key in blocks):
            raise UnsupportedError(
                f"SMET: the saved {moment.name} of a weight of shape {tuple(param.shape)} has another form than its "
                "optimizer keeps. Resume with the optimizer and the version that saved it."
            )


def _copy(value: Any, device: torch.device) -> Any:
    """A copy on the weight's device, except for scalars, which the host reads."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device, copy=True) if value.dim() else value.detach().clone()


@torch.no_grad()
def change_mask(
    state: State,
    storage: Sequence[Storage],
    bits: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    shard: Shard | None = None,
) -> None:
    """Give the state another mask with as many active weights over all rows.

    Moments of weights that stay active move along; those of new ones start as in a fresh optimizer. A second moment
    that a block shares is a new weight's as well; where there was no weight in the block, the mean over all weights.

    Entries stay where they lie in memory, so that launches and CUDA graphs that read them go on doing so; only a shard
    that has another number of active weights now gets new ones.

    Args:
        state: Of the parameter.
        storage: Of its moments.
        bits: The new mask.
        shape: Of the weight, its rows that are here.
        dtype: Precision in which codes are decoded.
        shard: Which weights these are; None for all.
    """
    old, (rows, columns) = state[MASK], shape
    total = rows * columns
    for moment in storage:
        if isinstance(moment, Dense):
            _put(state, moment.name, move(state[moment.name].view(-1), old, bits, total, moment.init)[None])
            continue
        own = {key: local(value) if isinstance(value, Tensor) else value for key, value in state.items()}
        was, now = Where.of(old, total, columns), Where.of(bits, total, columns)
        values = moment.load({**own, WHERE: was}, dtype)
        if moment.name in moment.per_block():
            _fill_empty(own[moment.name], was, values, shard)
            continue
        moved = move(values.view(-1), old, bits, total, 0.0)[None]
        if own[moment.name].shape != moved.shape:
            state[moment.name] = own[moment.name].new_empty(moved.shape)
        moment.save({**own, moment.name: state[moment.name], WHERE: now}, moved, None)
    births = list(state[BIRTHS])
    newest = _free_cohort(births, state[COHORT], state[STEPS], shard)
    births[newest : newest + 1] = [state[STEPS]]
    state[BIRTHS] = tuple(births)
    _put(state, COHORT, move(state[COHORT], old, bits, total, newest))
    state[MASK].copy_(bits)
    state[INDEX].copy_(make_index(bits, total))


def _put(state: State, key: str, values: Tensor) -> None:
    """Write an entry where it lies, if it has as many elements as before."""
    if state[key].shape == values.shape:
        state[key].copy_(values)
    else:
        state[key] = values


def _fill_empty(means: Tensor, where: Where, values: Tensor, shard: Shard | None) -> None:
    """Give blocks without weights the mean of all active weights' `values`."""
    known = torch.stack([values.double().sum(), values.new_tensor(values.numel(), dtype=torch.float64)])
    if shard is not None:
        known = shard.sum(known)
    means.masked_fill_(where.blocks(means).sizes() == 0, float(known[0] / known[1]))


def _free_cohort(births: list[int], cohort: Tensor, steps: int, shard: Shard | None) -> int:
    """A number for a new cohort: of one that has died out, a new one, or, with all alive, by joining two.

    The two are those whose ages differ least in proportion, and both get the greater age.
    """
    alive = torch.bincount(cohort.int(), minlength=len(births))
    if shard is not None:
        alive = shard.sum(alive)
    for number, count in enumerate(alive.tolist()):
        if not count:
            return number
    if len(births) < COHORTS:
        return len(births)
    order = sorted(range(len(births)), key=births.__getitem__)
    pairs = pairwise(order)
    older, younger = min(pairs, key=lambda pair: (births[pair[1]] - births[pair[0]]) / max(1, steps - births[pair[0]]))
    cohort[cohort == younger] = older
    return younger
