"""When the topology changes, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

PruneSchedule = Literal["cosine", "constant", "linear"]


@dataclass(frozen=True)
class TopologySchedule:
    """Updates after every `every`-th optimizer step before `end`.

    Attributes:
        every: Steps between updates.
        fraction: Part of a layer's active weights that the first updates replace.
        decay: How the fraction falls to zero at `end`: by half a cosine, linearly, or not at all.
        end: Step from which the topology is fixed; infinite for a run without an end.
    """

    every: int
    fraction: float
    decay: PruneSchedule
    end: float

    def due(self, step: int) -> bool:
        """Whether the topology changes right after optimizer step number `step` (the first is 1)."""
        return step > 0 and step % self.every == 0 and step < self.end

    def at(self, step: int) -> float:
        """The fraction at a step."""
        progress = min(step / self.end, 1.0)
        if self.decay == "cosine":
            return self.fraction * 0.5 * (1 + math.cos(math.pi * progress))
        return self.fraction * (1 - progress) if self.decay == "linear" else self.fraction
