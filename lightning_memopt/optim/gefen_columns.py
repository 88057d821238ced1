"""Gefen's factor per column: what one second moment for a block of a row cannot know, and rows have in common.

All rows of a weight see the same inputs, so a column's gradients are larger or smaller than its neighbours' in every
row: the second moment of a single weight is nearly that of its block times a factor of its column, v_ij = v_b c_j. With
r_j = 1 / sqrt(c_j) a weight's step is

    m_ij / sqrt(v_ij) = r_j m_ij / sqrt(v_b) = m'_ij / sqrt(v'_b),     m', v' from g'_ij = r_j g_ij,

the step of plain Gefen on a gradient whose columns are multiplied by r. Moments are kept in these units, so that a
kernel has one product to do, and codes, whose blocks of columns are then even, get finer.

r is learned from the moments themselves. Before the steps that follow 4, 8, 16, ... updates, the mean over all rows of
m'² / v', relative to its mean over the block, says how far c_j is from right. Moments are converted to the new units,
so nothing but the new r changes the next step. A column that is silent in all rows says nothing and keeps its r; that
of a quiet one is at most 8, so that it takes no leap when it is loud again.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.optim.gefen_blocks import LEAST, Blocks
from lightning_memopt.optim.shards import as_rows, local, sum_over_ranks

if TYPE_CHECKING:
    from lightning_memopt.rules.base import Rule
    from lightning_memopt.rules.storage import Storage

# State entries: r, float32 [columns], and the number of updates after which it was learned, float32 [] on the CPU.
SCALE, LEARNED = "column_scale", "column_step"
# Rows from which on a weight has factors: 4 bytes per column are then 1/16 of a byte per weight, or less.
MIN_ROWS = 64
# Updates before r is learned for the first time. A single gradient says little: the inputs of the first steps differ
# from those that follow.
FIRST = 4
# The smallest c, relative to the mean of its block.
LEAST_SHARE = 1 / 64
# Weights that are decoded and encoded at a time; on a GPU enough to be worth some dozen launches.
CPU_PIECE, GPU_PIECE = 1 << 22, 1 << 24


def count(param: Tensor) -> int:
    """How many factors a weight has: one for each column, or none if it has too few rows."""
    param = as_rows(param)
    return prod(param.shape[1:]) if param.dim() > 1 and len(param) >= MIN_ROWS else 0


def pieces(code: Tensor) -> list[tuple[int, int]]:
    """A weight cut into parts that are decoded at a time: first row, and row past the last."""
    elements = GPU_PIECE if code.device.type == "cuda" else CPU_PIECE
    step = max(1, elements // max(1, code[:1].numel()))
    return [(start, min(start + step, len(code))) for start in range(0, len(code), step)]


def due(state: Mapping[str, Any]) -> bool:
    """Whether r is to be learned before the next update."""
    return SCALE in state and float(state["step"]) >= max(FIRST, 2 * float(state[LEARNED]))


@torch.no_grad()
def learn(optimizer: Optimizer, rule: Rule) -> None:
    """Learn r of each weight that is due, and convert its moments, all in place."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param)
            if state and due(state):
                moment, mean = rule.storage(param, group, param.dtype)
                _learn(param, state, moment, mean)


def _learn(param: Tensor, state: dict[str, Any], moment: Storage, mean: Storage) -> None:
    own = {key: local(state[key]) for key in (*moment.entries(), *mean.entries())}
    code, shared, scale = own[moment.name], own[mean.name], own[SCALE]
    spans = pieces(code)
    size = torch.zeros(len(scale), dtype=torch.float64, device=scale.device)
    for span in spans:
        m = moment.load(moment.rows(own, *span), torch.float32)
        v = mean.load({moment.name: m, **mean.rows(own, *span)}, torch.float32)
        size += m.square_().div_(v.clamp_(min=LEAST)).view(-1, len(scale)).sum(0)
    size = sum_over_ranks(param, size)
    new, ratio, growth = _improve(scale.double(), size, Blocks(1, len(scale), shared.shape[1]))
    for span in spans:
        rows = moment.rows(own, *span)
        m = moment.load(rows, torch.float32)
        moment.save(rows, m.mul_(ratio.float().view(1, *m.shape[1:])), None)
    shared.mul_(growth.float()).clamp_(min=LEAST)
    scale.copy_(new)
    state[LEARNED].copy_(state["step"])


def _improve(scale: Tensor, size: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """What the moments say of r.

    Args:
        scale: r, float64 [columns].
        size: Of each column the sum of m'² / v'; zero says nothing.
        blocks: How a row is cut.

    Returns:
        The new r, by what first moments are to be multiplied, [columns], and second moments, [blocks of a row].
    """

    def spread_mean(x: Tensor) -> Tensor:
        return blocks.spread(blocks.mean(x[None]), (1, len(x)))[0]

    mean = spread_mean(size)
    relative = torch.where(size > 0, size / torch.where(mean > 0, mean, 1.0), 1.0)
    c = scale**-2 * relative
    c = (c / spread_mean(c)).clamp_(min=LEAST_SHARE)
    new = c.rsqrt().float().double()
    ratio = new / scale
    expected = torch.where(mean > 0, relative, 1.0) * ratio.square()
    return new, ratio, blocks.mean(expected[None])[0]
