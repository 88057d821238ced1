"""What an update of a sparse weight needs to know besides: which weights are active, and how old they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memopt.rules.base import Rule


@dataclass(slots=True, eq=False)
class Ages:
    """Scalars of one step that depend on a weight's age: a row for each cohort, the weights that were born together.

    Attributes:
        names: The rule's scalars that depend on the age (`Rule.aged_scalars`).
        rows: For each cohort the ramp, which multiplies the update, and the scalars of `names`; float64.
        table: The same as kernels read it, on the weight's device (`kernels.sparse_arguments.ages_table`); None where
            the reference runs.
    """

    names: tuple[str, ...]
    rows: Sequence[tuple[float, ...]]
    table: Tensor | None = None


@dataclass(slots=True, eq=False)
class Largest:
    """The `k` runs of inactive weights with the largest gradient, collected from one slab of it after another.

    Equal scores are taken in the order of their index, so the result does not depend on the slabs.

    Attributes:
        k: How many to keep.
        run: Length of a run.
        scores, runs: Sum of |gradient| over each kept run, and its number (index of its first weight in the whole
            parameter / `run`); both [at most k], largest first.
    """

    k: int
    run: int
    scores: Tensor | None = None
    runs: Tensor | None = None

    def add(self, first: int, grad: Tensor, active: Tensor) -> None:
        """See the gradient of consecutive weights.

        Args:
            first: Index of the first of them in the whole parameter, a multiple of `run`.
            grad: [count], a multiple of `run`.
            active: Bool [count].
        """
        scores = grad.abs().view(-1, self.run).sum(1)
        # A run that would bring in a non-finite gradient is as good as any other without one.
        scores = scores.nan_to_num_(0.0, 0.0)
        where = (~active.view(-1, self.run)[:, 0]).nonzero().view(-1)
        scores, runs = scores[where], where + first // self.run
        if self.scores is not None and self.runs is not None:
            scores, runs = torch.cat([self.scores, scores]), torch.cat([self.runs, runs])
        order = scores.argsort(descending=True, stable=True)[: self.k]
        self.scores, self.runs = scores[order], runs[order]

    def finish(self) -> None:
        """Keep what a topology update needs, in as few bytes as it takes."""
        if self.runs is not None:
            self.runs = self.runs.int()


@dataclass(slots=True, eq=False)
class Active:
    """The active weights of a parameter.

    Attributes:
        bits, index: The mask, see `lightning_memopt.sparsity.bits`.
        cohort: uint8 [active], cohort of each active weight.
        ages: Their scalars in this step.
        growth: Where to collect the gradient of inactive weights, or None.
        stored: A part of the gradient that was accumulated for active weights only, [active], or None.
    """

    bits: Tensor
    index: Tensor
    cohort: Tensor
    ages: Ages
    growth: Largest | None = None
    stored: Tensor | None = None


@dataclass(slots=True, eq=False)
class Entries:
    """Marks an update as one of gathered weights.

    Attributes:
        index: int64, where each weight lies in the full parameter.
        cohort: uint8, of each weight.
        ages: See `Active`.
    """

    index: Tensor
    cohort: Tensor
    ages: Ages

    def step(
        self,
        rule: Rule,
        w: Tensor,
        g: Tensor,
        g2: Tensor,
        moments: Sequence[Tensor],
        scalars: Mapping[str, float],
    ) -> None:
        """`Rule.update` with each weight's own scalars, and its update multiplied by its ramp; in place."""
        kinds = {row: i for i, row in enumerate(dict.fromkeys(self.ages.rows))}
        if len(kinds) == 1:
            self._step(rule, self.ages.rows[0], w, g, g2, moments, scalars)
            return
        table = torch.tensor([kinds[row] for row in self.ages.rows], dtype=torch.uint8, device=w.device)
        kind = table[self.cohort.int()]
        sizes = torch.bincount(kind, minlength=len(kinds)).tolist()
        places = kind.argsort(stable=True).split(sizes)
        whole = [tensor.view(-1) for tensor in (w, g, g2, *moments)]
        for row, at in zip(kinds, places, strict=True):
            part = [tensor[at] for tensor in whole]
            self._step(rule, row, part[0], part[1], part[2], part[3:], scalars)
            for tensor, updated in ((whole[0], part[0]), *zip(whole[3:], part[3:], strict=True)):
                tensor[at] = updated

    def _step(
        self,
        rule: Rule,
        row: tuple[float, ...],
        w: Tensor,
        g: Tensor,
        g2: Tensor,
        moments: Sequence[Tensor],
        scalars: Mapping[str, float],
    ) -> None:
        ramp, *aged = row
        before = w.clone() if ramp != 1.0 else w
        rule.update(w, g, g2, moments, {**scalars, **dict(zip(self.ages.names, aged, strict=True))})
        if ramp != 1.0:
            w.copy_(before.lerp(w, ramp))
