"""Running methods one after the other, each in a process of its own, and keeping what they measured."""

from __future__ import annotations

import csv
import multiprocessing
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from lightning_memopt.bench.job import COLUMNS, Job, Row
from lightning_memopt.bench.methods import METHODS, NotInstalledError
from lightning_memopt.bench.worker import DONE, FAILED, work


@dataclass
class Worker:
    """A started process that waits for its turn."""

    job: Job
    process: SpawnProcess
    connection: Any

    @classmethod
    def start(cls, job: Job) -> Worker:
        """Start the process; it imports and reads the config, then waits."""
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, job), daemon=True)
        process.start()
        theirs.close()
        return cls(job, process, mine)

    def rows(self, timeout_s: float) -> Iterator[Row]:
        """Let the process train, and yield rows as they come; the last one may say why there are no more."""
        deadline = time.monotonic() + timeout_s
        try:
            self.connection.send("go")
            while True:
                if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                    yield Row(status=f"stopped after {timeout_s:.0f} s")
                    return
                kind, row = self.connection.recv()
                if kind == DONE:
                    return
                yield row
                if kind == FAILED:
                    return
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join(10)
            yield Row(status=f"failed: the process ended with exit code {self.process.exitcode}")
        finally:
            self.stop()

    def stop(self) -> None:
        """End the process and wait until the device is free."""
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def run(jobs: Sequence[Job], timeout_s: float, budget_s: float = float("inf")) -> Iterator[Row]:
    """Measure the jobs in order.

    Args:
        jobs: What to measure.
        timeout_s: For one job.
        budget_s: For all; jobs that have not begun by then are left out, with a row that says so.

    Yields:
        Rows as they come in. A phase that was profiled comes a second time, with busy time and kernels filled in.
    """
    ready: list[Job] = []
    missing: list[tuple[Job, str]] = []
    for job in jobs:
        try:
            METHODS[job.method].package_version  # noqa: B018
            ready.append(job)
        except NotInstalledError as error:
            missing.append((job, str(error)))
    end = time.monotonic() + budget_s
    following = Worker.start(ready[0]) if ready else None
    for index in range(len(ready)):
        current, following = following, None
        assert current is not None
        left = end - time.monotonic()
        if left <= 0:
            current.process.kill()
            for job in ready[index:]:
                yield described(Row(status="not run: the time for all methods was up"), job)
            break
        if index + 1 < len(ready):
            following = Worker.start(ready[index + 1])
        done: dict[int | None, Row] = {}
        try:
            for row in current.rows(min(timeout_s, left)):
                if row.gpu_busy_ms is not None and row.tokens in done:
                    row = replace(done[row.tokens], gpu_busy_ms=row.gpu_busy_ms, kernels=row.kernels)
                elif row.status != "ok" and row.tokens in done:
                    continue  # the numbers are there, only the profile is not
                done[row.tokens] = described(row, current.job)
                yield done[row.tokens]
        except BaseException:
            current.process.kill()
            if following is not None:
                following.process.kill()
            raise
    for job, reason in missing:
        yield described(Row(status=reason), job)


def described(row: Row, job: Job) -> Row:
    """The row with method, model and surroundings filled in."""
    method = METHODS[job.method]
    try:
        package = method.package_version
    except NotInstalledError:
        package = ""
    return replace(
        row,
        model=Path(job.config).stem,
        method=job.method,
        label=method.label,
        package=package,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        command=shlex.join(["memopt", *sys.argv[1:]]),
        **surroundings(job.device),
    )


def surroundings(device: str) -> dict[str, Any]:
    """Device and versions, without making this process use the device."""
    found = {name: _version(name) for name in ("triton", "lightning", "transformers")}
    found |= {"torch": torch.__version__, "python": platform.python_version(), "device": platform.processor() or "CPU"}
    if device == "cuda":
        found |= _nvidia()
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _nvidia() -> dict[str, str]:
    import subprocess

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        name, driver = lines[0].rsplit(",", 1)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return {"device": "CUDA device"}
    return {"device": name.strip(), "driver": driver.strip()}


class Table:
    """The CSV of a run, rewritten after every row so that a run that is cut short keeps what it has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[tuple[str, int | None], Row] = {}

    def add(self, row: Row) -> None:
        """Add a row, or replace that of the same method and tokens."""
        self.rows[row.method, row.tokens] = row
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(dict(row.cells()) for row in self.rows.values())
