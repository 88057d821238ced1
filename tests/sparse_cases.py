"""Updates of sparse weights for kernel tests, made from those of dense ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from kernel_cases import F32, guarded

from lightning_memopt.kernels import Update
from lightning_memopt.kernels.active import Active, Ages
from lightning_memopt.optim.gefen_learning import CODEBOOK
from lightning_memopt.rules.gefen import BlockMean
from lightning_memopt.rules.storage import Dense
from lightning_memopt.sparsity.bits import make_index, pack
from lightning_memopt.sparsity.spans import WHERE, Where
from lightning_memopt.sparsity.state import compact_like, gather, moments


def sparsify(update: Update, mask: torch.Tensor, ages: int = 3, density: float | None = None) -> Update:
    """The same update of the weights that `mask` keeps, in cohorts of different ages.

    Args:
        density: By which spans go; as the mask has it by default.
    """
    total, device = mask.numel(), mask.device
    bits = pack(total, lambda a, b: mask.view(-1)[a:b], device)
    index = make_index(bits, total)
    cohort = (torch.arange(int(index[-1]), device=device) % ages).to(torch.uint8)
    names = update.rule.aged_scalars
    rows = [(min(1.0, 0.25 * (i + 2)), *(update.scalars[name] * (1 + 0.3 * i) for name in names)) for i in range(ages)]
    storage = tuple(replace(s, columns=0) if isinstance(s, BlockMean) else s for s in update.storage)
    like = compact_like(update.weight, len(cohort))
    density = density or max(0.01, mask.float().mean().item())
    own = {key: value for key, value in update.state.items() if key in update.rule.counts or key == CODEBOOK}
    own = {**moments(storage, tuple(mask.shape), len(cohort), density, like), **own}
    for old, moment in zip(update.storage, storage, strict=True):
        if isinstance(moment, Dense):
            own[moment.name] = gather(update.state[moment.name], bits)
        else:
            whole = gather(old.load(update.state, F32), bits)
            moment.take({**own, WHERE: Where.of(bits, total, mask.shape[1])}, whole)
    own = {key: guarded(value) if value.dim() else value for key, value in own.items()}
    weight = guarded(update.weight.masked_fill(~mask, 0.0))
    active = Active(bits, index, cohort, Ages(names, rows))
    update = replace(update, weight=weight, state=own, storage=storage, active=active)
    place_ages(update)
    return update


def place_ages(update: Update) -> None:
    """Put the table of the update's ages where kernels read it."""
    from lightning_memopt.kernels.sparse_arguments import ages_table

    assert update.active is not None
    ages = update.active.ages
    ages.table = ages_table(ages, update.tile, update.scalars).to(update.weight.device)
