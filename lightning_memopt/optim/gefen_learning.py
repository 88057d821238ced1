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
from lightning_memopt.optim.shards import as_rows, by_rows, local, sum_over_ranks
from lightning_memopt.sparsity.bits import MASK
from lightning_memopt.sparsity.spans import WHERE, Where

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


def options(group: Mapping[str, Any], param: Tensor) -> tuple[int, ...]:
    """Block lengths of a weight to choose from, the default first. A single row, as a flat shard, has no structure."""
    if group["block"] is not None:
        return (group["block"],)
    longest = group["max_block"]
    lengths = tuple(longest >> i for i in range(longest.bit_length()) if longest >> i >= FINEST)
    return lengths if lengths and len(param) > 1 else (longest,)


@dataclass(eq=False)
class _Weight:
    """A weight whose state is to be finished, and what the gradients of all ranks say."""

    param: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    moment: Storage
    counts: Tensor  # float64 [bins]
    wish: Wish


@torch.no_grad()
def finish(optimizer: Optimizer, rule: Rule) -> None:
    """Replace start-up curves by learned codebooks and default blocks by chosen ones, where a step was taken."""
    weights = [
        _gather(param, group, state, rule.storage(param, group, param.dtype)[0])
        for group in optimizer.param_groups
        for param in group["params"]
        if HISTOGRAM in (state := optimizer.state.get(param, {})) and state["step"] > 0
    ]
    ready = [weight for weight in weights if weight.counts.any() or weight.state["step"] >= PATIENCE]
    if not ready:
        return
    tables = _Tables(optimizer)
    tables.learn([weight.counts for weight in ready if weight.group[CODEBOOK] == "table"])
    lengths = choose([weight.wish for weight in ready], spare_bytes(optimizer, rule))
    for weight, length in zip(ready, lengths, strict=True):
        if weight.group[CODEBOOK] == "table":
            codebook = tables.on(weight.state["exp_avg"].device)
        else:
            codebook = torch.tensor(fit_bend(weight.counts.numpy()), dtype=torch.float32)
        _shorten_blocks(weight, length)
        _encode_anew(weight, codebook)


def _gather(param: Tensor, group: dict[str, Any], state: dict[str, Any], moment: Storage) -> _Weight:
    """Add up the statistics of ranks that hold different rows."""
    lengths = options(group, as_rows(param))
    counts = state[HISTOGRAM].double()
    if FINE not in state:
        counts = sum_over_ranks(param, counts).cpu()
        return _Weight(param, group, state, moment, counts, Wish(tuple(param.shape), lengths, (0.0,)))
    spread, rows = profile(state[FINE])
    sums = sum_over_ranks(param, torch.cat([counts, spread, rows[None]])).cpu()
    spread = sums[len(counts) : -1] / sums[-1].clamp(min=1)
    blocks = Blocks.of(local(state["exp_avg"]), state[FINE])
    errors = tuple(disagreement(spread, blocks, length // lengths[-1]) for length in lengths)
    wish = Wish(tuple(param.shape), lengths, errors)
    return _Weight(param, group, state, moment, sums[: len(counts)], wish)


def spare_bytes(optimizer: Optimizer, rule: Rule) -> float:
    """Bytes of state left in the budget, over all parameters of the optimizer, at their present block lengths."""
    spare = 0.0
    for group in optimizer.param_groups:
        for param in group["params"]:
            taken = 8 * param.numel()
            first = rule.storage(param, group, param.dtype)[0]
            if CODEBOOK in first.entries():
                shape = as_rows(param).shape
                known = optimizer.state.get(param, {}).get("exp_avg_sq")
                means = prod(per_block(shape, options(group, as_rows(param))[0])) if known is None else known.numel()
                taken = param.numel() + 2 * prod(per_block(shape, FINEST)) + 4 * means
            spare += BUDGET * param.numel() - taken
    return spare


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


def _shorten_blocks(weight: _Weight, length: int) -> None:
    """Give blocks of `length` the second moments they would have had."""
    state, (longest, *_, finest) = weight.state, (*weight.wish.options, weight.wish.options[-1])
    fine = state.pop(FINE, None)
    if length == longest:
        return
    code, coarse = local(state["exp_avg"]), local(state["exp_avg_sq"])
    short = Blocks.of(code, fine).merge(fine, length // finest)
    factor = longest // length
    ratio = coarse / Blocks.of(code, short).merge(short, factor)
    state["exp_avg_sq"] = by_rows(weight.param, per_block(weight.param.shape, length))
    local(state["exp_avg_sq"]).copy_(short * ratio.repeat_interleave(factor, 1)[:, : short.shape[1]])


def _encode_anew(weight: _Weight, codebook: Tensor) -> None:
    """Decode the first moment by the start-up curve and encode it by `codebook`, a few rows at a time."""
    state, moment = weight.state, weight.moment
    del state[HISTOGRAM]
    old: dict[str, Any] = {key: local(state[key]) for key in moment.entries()}
    state[CODEBOOK] = codebook
    if MASK in state:
        own = local(weight.param)
        old[WHERE] = Where.of(state[MASK], own.numel(), own.shape[1])
        moment.save(old | {CODEBOOK: codebook}, moment.load(old, torch.float32), None)
        return
    code = old["exp_avg"]
    step = max(1, REWRITE_ELEMENTS // max(1, code[:1].numel()))
    for start in range(0, len(code), step):
        rows = moment.rows(old, start, min(start + step, len(code)))
        moment.save(rows | {CODEBOOK: codebook}, moment.load(rows, torch.float32), None)
