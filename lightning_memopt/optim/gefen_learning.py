"""What Gefen learns from a weight's first gradient: the code of its first moment and the length of its blocks.

No step needs the gradients of two weights at once, so learning fits an optimizer that runs inside backward:

1.  The first step encodes moments by a start-up curve, in blocks of the default length, and gathers statistics of the
    gradient in the state: a histogram, and the mean square over the finest blocks.
2.  `finish`, before the next step, adds up the statistics of ranks that hold different rows, fits the codebook,
    chooses the blocks of all weights within one budget, and encodes the moments anew. The second moment of shorter
    blocks is what it would have been, exactly: the first step's mean square is known at the finest blocks.

A gradient that is zero everywhere teaches nothing, so learning waits for one that is not, up to `PATIENCE` steps. The
statistics are part of the state, so a run that is resumed in between learns the same. Weights that get their first
gradient later (frozen until then) learn then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.optim.codebook import START_BEND, fit_bend, optimal_levels
from lightning_memopt.optim.gefen_blocks import (
    BUDGET,
    FINEST,
    Blocks,
    Wish,
    choose,
    disagreement,
    per_block,
    profile,
)
from lightning_memopt.optim.shards import by_rows, local, sum_over_ranks

if TYPE_CHECKING:
    from lightning_memopt.rules.base import Rule
    from lightning_memopt.rules.storage import Storage

CODEBOOK, HISTOGRAM, FINE = "codebook", "exp_avg_histogram", "exp_avg_sq_fine"
# Steps after which a weight that has had no gradient but zero keeps what it started with.
PATIENCE = 10
# Weights that are decoded and encoded at a time.
REWRITE_ELEMENTS = 1 << 22
_START = float(np.float32(START_BEND))


def is_learning(state: Mapping[str, Any]) -> bool:
    """Whether the codebook is still the start-up curve."""
    codebook = state.get(CODEBOOK)
    return codebook is not None and not codebook.dim() and float(codebook) == _START


def options(group: Mapping[str, Any], flat: bool) -> tuple[int, ...]:
    """Block lengths to choose from, the default first. A flat shard has no rows to learn from."""
    if group["block"] is not None:
        return (group["block"],)
    longest = group["max_block"]
    lengths = tuple(longest >> i for i in range(longest.bit_length()) if longest >> i >= FINEST)
    return lengths[:1] if flat else lengths or (longest,)


@dataclass(eq=False)
class _Weight:
    """A weight whose state is to be finished."""

    param: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    storage: Sequence[Storage]
    lengths: tuple[int, ...]
    counts: Tensor | None = None  # float64 [block lengths, bins], over all ranks
    wish: Wish | None = None


@torch.no_grad()
def finish(optimizer: Optimizer, rule: Rule) -> None:
    """Replace start-up curves by learned codebooks and default blocks by chosen ones, where a step was taken."""
    weights = [
        _Weight(param, group, state, rule.storage(param, group, param.dtype), ())
        for group in optimizer.param_groups
        for param in group["params"]
        if HISTOGRAM in (state := optimizer.state.get(param, {})) and state["step"] > 0
    ]
    if not weights:
        return
    for weight in weights:
        _gather(weight)
    ready = [w for w in weights if w.counts.sum() > 0 or w.state["step"] >= PATIENCE]  # type: ignore[union-attr]
    lengths = choose([w.wish for w in ready if w.wish is not None], spare_bytes(optimizer, rule))
    tables = _Tables(optimizer)
    chosen = list(zip(ready, lengths, strict=True))
    tables.learn([w.counts[w.lengths.index(n)] for w, n in chosen if w.group[CODEBOOK] == "table"])  # type: ignore[index]
    for weight, length in chosen:
        counts = weight.counts[weight.lengths.index(length)]  # type: ignore[index]
        if weight.group[CODEBOOK] == "table":
            codebook = tables.on(local(weight.param).device)
        else:
            codebook = torch.tensor(fit_bend(counts.numpy()), dtype=torch.float32)
        _rewrite(weight, length, codebook)


def _gather(weight: _Weight) -> None:
    """Counts and wish of a weight, from the statistics of all ranks."""
    param, state = weight.param, weight.state
    weight.lengths = options(weight.group, param.dim() == 1)
    counts = state[HISTOGRAM].double()
    if FINE not in state:
        weight.counts = sum_over_ranks(param, counts).cpu()
        weight.wish = Wish(tuple(param.shape), weight.lengths, (0.0,))
        return
    spread, rows = profile(state[FINE])
    sums = sum_over_ranks(param, torch.cat([counts.flatten(), spread, rows[None]])).cpu()
    weight.counts = sums[: counts.numel()].view(counts.shape)
    spread = sums[counts.numel() : -1] / sums[-1].clamp(min=1)
    blocks = Blocks.of(local(state["exp_avg"]), state[FINE])
    errors = tuple(disagreement(spread, blocks, n // weight.lengths[-1]) for n in weight.lengths)
    weight.wish = Wish(tuple(param.shape), weight.lengths, errors)


def spare_bytes(optimizer: Optimizer, rule: Rule) -> float:
    """Bytes of state that finer blocks may take, over all parameters of the optimizer."""
    room = 0.0
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            first = rule.storage(param, group, param.dtype)[0]
            if CODEBOOK in state:
                taken = param.numel() + 8 * state["exp_avg_sq"].numel()
            elif CODEBOOK in first.entries():
                lengths = options(group, param.dim() == 1)
                taken = param.numel() + 8 * prod(per_block(param.shape, lengths[0]))
            else:
                taken = 8 * param.numel()
            room += BUDGET * param.numel() - taken
    return room


class _Tables:
    """The one table of an optimizer, learned once."""

    def __init__(self, optimizer: Optimizer) -> None:
        known = (state.get(CODEBOOK) for state in optimizer.state.values())
        self.table: Tensor | None = next((t for t in known if t is not None and t.dim()), None)
        self.copies: dict[torch.device, Tensor] = {}

    def learn(self, counts: Sequence[Tensor]) -> None:
        """Values in the order of two's complement bytes: 0 to 1, -1 (which has no use), -1 to 0."""
        if self.table is None and counts:
            levels = torch.from_numpy(optimal_levels(torch.stack(list(counts)).sum(0).numpy()))
            self.table = torch.cat([levels, -levels[-1:], -levels[1:].flip(0)]).float()

    def on(self, device: torch.device) -> Tensor:
        assert self.table is not None
        if device not in self.copies:
            self.copies[device] = self.table.to(device)
        return self.copies[device]


