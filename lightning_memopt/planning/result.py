"""What a plan says, as values and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MIB, GIB = 2**20, 2**30
# What torch does not count but the device must hold as well: CUDA's context, libraries' workspaces, fragments.
RESERVE = GIB


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M" if number >= 1e6 else f"{number:,}"


@dataclass(frozen=True)
class Kinds:
    """Bytes at the peak, by kind.

    Attributes:
        weights: Parameters and buffers.
        optimizer_state: What the optimizer keeps from step to step.
        gradients: Stored gradients, or the factors that wait for an update.
        activations: What autograd keeps and what operations make on their way.
        logits: The part of those that is as wide as the vocabulary.
        scratch: What the optimizer's step makes on its way.
    """

    weights: int
    optimizer_state: int
    gradients: int
    activations: int
    logits: int
    scratch: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class MethodPlan:
    """One line of a plan.

    Attributes:
        name, label: Of the method.
        bytes: At the peak.
        when: In which part of a step the peak is: "forward and backward" or "optimizer step".
        fits: Whether a device of the plan's memory holds it; None without a memory.
        largest_batch: The most sequences (first dimension of the batch) that fit.
    """

    name: str
    label: str
    bytes: Kinds
    when: str
    fits: bool | None = None
    largest_batch: int | None = None

    @property
    def peak_gib(self) -> float:
        """Peak in GiB."""
        return self.bytes.total / GIB


@dataclass(frozen=True)
class Plan:
    """What `plan` found.

    Attributes:
        model: Name of the module.
        parameters: Their number.
        batch_size: First dimension of the batch.
        tokens: Elements of the batch's largest integer tensor, None where there is none.
        precision: The Trainer's.
        world_size: Devices that share weights, gradients and state.
        memory: Bytes of one device, or None.
        methods: The lines.
        accumulate_grad_batches: Such batches in a step.
        clipped: Whether lines are of steps that clip by norm, as the config's.
        notes: What is to be known besides.
    """

    model: str
    parameters: int
    batch_size: int
    tokens: int | None
    precision: str
    world_size: int
    memory: int | None
    methods: tuple[MethodPlan, ...]
    accumulate_grad_batches: int = 1
    clipped: bool = False
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> MethodPlan:
        """The line of a method."""
        return next(method for method in self.methods if method.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        values = {key: value for key, value in asdict(self).items() if key != "methods"}
        lines = [
            {**asdict(method), "peak_gib": round(method.peak_gib, 3), "peak_bytes": method.bytes.total}
            for method in self.methods
        ]
        return {**values, "methods": lines}

    def __str__(self) -> str:
        """A table in GiB, or in MiB if no method reaches one GiB."""
        small = all(method.bytes.total < GIB for method in self.methods)
        unit, name = (MIB, "MiB") if small else (GIB, "GiB")
        kinds = ("weights", "state", "gradients", "activations", "logits", "scratch", "peak")
        width = max(len(method.label) for method in self.methods)
        head = f"{'method':{width}}" + "".join(f"{kind:>13}" for kind in kinds)
        if self.memory is not None:
            head += f"{'fits':>8}{'largest batch':>16}"
        lines = [head]
        for method in self.methods:
            numbers = [*asdict(method.bytes).values(), method.bytes.total]
            line = f"{method.label:{width}}" + "".join(f"{number / unit:13.2f}" for number in numbers)
            if self.memory is not None:
                line += f"{'yes' if method.fits else 'no':>8}{method.largest_batch:>16}"
            lines.append(line)
        tokens = f", {self.tokens} tokens" if self.tokens else ""
        where = f" on each of {self.world_size} devices" if self.world_size > 1 else ""
        title = f"{self.model}: {_count(self.parameters)} parameters, batch of {self.batch_size}{tokens}, "
        title += f"{self.accumulate_grad_batches} to a step, " if self.accumulate_grad_batches > 1 else ""
        title += f"{self.precision}{', clipped by norm' if self.clipped else ''}; {name} at the peak{where}"
        if self.memory is not None:
            title += f"; of {self.memory / GIB:.4g} GiB, {RESERVE / GIB:.0f} is left for CUDA itself"
        return "\n".join([title, "", *lines, *(f"\n{note}" for note in self.notes)])
