"""One rank of jobs of `benchmarks.multigpu` that take turns: a trainer for each, of which one takes a few steps.

Each trainer runs in a thread, and waits in a callback until the one before it is through and the device is idle.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from benchmarks.multigpu_rank import Job, Model, jobs_of, make_trainer, way

# For each number of tokens: steps before any is measured, turns, and steps of each, the first of which is not counted.
WARM, TURNS, TURN = 3, 4, 5
STEPS = WARM + TURNS * TURN


class Baton:
    """Who may run.

    Args:
        runners: How many there are; the first one begins.
    """

    def __init__(self, runners: int) -> None:
        self._at = 0
        self._running = [True] * runners
        self._changed = threading.Condition()

    def wait(self, runner: int) -> None:
        """Until it is this one's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._at == runner)

    def pass_on(self, runner: int, ends: bool = False) -> None:
        """To the next one that has not ended."""
        with self._changed:
            self._running[runner] = not ends
            after = [(runner + step) % len(self._running) for step in range(1, len(self._running) + 1)]
            self._at = next((other for other in after if self._running[other]), -1)
            self._changed.notify_all()


class Turns(pl.Callback):
    """Takes turns, and the time of each step."""

    def __init__(self, job: Job, runner: int, baton: Baton) -> None:
        self.job, self.runner, self.baton = job, runner, baton
        self.marks: list[Any] = []
        self.step_ms: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        phase, step = divmod(batch_idx, STEPS)
        trainer.gradient_clip_val = self.job.clips[phase]
        if step == 0 or (step >= WARM and (step - WARM) % TURN == 0):
            if batch_idx:
                self.synchronize()
                self.baton.pass_on(self.runner)
                self.baton.wait(self.runner)
            dist.barrier()
            self.synchronize()
            self.marks.append([])
            self.mark()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mark()
        if batch_idx % STEPS == STEPS - 1:
            self.synchronize()
            # The first turn warms up.
            self.step_ms.append(
                [self.between(a, b) for turn in self.marks[1:] for a, b in itertools.pairwise(turn[1:])]
            )
            self.marks = []
            self.answer(trainer.global_rank, way(module))

    def answer(self, rank: int, by: str) -> None:
        """Leave what is known so far."""
        path = Path(f"{self.job.answer}.{rank}")
        new = Path(f"{path}.new")
        new.write_text(json.dumps({"step_ms": self.step_ms, "by": by}))
        new.replace(path)

    def mark(self) -> None:
        if self.job.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks[-1].append(event)
        else:
            self.marks[-1].append(time.perf_counter())

    def between(self, a: Any, b: Any) -> float:
        """Milliseconds."""
        return float(a.elapsed_time(b)) if self.job.device == "cuda" else 1e3 * (b - a)

    def synchronize(self) -> None:
        if self.job.device == "cuda":
            torch.cuda.synchronize()


def work(job: Job, runner: int, baton: Baton) -> None:
    """Train in turn, and leave this rank's answer."""
    baton.wait(runner)
    try:
        turns = Turns(job, runner, baton)
        make_trainer(job, [turns]).fit(Model(job))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others would wait for it
    turns.synchronize()
    baton.pass_on(runner, ends=True)


def main(jobs: Sequence[Job]) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    if jobs[0].device == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    else:
        dist.init_process_group("gloo")
    baton = Baton(len(jobs))
    threads = [threading.Thread(target=work, args=(job, i, baton)) for i, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(jobs_of(sys.argv[1]))