def _rewrite(weight: _Weight, length: int, codebook: Tensor) -> None:
    """Encode the first moment by `codebook` in blocks of `length` and give each block its second moment."""
    param, state = weight.param, weight.state
    moment = weight.storage[0]
    old = {key: local(state[key]) for key in moment.entries()}
    state.pop(HISTOGRAM)
    fine = state.pop(FINE, None)
    if length != weight.lengths[0]:
        state["exp_avg_scale"] = by_rows(param, per_block(param.shape, length))
        blocks, coarse = Blocks.of(old["exp_avg"], fine), local(state["exp_avg_sq"])
        shorter = blocks.merge(fine, length // weight.lengths[-1])
        factor = weight.lengths[0] // length
        whole = Blocks.of(old["exp_avg"], shorter).merge(shorter, factor)
        ratio = (coarse / whole).repeat_interleave(factor, -1)[..., : shorter.shape[-1]]
        state["exp_avg_sq"] = by_rows(param, per_block(param.shape, length))
        local(state["exp_avg_sq"]).copy_(shorter * ratio)
    state[CODEBOOK] = codebook
    new = {key: local(state[key]) for key in moment.entries()}
    rows = max(len(old["exp_avg"]), 1) if param.dim() == 1 else max(1, REWRITE_ELEMENTS // param[0].numel())
    for start in range(0, len(old["exp_avg"]), rows):
        stop = min(start + rows, len(old["exp_avg"]))
        value = moment.load(moment.rows(old, start, stop), torch.float32)
        moment.save(moment.rows(new, start, stop), value, None)
