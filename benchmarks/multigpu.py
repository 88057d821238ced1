"""Sharded training on the GPUs of one host: speed, memory and traffic against plain FSDP2, and that nothing changes.

    python -m benchmarks.multigpu                 all GPUs there are
    python -m benchmarks.multigpu --ranks 2 --layers 8 --only speed
    python -m benchmarks.multigpu --ranks 2 --only speed --methods forge_fsdp --profile traces

Every job is started by torchrun, so that a killed rank ends it as it would a user's. Parts:

    equal    float32, nearest rounding: N ranks against one on the same global batches, both routes, with clipping
    speed    an 8B-shaped model, 512 and 2048 tokens per rank, each method; a profiled step for the hidden communication
    turns    the same model, a trainer of each method in the same processes, which take turns of a few steps: hosts are
             faster at some times than at others, by more than methods differ
    resume   saved on N ranks, resumed on one, states equal to the last bit
    kill     one rank killed in the middle of a backward pass: all end, and the last checkpoint resumes

On a machine without GPUs, ``--device cpu`` runs everything on a tiny model with gloo: a check of this script.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.multigpu_rank import Job
from benchmarks.multigpu_turns import STEPS

EIGHT_B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "intermediate_size": 14336,
    "max_seq_len": 8192,
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 112,
    "max_seq_len": 64,
}
# Tokens per rank.
SIZES = (512, 2048)
# Seconds after which a job counts as hung.
PATIENCE = 900


def run(job: Job, folder: Path) -> list[dict[str, Any]] | str:
    """Every rank's answer, or why there is none."""
    (answers,) = run_all([job], folder)
    return answers


def run_all(jobs: Sequence[Job], folder: Path) -> Iterator[list[dict[str, Any]] | str]:
    """For each job every rank's answer, or why there is none: one after the other in the same processes.

    If these end, the rest go on in new ones, but for a job that was the first in its own.
    """
    jobs = list(jobs)
    while jobs:
        said, through = launch(jobs, folder, "multigpu_rank"), 0
        while through < len(jobs) and (answers := answers_of(jobs[through])):
            yield answers
            through += 1
        if not through:
            yield said
        jobs = jobs[max(1, through) :]


def answers_of(job: Job) -> list[dict[str, Any]]:
    """Every rank's, once all have answered."""
    paths = [Path(f"{job.answer}.{rank}") for rank in range(job.ranks)]
    return [json.loads(path.read_text()) for path in paths] if all(path.exists() for path in paths) else []


