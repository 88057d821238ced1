"""`memopt bench`: compare methods on one model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch

from lightning_memopt.errors import MemOptError

# Of the config's section `bench`.
KEYS = ("methods", "tokens", "warmup", "steps")
DEFAULT_METHODS = ("adamw", "adamw_foreach", "forge_adamw", "forge_gefen")


def bench(
    config: str,
    methods: str | None = None,
    out: str | None = None,
    tokens: str | None = None,
    warmup: int | None = None,
    steps: int | None = None,
    profile: bool = True,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    timeout: float = 120.0,
    budget: float | None = None,
) -> None:
    """Train a config's model with one method after the other, each in its own process, and compare them.

    Writes results.csv (a line as soon as it is measured), table.md, plots and each process's log.

    Args:
        config: YAML file as for `memopt fit`, with RandomTokens as data. Its section `bench` may hold methods, tokens,
            warmup and steps.
        methods: Names joined by commas; "all" for every method. The config's list by default.
        out: Folder for the results; runs/bench/NAME by default.
        tokens: Tokens per step, joined by commas; the config's by default. With the config's accumulate_grad_batches
            they are divided among the micro-batches.
        warmup: Steps before each measurement.
        steps: Steps measured.
        profile: Also count the GPU's busy time and kernels.
        device: Where to train.
        timeout: Seconds after which a method is stopped.
        budget: Seconds for all methods; those that have not begun by then are left out.

    Raises:
        MemOptError: The config or a method's name is not usable.
    """
    # Not at the top: the processes that train import this package too.
    from lightning_memopt.bench import report
    from lightning_memopt.bench.job import Job
    from lightning_memopt.bench.methods import METHODS, chosen
    from lightning_memopt.bench.run import Table, run
    from lightning_memopt.run_config import RunConfig

    settings = RunConfig.read(config)
    if unknown := settings.bench.keys() - set(KEYS):
        raise MemOptError(f"{config}: the section `bench` knows {', '.join(KEYS)}, not {', '.join(sorted(unknown))}.")
    names = methods.split(",") if methods else list(settings.bench.get("methods", DEFAULT_METHODS))
    names = list(METHODS) if names == ["all"] else list(chosen(names))
    data = settings.cli.config.data
    sequence = getattr(getattr(data, "init_args", None), "seq_len", None)
    counts = _integers(tokens) if tokens else settings.bench.get("tokens")
    if not counts:
        if sequence is None:
            raise MemOptError("Say how many tokens per step: --tokens 512,2048, or `tokens` in the section `bench`.")
        counts = [sequence * data.init_args.batch_size * settings.trainer.accumulate_grad_batches]
    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    folder = Path(out) if out else Path("runs", "bench", Path(config).stem)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config, folder / "config.yaml")
    jobs = [
        Job(
            config=config,
            method=name,
            device=where,
            tokens=tuple(int(count) for count in counts),
            warmup=warmup or int(settings.bench.get("warmup", 3)),
            steps=steps or int(settings.bench.get("steps", 8)),
            profile=profile and where == "cuda",
            log=str(folder / "logs" / f"{name}.log"),
        )
        for name in names
    ]
    results = Table(folder / "results.csv")
    for row in run(jobs, timeout, budget if budget is not None else float("inf")):
        row.precision = settings.precision
        row.accumulate_grad_batches = settings.trainer.accumulate_grad_batches
        results.add(row)
        if row.status != "ok":
            print(f"{row.method:24} {row.tokens or '':>6} {row.status}", flush=True)
        elif row.gpu_busy_ms is None:
            memory = f"{row.peak_gib:7.2f} GiB" if row.peak_gib is not None else ""
            print(f"{row.method:24} {row.tokens:6} {row.step_ms:9.2f} ms {memory}  loss {row.loss:.3f}", flush=True)
    report.write(results.path)
    print(f"Wrote {', '.join(sorted(path.name for path in folder.iterdir()))} to {folder}.")


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise MemOptError(f"--tokens {text}: write whole numbers joined by commas.") from None
