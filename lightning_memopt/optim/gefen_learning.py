"""What Gefen learns from a weight's first gradient: the code of its first moment and the length of its blocks.

The first step encodes moments by a start-up curve, in blocks of the default length. Before the next step they are all
there is to learn from, and all that is needed: the first moment is the first gradient times 1 - beta1. How often each
code was used is a histogram of it, from which the codebook is fitted; its squares, averaged over the finest blocks, say
which weights want shorter blocks and how a block's second moment divides among them. Ranks that hold different rows add
up theirs. Then moments are decoded and encoded anew.

So no step needs the gradients of two weights at once, kernels take the first step as any other, and there is nothing to
save but the state itself: a run that is resumed in between learns the same.

A gradient that is zero everywhere teaches nothing, so learning waits for one that is not, up to `PATIENCE` steps.
Weights that get their first gradient later (frozen until then) learn then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.optim import gefen_columns as columns
from lightning_memopt.optim.codebook import LEVELS, START_BEND, Floats, fit_bends, optimal_levels, spread_counts
from lightning_memopt.optim.gefen_blocks import (
    BUDGET,
    FINEST,
    LEAST,
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

CODEBOOK = "codebook"
# Steps after which a weight that has had no gradient but zero keeps what it started with.
PATIENCE = 10
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
    """A weight that is to learn, and what the first moments of all ranks say."""

    param: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    moment: Storage
    counts: Tensor  # float64 [LEVELS], of each magnitude's code
    wish: Wish

    @property
    def ready(self) -> bool:
        return bool(self.counts[1:].any()) or self.state["step"] >= PATIENCE


@torch.no_grad()
def finish(optimizer: Optimizer, rule: Rule) -> None:
    """Replace start-up curves by learned codebooks and default blocks by chosen ones, where a step was taken."""
    weights = [
        _look(param, group, state, rule.storage(param, group, param.dtype)[0])
        for group in optimizer.param_groups
        for param in group["params"]
        if is_learning(state := optimizer.state.get(param, {})) and state["step"] > 0
    ]
    ready = [weight for weight in weights if weight.ready]
    if not ready:
        return
    counts = spread_counts(torch.stack([weight.counts for weight in ready]).numpy(), START_BEND)
    lengths = choose([weight.wish for weight in ready], spare_bytes(optimizer, rule))
    tabled = [weight.group[CODEBOOK] == "table" for weight in ready]
    tables = _Tables(optimizer)
    if any(tabled):
        tables.learn(counts[tabled])
    for weight, length, bend, table in zip(ready, lengths, fit_bends(counts), tabled, strict=True):
        _change_blocks(weight, length)
        on = weight.state["exp_avg"].device
        _encode_anew(weight, tables.on(on) if table else torch.tensor(bend, dtype=torch.float32, device="cpu"))


def _look(param: Tensor, group: dict[str, Any], state: dict[str, Any], moment: Storage) -> _Weight:
    """Survey the first moment, and add up what ranks with different rows found."""
    lengths = options(group, as_rows(param))[: 1 if MASK in state else None]
    own = {key: local(state[key]) for key in moment.entries()}
    code, finest = own["exp_avg"], lengths[-1]
    blocks = per_block(as_rows(param).shape, finest)[1] if len(lengths) > 1 else 0
    found = torch.zeros(LEVELS + 1 + blocks, dtype=torch.float64, device=code.device)
    for span in columns.pieces(code):
        rows = moment.rows(own, *span)
        found[:LEVELS] += torch.bincount(rows["exp_avg"].view(torch.int8).abs().flatten(), minlength=LEVELS)
        if blocks:
            spread, live = profile(_squares(moment, rows, blocks))
            found[LEVELS] += live
            found[LEVELS + 1 :] += spread
    found = sum_over_ranks(param, found).cpu()
    errors: tuple[float, ...] = (0.0,) * len(lengths)
    if blocks:
        cut = Blocks(1, prod(code.shape[1:]), blocks)
        spread = found[LEVELS + 1 :] / found[LEVELS].clamp(min=1)
        errors = tuple(disagreement(spread, cut, length // finest) for length in lengths)
    return _Weight(param, group, state, moment, found[:LEVELS], Wish(tuple(param.shape), lengths, errors))


def _squares(moment: Storage, rows: dict[str, Tensor], blocks: int) -> Tensor:
    """Mean square of the first moment over blocks, of which a row has so many."""
    m = moment.load(rows, torch.float32)
    return Blocks(len(m), prod(m.shape[1:]), blocks).mean(m.square_())


def spare_bytes(optimizer: Optimizer, rule: Rule) -> float:
    """Bytes of state left in the budget, over all parameters, if those that still learn took their defaults."""
    spare = 0.0
    for group in optimizer.param_groups:
        for param in group["params"]:
            taken = 8 * param.numel()
            first = rule.storage(param, group, param.dtype)[0]
            if CODEBOOK in first.entries():
                shape, state = as_rows(param).shape, optimizer.state.get(param, {})
                default = prod(per_block(shape, options(group, as_rows(param))[0]))
                means = state["exp_avg_sq"].numel() if state and not is_learning(state) else default
                factors = 0 if MASK in state else columns.count(param)
                taken = param.numel() + 2 * prod(per_block(shape, FINEST)) + 4 * (means + factors)
            spare += BUDGET * param.numel() - taken
    return spare


class _Tables:
    """The one table of an optimizer, learned once."""

    def __init__(self, optimizer: Optimizer) -> None:
        known = (state.get(CODEBOOK) for state in optimizer.state.values())
        self.table: Tensor | None = next((t for t in known if t is not None and t.dim()), None)
        self.copies: dict[torch.device, Tensor] = {}

    def learn(self, counts: Floats) -> None:
        """Values in the order of two's complement bytes: 0 to 1, -1 (which has no use), -1 to 0."""
        if self.table is None:
            levels = torch.from_numpy(optimal_levels(counts.sum(0)))
            self.table = torch.cat([levels, -levels[-1:], -levels[1:].flip(0)]).float()

    def on(self, device: torch.device) -> Tensor:
        assert self.table is not None
        if device not in self.copies:
            self.copies[device] = self.table.to(device)
        return self.copies[device]