def launch(jobs: Sequence[Job], folder: Path, program: str) -> str:
    """Run jobs in processes of their own; what went wrong, if anything did."""
    for i, job in enumerate(jobs):
        job.answer = str(folder / f"{time.time_ns()}.{i}")
    path = folder / f"{time.time_ns()}.jobs"
    path.write_text(json.dumps([asdict(job) for job in jobs]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={jobs[0].ranks}"]
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    process = subprocess.Popen(
        [*command, "-m", f"benchmarks.{program}", str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"hung for {PATIENCE} s"
    errors = [line for line in said.splitlines() if "Error: " in line and "ChildFailed" not in line]
    return (errors[0] if errors else said[-300:]).strip()


def equal(base: Callable[..., Job], ranks: int, folder: Path, clip: float | None) -> Iterator[dict[str, Any]]:
    """N ranks against one, on the same global batches of `ranks` sequences."""
    make = partial(base, part="equal", precision="32-true", steps=20, shape=TINY | {"num_layers": 2}, clip=clip)
    one = run(make(ranks=1, samples=ranks, tokens=(32 * ranks,)), folder)
    for route in ("exchange", "reduce"):
        many = run(make(ranks=ranks, route=route), folder)
        row = {"part": "equal", "ranks": ranks, "route": route, "clip": clip}
        if isinstance(one, str) or isinstance(many, str):
            yield row | {"result": f"failed: {one if isinstance(one, str) else many}"}
            continue
        weights = [name for name in one[0]["sums"] if "/" not in name]
        furthest = max(
            abs(a - b) for name in weights for a, b in zip(one[0]["sums"][name], many[0]["sums"][name], strict=True)
        )
        yield row | {"result": "equal" if furthest <= 1e-5 else "DIFFERS", "difference": furthest}


METHODS = (
    ("fsdp2", "adamw_fused", "auto"),
    ("forge_fsdp", "adamw", "auto"),
    ("forge_fsdp", "gefen", "auto"),
    ("forge_fsdp", "adamw8bit", "auto"),
    ("forge_fsdp", "adamw", "reduce"),
    ("fsdp2", "bnb_adamw8bit", "auto"),
)

# Those of which all fit into memory together, and work: bitsandbytes' optimizers do not take FSDP2's parameters.
IN_TURN = tuple(names for names in METHODS if names[1] != "bnb_adamw8bit" and names[2] == "auto")


def speed(
    base: Callable[..., Job],
    ranks: int,
    folder: Path,
    shape: dict[str, int],
    methods: Sequence[tuple[str, str, str]],
    traces: str | None,
) -> Iterator[dict[str, Any]]:
    """Every method at both sizes; AdamW with clipping as well."""
    sizes = [min(tokens, shape["max_seq_len"]) for tokens in SIZES]
    make = partial(base, part="speed", ranks=ranks, shape=shape, tokens=sizes, profile=True, traces=traces)
    chosen = [
        (*names, clip)
        for clip, names in itertools.product((None, 1.0), methods)
        if clip is None or (names[1] in ("adamw", "adamw_fused") and names[2] == "auto")
    ]
    jobs = [make(method=method, optimizer=name, route=route, clip=clip) for method, name, route, clip in chosen]
    for (method, optimizer, route, clip), answers in zip(chosen, run_all(jobs, folder), strict=True):
        row = {"part": "speed", "ranks": ranks, "method": method, "optimizer": optimizer, "route": route, "clip": clip}
        if isinstance(answers, str):
            yield row | {"result": f"failed: {answers}"}
            continue
        for phase, tokens in enumerate(sizes):
            results = [answer["results"][phase] for answer in answers]
            yield row | {
                "by": results[0]["by"],
                "tokens": tokens,
                "result": "ran",
                "step_ms": round(median(time for result in results for time in result["step_ms"]), 2),
                "peak_gib": round(max(result.get("peak", 0) for result in results) / 2**30, 2),
                "received_mb": round(max(result["received"] for result in results) / 1e6, 1),
                "predicted_mb": round(results[0]["predicted"] / 1e6, 1),
                "exchanged_layers": results[0]["exchanged_layers"],
                "hidden": results[0]["hidden"],
                "loss": round(results[0]["loss"], 4),
            }


def turns(
    base: Callable[..., Job],
    ranks: int,
    folder: Path,
    shape: dict[str, int],
    methods: Sequence[tuple[str, str, str]],
) -> Iterator[dict[str, Any]]:
    """The time of a step of methods that take turns, with clipping and without; a method that fails ends all."""
    sizes = [min(tokens, shape["max_seq_len"]) for tokens in SIZES]
    clips = (None, 1.0)
    every = [tokens for tokens in sizes for _ in clips]
    make = partial(base, part="turns", ranks=ranks, shape=shape, tokens=every, steps=STEPS, clips=clips * len(sizes))
    jobs = [make(method=method, optimizer=optimizer, route=route) for method, optimizer, route in methods]
    told = [0] * len(jobs)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(launch, jobs, folder, "multigpu_turns")
        while any(phases < len(every) for phases in told):
            over = running.done()
            for i, (job, (method, optimizer, route)) in enumerate(zip(jobs, methods, strict=True)):
                row = {"part": "turns", "ranks": ranks, "method": method, "optimizer": optimizer, "route": route}
                answers = answers_of(job)
                for phase in range(told[i], min((len(answer["step_ms"]) for answer in answers), default=0)):
                    times = [time for answer in answers for time in answer["step_ms"][phase]]
                    row |= {"by": answers[0]["by"], "tokens": every[phase], "clip": job.clips[phase]}
                    told[i] += 1
                    yield row | {"step_ms": round(median(times), 2), "result": "ran"}
                if over and told[i] < len(every):
                    told[i] = len(every)
                    yield row | {"tokens": None, "clip": None, "result": f"failed: {running.result()}"}
            time.sleep(0.5)


def resume(
    base: Callable[..., Job], ranks: int, folder: Path, shape: dict[str, int], optimizer: str
) -> Iterator[dict[str, Any]]:
    """Saved on all, loaded on one."""
    path = str(folder / f"{optimizer}.ckpt")
    make = partial(base, part="resume", shape=shape | {"num_layers": 2}, optimizer=optimizer, steps=3)
    saved = run(make(ranks=ranks, save=path), folder)
    loaded = run(make(ranks=1, load=path), folder)
    same = not isinstance(saved, str) and not isinstance(loaded, str) and saved[0]["sums"] == loaded[0]["sums"]
    failed = next((answer for answer in (saved, loaded) if isinstance(answer, str)), "DIFFERS")
    yield {"part": "resume", "ranks": ranks, "optimizer": optimizer, "result": "equal" if same else failed}


def kill(base: Callable[..., Job], ranks: int, folder: Path, shape: dict[str, int]) -> Iterator[dict[str, Any]]:
    """All ranks end, and the checkpoint of the step before resumes."""
    make = partial(base, part="kill", shape=shape | {"num_layers": 2})
    path = str(folder / "killed.ckpt")
    start = time.monotonic()
    died = run(make(ranks=ranks, kill=3, save=path), folder)
    seconds = round(time.monotonic() - start)
    resumed = run(make(ranks=1, load=path, steps=6), folder)
    ended = isinstance(died, str) and "hung" not in died
    usable = not isinstance(resumed, str) and resumed[0]["step"] == 6
    result = "all ended, checkpoint usable" if ended and usable else f"FAILED: {died} / {resumed}"
    yield {"part": "kill", "ranks": ranks, "seconds": seconds, "result": result}


COLUMNS = (
    "part", "ranks", "method", "optimizer", "route", "by", "tokens", "clip", "step_ms", "peak_gib", "received_mb",
    "predicted_mb", "exchanged_layers", "hidden", "loss", "difference", "seconds", "result", "device", "torch",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes; default: the GPUs there are")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parts = ("equal", "resume", "kill", "speed", "turns")
    parser.add_argument("--only", choices=parts, nargs="*", default=parts)
    for i, name in enumerate(("methods", "optimizers", "routes")):
        every = sorted({names[i] for names in METHODS})
        parser.add_argument(f"--{name}", choices=every, nargs="*", default=every, help="of speed and turns")
    parser.add_argument(
        "--profile",
        metavar="FOLDER",
        help="write Chrome traces of a step of each method there; watching the host slows it, so `hidden` is smaller",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/multigpu.csv"))
    options = parser.parse_args()
    cuda = options.device == "cuda"
    ranks = options.ranks or (torch.cuda.device_count() if cuda else 2)
    shape = (EIGHT_B if cuda else TINY) | {"num_layers": options.layers if cuda else 2}
    base = partial(Job, device=options.device)
    if not cuda:
        base = partial(base, precision="32-true")
    place = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, options.out.open("a", newline="") as file:
        folder = Path(temporary)
        writer = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            writer.writeheader()
        checks_of: dict[str, list[Iterator[dict[str, Any]]]] = {
            "equal": [equal(base, ranks, folder, clip) for clip in (None, 0.5)],
            "resume": [resume(base, ranks, folder, shape, name) for name in ("adamw", "adamw8bit", "gefen")],
            "kill": [kill(base, ranks, folder, shape)],
        }
        checks = [check for name, part in checks_of.items() if name in options.only for check in part]
        # Checks are not timed and run side by side; nothing runs beside what is timed.
        with ThreadPoolExecutor(len(checks) or 1) as pool:
            answers: Iterator[dict[str, Any]] = itertools.chain.from_iterable(pool.map(list, checks))
            wanted = options.methods, options.optimizers, options.routes
            methods = [
                names for names in METHODS if all(name in some for name, some in zip(names, wanted, strict=True))
            ]
            in_turn = [names for names in methods if names in IN_TURN]
            timed = itertools.chain(
                speed(base, ranks, folder, shape, methods, options.profile) if "speed" in options.only else (),
                turns(base, ranks, folder, shape, in_turn) if "turns" in options.only else (),
            )
            for row in itertools.chain(answers, timed):
                print(json.dumps(row), flush=True)
                writer.writerow(row | place)
                file.flush()


if __name__ == "__main__":
    main()
