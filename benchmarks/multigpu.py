"""Sharded training on the GPUs of one host: speed, memory and traffic against plain FSDP2, and that nothing changes.

    python -m benchmarks.multigpu                 all GPUs there are
    python -m benchmarks.multigpu --ranks 2 --layers 8 --only speed

Every job runs in processes of its own, started by torchrun, so that memory is counted from nothing and a killed rank
ends its job as it would a user's. Parts:

    equal    float32, nearest rounding: N ranks against one on the same global batches, both routes, with clipping
    speed    an 8B-shaped model, 512 and 2048 tokens per rank, each method; a profiled step for the hidden communication
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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

import lightning_memopt as memopt
from lightning_memopt.backward import exchange
from lightning_memopt.backward.traffic import reduce_bytes
from lightning_memopt.models.linear_cross_entropy import loss_at_head
from lightning_memopt.models.llama import Llama

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
WARMUP, MEASURED = 4, 6
# Seconds after which a job counts as hung.
PATIENCE = 900


@dataclass
class Job:
    """One run of N processes.

    Attributes:
        method: ``forge_fsdp``, or ``fsdp2``: Lightning's own strategy and the optimizer's own step.
        optimizer: See `make_optimizer`.
        route: Of forge_fsdp.
        tokens: Per rank and step; the steps are taken with each of these in turn.
        samples: Sequences per rank.
        clip: Largest norm, or None.
        load, save: Checkpoints.
        kill: Step at which rank 1 kills itself in backward.
    """

    part: str
    ranks: int
    device: str
    shape: dict[str, int]
    method: str = "forge_fsdp"
    optimizer: str = "adamw"
    route: str = "auto"
    tokens: Sequence[int] = (32,)
    samples: int = 1
    steps: int = WARMUP + MEASURED
    precision: str = "bf16-true"
    clip: float | None = None
    profile: bool = False
    folder: bool = True
    load: str | None = None
    save: str | None = None
    kill: int | None = None
    answer: str = ""
    seed: int = field(default=0)


def make_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if name == "adamw":
        return torch.optim.AdamW(params, **options)
    if name == "adamw_fused":
        return torch.optim.AdamW(params, fused=True, **options)
    if name == "bnb_adamw8bit":
        import bitsandbytes as bnb

        return bnb.optim.AdamW8bit(params, **options)
    return {"adamw8bit": memopt.AdamW8bit, "gefen": memopt.Gefen}[name](params, **options)


class Model(pl.LightningModule):
    """A Llama that is built without memory and initialised shard by shard; it shards itself only for plain FSDP2."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        big = job.part in ("speed", "kill", "resume") and job.device == "cuda"
        torch.manual_seed(0)
        with torch.device("meta" if big else "cpu"):
            self.net = Llama(**job.shape)

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if self.job.method != "fsdp2" or isinstance(self.net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with loss_at_head(self.net.lm_head, batch[:, 1:].contiguous()):
            return self.net(batch[:, :-1])

    def train_dataloader(self) -> Any:
        """Batch i is the same set of sequences for any number of ranks."""
        job, rank = self.job, int(os.environ["RANK"])
        batches = []
        for tokens, step in itertools.product(job.tokens, range(job.steps)):
            generator = torch.Generator().manual_seed(step)
            size = (job.ranks * job.samples, tokens // job.samples + 1)
            whole = torch.randint(job.shape["vocab_size"], size, generator=generator)
            batches.append(whole[rank * job.samples : (rank + 1) * job.samples])
        return torch.utils.data.DataLoader(batches, batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.job.optimizer, self.parameters())

    def on_after_backward(self) -> None:
        if self.job.kill == self.global_step and int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------- in a rank


class Meter(pl.Callback):
    """Times steps by device events, counts bytes, and profiles the last step, for each number of tokens."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.marks: list[Any] = []
        self.received = 0
        self.profiler: Any = None
        self.losses: list[Tensor] = []
        self.results: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        step = batch_idx % self.job.steps
        if step == WARMUP and self.job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if step == self.job.steps - 1:
            self.received = 0
            if self.job.profile and self.job.device == "cuda":
                torch.cuda.synchronize()
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self.profiler.start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().float())
        if self.job.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        if batch_idx % self.job.steps == self.job.steps - 1:
            self.results.append(self.result(trainer, module))
            self.marks = []

    def result(self, trainer: Any, module: nn.Module) -> dict[str, Any]:
        """Of the steps with one number of tokens."""
        plan = getattr(getattr(trainer.strategy, "updater", None), "plan", {})
        result: dict[str, Any] = {"hidden": self.hidden(), "step_ms": self.step_ms(), "received": self.received}
        result["predicted"] = predicted(module, plan, self.job)
        result["exchanged_layers"] = sum(route == "exchange" for route, _ in plan.values())
        if self.job.device == "cuda":
            result["peak"] = torch.cuda.max_memory_allocated()
        return result | {"loss": float(self.losses[-1])}

    def count(self) -> None:
        """Stand in for the collectives that move gradients, ours and FSDP2's."""
        for name in ("all_gather", "all_to_all", "reduce_scatter"):
            setattr(exchange, name, self._counted(getattr(exchange, name), name))
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(torch.distributed, name):
                plain = getattr(torch.distributed, name)
                setattr(torch.distributed, name, self._counted(plain, "fsdp2_reduce_scatter"))

    def _counted(self, plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            out = kwargs.get("output", args[0] if args else None)
            others = self.job.ranks - 1
            if out is not None and out.device.type == self.job.device:
                self.received += out.nbytes * (others if "reduce" in name else others / self.job.ranks)
            return plain(*args, **kwargs)

        return collective

    def step_ms(self) -> list[float]:
        """Of the measured steps but the profiled one."""
        marks = self.marks[WARMUP - 1 : len(self.marks) - 1 if self.job.profile else None]
        if self.job.device == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]

    def hidden(self) -> float | None:
        """The part of the time in NCCL kernels during which others ran as well."""
        if self.profiler is None:
            return None
        torch.cuda.synchronize()
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                span = (event.time_range.start, event.time_range.end)
                spans["nccl" in event.name.lower()].append(span)
        talk, work = covered(spans[True]), covered(spans[False])
        return (talk + work - covered(spans[True] + spans[False])) / talk if talk else None


def covered(spans: Sequence[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def strategy_of(job: Job) -> Any:
    if job.method == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=job.ranks, tensor_parallel_size=1)
    return memopt.ForgeFSDPStrategy(
        rounding="nearest" if job.part == "equal" else "stochastic",
        route=job.route,  # type: ignore[arg-type]
        save_distributed_checkpoint=job.folder,
        timeout_seconds=120,
    )


def work(job: Job) -> None:
    """Train, and leave this rank's answer."""
    module, meter = Model(job), Meter(job)
    meter.count()
    trainer = pl.Trainer(
        strategy=strategy_of(job),
        accelerator="gpu" if job.device == "cuda" else "cpu",
        devices=job.ranks,
        precision=job.precision,  # type: ignore[arg-type]
        max_steps=job.steps * len(job.tokens),
        gradient_clip_val=job.clip,
        callbacks=[meter, *([Saver(job)] if job.kill is not None else [])],
        use_distributed_sampler=False,  # `train_dataloader` deals out the batches
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=job.load)
    answer: dict[str, Any] = {"step": trainer.global_step, "losses": [float(loss) for loss in meter.losses]}
    if job.part == "speed":
        answer["results"] = meter.results
    if job.part in ("equal", "resume"):
        answer["sums"] = fingerprint(trainer, module)
    if job.save:
        trainer.save_checkpoint(job.save)
    Path(f"{job.answer}.{trainer.global_rank}").write_text(json.dumps(answer))


class Saver(pl.Callback):
    """Saves one step before rank 1 is killed."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.job.kill is not None and self.job.save is not None
        if trainer.global_step == self.job.kill:
            trainer.save_checkpoint(self.job.save)


def predicted(module: nn.Module, plan: dict[str, tuple[str, int]], job: Job) -> int:
    """Bytes this rank receives of gradients: the plan's, and FSDP2's of what is not in it."""
    total = sum(moved for _, moved in plan.values())
    for name, param in module.named_parameters():
        if name not in plan and job.ranks > 1:
            shape = (param.shape[0], param.shape[1:].numel())
            total += reduce_bytes(shape, job.ranks, job.ranks, param.element_size())
    return total


def fingerprint(trainer: Any, module: nn.Module) -> dict[str, Any]:
    """Exact sums of bit patterns of the state, and some weights as numbers."""
    sums: dict[str, Any] = {}
    optimizer = trainer.optimizers[0]
    for name, param in module.named_parameters():
        whole = param.detach().full_tensor()
        sums[name] = whole.flatten()[:: max(1, whole.numel() // 64)].tolist()
        for key, value in optimizer.state[param].items():
            if isinstance(value, Tensor):
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                sums[f"{name}/{key}"] = int(value.contiguous().flatten().view(torch.uint8).long().sum())
    return sums


# ---------------------------------------------------------------- the driver


def run(job: Job, folder: Path) -> list[dict[str, Any]] | str:
    """Every rank's answer, or why there is none."""
    job.answer = str(folder / f"{time.time_ns()}")
    path = Path(job.answer + ".job")
    path.write_text(json.dumps(asdict(job)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    process = subprocess.Popen(
        [*command, "-m", "benchmarks.multigpu", "--worker", str(path)],
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
    answers = [Path(f"{job.answer}.{rank}") for rank in range(job.ranks)]
    if process.returncode or not all(path.exists() for path in answers):
        errors = [line for line in said.splitlines() if "Error: " in line and "ChildFailed" not in line]
        return (errors[0] if errors else said[-300:]).strip()
    return [json.loads(path.read_text()) for path in answers]


def equal(base: Callable[..., Job], ranks: int, folder: Path) -> Iterator[dict[str, Any]]:
    """N ranks against one, on the same global batches of `ranks` sequences."""
    make = partial(base, part="equal", precision="32-true", steps=20, shape=TINY | {"num_layers": 2})
    for clip in (None, 0.5):
        one = run(make(ranks=1, samples=ranks, tokens=(32 * ranks,), clip=clip), folder)
        for route in ("exchange", "reduce"):
            many = run(make(ranks=ranks, route=route, clip=clip), folder)
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
    ("fsdp2", "bnb_adamw8bit", "auto"),
    ("forge_fsdp", "adamw", "auto"),
    ("forge_fsdp", "adamw", "exchange"),
    ("forge_fsdp", "adamw", "reduce"),
    ("forge_fsdp", "adamw8bit", "auto"),
    ("forge_fsdp", "gefen", "auto"),
)


def speed(base: Callable[..., Job], ranks: int, folder: Path, shape: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Every method at both sizes; AdamW with clipping as well."""
    sizes = [min(tokens, shape["max_seq_len"]) for tokens in (512, 2048)]
    make = partial(base, part="speed", ranks=ranks, shape=shape, tokens=sizes, profile=True)
    for method, optimizer, route in METHODS:
        for clip in (None, 1.0) if optimizer in ("adamw", "adamw_fused") and route == "auto" else (None,):
            row = {"part": "speed", "ranks": ranks, "method": method, "optimizer": optimizer, "route": route}
            row["clip"] = clip
            answers = run(make(method=method, optimizer=optimizer, route=route, clip=clip), folder)
            if isinstance(answers, str):
                yield row | {"result": f"failed: {answers}"}
                continue
            for phase, tokens in enumerate(sizes):
                results = [answer["results"][phase] for answer in answers]
                yield row | {
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


def resume(base: Callable[..., Job], ranks: int, folder: Path, shape: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Saved on all, loaded on one."""
    shape = shape | {"num_layers": 2}
    for optimizer in ("adamw", "adamw8bit", "gefen"):
        path = str(folder / f"{optimizer}.ckpt")
        make = partial(base, part="resume", shape=shape, optimizer=optimizer, steps=3)
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
    "part", "ranks", "method", "optimizer", "route", "tokens", "clip", "step_ms", "peak_gib", "received_mb",
    "predicted_mb", "exchanged_layers", "hidden", "loss", "difference", "seconds", "result", "device", "torch",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes; default: the GPUs there are")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=("equal", "speed", "resume", "kill"), nargs="*")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/multigpu.csv"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Job(**json.loads(options.worker.read_text())))
        return
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
        parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "equal": lambda: equal(base, ranks, folder),
            "resume": lambda: resume(base, ranks, folder, shape),
            "kill": lambda: kill(base, ranks, folder, shape),
            "speed": lambda: speed(base, ranks, folder, shape),
        }
        for name, part in parts.items():
            if options.only and name not in options.only:
                continue
            for row in part():
                print(json.dumps(row), flush=True)
                writer.writerow(row | place)
                file.flush()


if __name__ == "__main__":
    main()
