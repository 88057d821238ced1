"""What one process measures, and the form of its results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate

GIB = 2**30


@dataclass(frozen=True)
class Job:
    """One method on one config.

    Attributes:
        config: The YAML file.
        method: A name in `lightning_memopt.bench.methods.METHODS`.
        device: "cuda" or "cpu".
        tokens: Tokens per step, one after the other in the same process.
        warmup: Steps before each measurement; kernels compile and caches fill in them.
        steps: Steps measured.
        profile: Also count the GPU's busy time and kernels, at the first number of tokens, in steps of their own after
            all others.
        log: File for everything the process prints.
    """

    config: str
    method: str
    device: str
    tokens: tuple[int, ...]
    warmup: int
    steps: int
    profile: bool
    log: str


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of the same shape: `warmup` of them, then `steps` that are measured or profiled."""

    tokens: int
    warmup: int
    steps: int
    profile: bool = False
    start: int = 0

    @property
    def measured_from(self) -> int:
        """Index of the first step after the warm-up."""
        return self.start + self.warmup

    @property
    def last(self) -> int:
        """Index of the last step."""
        return self.start + self.warmup + self.steps - 1


PROFILED_STEPS = 2


def phases(job: Job) -> list[Phase]:
    """The phases of a job. Profiling comes last, as a profiler once started may slow later launches."""
    plain = [(tokens, job.warmup, job.steps, False) for tokens in job.tokens]
    profiled = [(job.tokens[0], 1, PROFILED_STEPS, True)] if job.profile else []
    lengths = [warmup + steps for _, warmup, steps, _ in (*plain, *profiled)]
    starts = accumulate([0, *lengths[:-1]])
    return [Phase(*phase, start) for phase, start in zip((*plain, *profiled), starts, strict=True)]


@dataclass
class Row:
    """One line of the table: a method at a number of tokens per step. Empty cells were not measured.

    Attributes:
        model: Name of the config.
        method: Name of the method.
        label: The method in words.
        tokens: Tokens per step.
        status: "ok", or why there are no numbers.
        step_ms: Median time of a step.
        step_ms_low, step_ms_high: Fastest and slowest step.
        steps: Steps measured.
        tokens_per_s: From the median.
        peak_gib: Most memory allocated by torch during the measured steps; on a CPU, the process's so far.
        first_peak_gib: The same from the start of the process (or the last phase) to the end of the warm-up.
        reserved_gib: Most memory that torch's allocator held during the measured steps.
        device_gib: All memory in use on the device after them, also by other libraries and processes.
        gpu_busy_ms: Time per step in which the GPU ran a kernel or copy.
        kernels: Kernels and copies per step.
        loss: Training loss of the last measured step.
        loss_step: How many steps were taken by then.
        parameters: Of the model.
        precision, accumulate_grad_batches: The Trainer's.
        device, driver, python, torch, triton, lightning, transformers, package: Where, and with what.
        date: UTC.
        command: What wrote the line.
    """

    model: str = ""
    method: str = ""
    label: str = ""
    tokens: int | None = None
    status: str = "ok"
    step_ms: float | None = None
    step_ms_low: float | None = None
    step_ms_high: float | None = None
    steps: int | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    first_peak_gib: float | None = None
    reserved_gib: float | None = None
    device_gib: float | None = None
    gpu_busy_ms: float | None = None
    kernels: float | None = None
    loss: float | None = None
    loss_step: int | None = None
    parameters: int | None = None
    precision: str = ""
    accumulate_grad_batches: int = 1
    device: str = ""
    driver: str = ""
    python: str = ""
    torch: str = ""
    triton: str = ""
    lightning: str = ""
    transformers: str = ""
    package: str = ""
    date: str = ""
    command: str = ""

    def cells(self) -> Iterator[tuple[str, str]]:
        """Column and text; numbers with five significant digits."""
        for column in fields(self):
            value = getattr(self, column.name)
            yield column.name, "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


COLUMNS = tuple(column.name for column in fields(Row))