def _change_blocks(weight: _Weight, length: int) -> None:
    """Give the weight blocks of `length`; those of a sparse weight keep theirs.

    A second moment is divided among shorter blocks as the squares of the first moment are, which after the first step
    is as those of the gradient, up to the rounding of codes. Longer blocks take means.
    """
    state = weight.state
    if MASK in state:
        return
    code, old = local(state["exp_avg"]), local(state["exp_avg_sq"])
    blocks = Blocks.of(code, old)
    shape = per_block((len(state["exp_avg"]), *code.shape[1:]), length)
    if shape[1] == blocks.count:
        return
    state["exp_avg_sq"] = by_rows(as_rows(weight.param), shape)
    new = local(state["exp_avg_sq"])
    if shape[1] < blocks.count:
        new.copy_(blocks.merge(old, length // blocks.block))
        return
    own = {key: local(state[key]) for key in weight.moment.entries()}
    factor = blocks.block // length
    for start, stop in columns.pieces(code):
        squares = _squares(weight.moment, weight.moment.rows(own, start, stop), shape[1])
        whole = Blocks(stop - start, blocks.columns, shape[1]).merge(squares, factor)
        share = squares / whole.repeat_interleave(factor, 1)[:, : shape[1]]
        v = old[start:stop].repeat_interleave(factor, 1)[:, : shape[1]]
        new[start:stop] = (v * share.nan_to_num_(1.0, 1.0, 1.0)).clamp_(min=LEAST)


def _encode_anew(weight: _Weight, codebook: Tensor) -> None:
    """Decode the first moment by the start-up curve and encode it by `codebook`, a few rows at a time."""
    state, moment = weight.state, weight.moment
    old: dict[str, Any] = {key: local(state[key]) for key in moment.entries()}
    state[CODEBOOK] = codebook
    if MASK in state:
        own = local(weight.param)
        old[WHERE] = Where.of(state[MASK], own.numel(), own.shape[1])
        moment.save(old | {CODEBOOK: codebook}, moment.load(old, torch.float32), None)
        return
    for span in columns.pieces(old["exp_avg"]):
        rows = moment.rows(old, *span)
        moment.save(rows | {CODEBOOK: codebook}, moment.load(rows, torch.float32), None)
