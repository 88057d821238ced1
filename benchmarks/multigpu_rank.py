"""One rank of jobs of `benchmarks.multigpu`: trains as each says, and leaves what it measured in a file."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

import lightning_memopt as memopt
from lightning_memopt.backward import exchange
from lightning_memopt.backward.outbox import Outbox
from lightning_memopt.backward.traffic import reduce_bytes
from lightning_memopt.backward.windows import Window, held
from lightning_memopt.models.linear_cross_entropy import loss_at_head
from lightning_memopt.models.llama import Llama
from lightning_memopt.strategies import sharding
from lightning_memopt.strategies.gathering import by_copies

WARMUP, MEASURED = 4, 6
# Bytes that a job may leave on a GPU.
LEFT = 1 << 28
# In the names of what goes on between devices: NCCL's kernels, copies, and waiting for each other before these.
TALK = ("nccl", "Memcpy PtoP", "symmetric_memory")


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
        clips: The same for each number of tokens, of jobs that take turns.
        load, save: Checkpoints.
        kill: Step at which rank 1 kills itself in backward.
        traces: Folder for a Chrome trace of the last step, host and device, by rank and number of tokens.
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
    clips: Sequence[float | None] = ()
    profile: bool = False
    folder: bool = True
    load: str | None = None
    save: str | None = None
    kill: int | None = None
    traces: str | None = None
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
        big = job.part in ("speed", "turns", "kill", "resume") and job.device == "cuda"
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


class Traffic:
    """Counts the bytes of gradients that this rank receives, from when it is made.

    Not a part of `Meter`: trainers give callbacks references to the module, which would stay in memory.
    """

    def __init__(self, device: str, ranks: int) -> None:
        self.device, self.ranks, self.received = device, ranks, 0
        Outbox.take = self._counted_copies(Outbox.take)  # type: ignore[method-assign]
        for name in ("all_gather", "all_to_all", "reduce_scatter"):
            setattr(exchange, name, self._counted(getattr(exchange, name), name))
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(torch.distributed, name):
                plain = getattr(torch.distributed, name)
                setattr(torch.distributed, name, self._counted(plain, "fsdp2_reduce_scatter"))

    def _counted(self, plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            out = kwargs.get("output", args[0] if args else None)
            others = self.ranks - 1
            if out is not None and out.device.type == self.device:
                self.received += out.nbytes * (others if "reduce" in name else others / self.ranks)
            return plain(*args, **kwargs)

        return collective

    def _counted_copies(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def take(outbox: Outbox, window: Window, into: Sequence[Tensor], out_of: Sequence[Tensor]) -> Any:
            mine = window.parts[window.rank].untyped_storage().data_ptr()
            self.received += sum(part.nbytes for part in out_of if part.untyped_storage().data_ptr() != mine)
            return plain(outbox, window, into, out_of)

        return take


class Meter(pl.Callback):
    """Times steps by device events, and profiles and counts the last step, for each number of tokens."""

    def __init__(self, job: Job, traffic: Traffic) -> None:
        self.job, self.traffic = job, traffic
        self.marks: list[Any] = []
        self.profiler: Any = None
        self.losses: list[Tensor] = []
        self.results: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        step = batch_idx % self.job.steps
        if step == WARMUP and self.job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if step == self.job.steps - 1:
            self.traffic.received = 0
            if self.job.profile and self.job.device == "cuda":
                torch.cuda.synchronize()
                kinds = [torch.profiler.ProfilerActivity.CUDA]
                if self.job.traces:
                    kinds.append(torch.profiler.ProfilerActivity.CPU)
                self.profiler = torch.profiler.profile(activities=kinds)
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
        result: dict[str, Any] = {"hidden": self.hidden(), "step_ms": self.step_ms(), "received": self.traffic.received}
        result["predicted"] = predicted(module, plan, self.job)
        result["by"] = way(module)
        result["exchanged_layers"] = sum(route == "exchange" for route, _ in plan.values())
        if self.job.device == "cuda":
            result["peak"] = torch.cuda.max_memory_allocated() + held(module.device)
        return result | {"loss": float(self.losses[-1])}

    def step_ms(self) -> list[float]:
        """Of the measured steps but the profiled one."""
        marks = self.marks[WARMUP - 1 : len(self.marks) - 1 if self.job.profile else None]
        if self.job.device == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]

    def trace_path(self) -> str:
        """A file for the trace of this rank's last step."""
        job = self.job
        tokens = job.tokens[len(self.results)]
        words = [job.method, job.optimizer, job.route, f"{tokens}tokens", *(["clipped"] if job.clip else [])]
        folder = Path(job.traces or ".")
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder / f"{'-'.join(words)}.{os.environ['RANK']}.json.gz")

    def hidden(self) -> float | None:
        """The part of the time in kernels and copies between devices during which others ran as well."""
        if self.profiler is None:
            return None
        torch.cuda.synchronize()
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        if self.job.traces:
            profiler.export_chrome_trace(self.trace_path())
        spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                span = (event.time_range.start, event.time_range.end)
                spans[any(word in event.name for word in TALK)].append(span)
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


def make_trainer(job: Job, callbacks: list[pl.Callback]) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy_of(job),
        accelerator="gpu" if job.device == "cuda" else "cpu",
        devices=job.ranks,
        precision=job.precision,  # type: ignore[arg-type]
        max_steps=job.steps * len(job.tokens),
        gradient_clip_val=job.clip,
        callbacks=callbacks,
        use_distributed_sampler=False,  # `train_dataloader` deals out the batches
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def work(job: Job, traffic: Traffic) -> None:
    """Train, and leave this rank's answer."""
    module, meter = Model(job), Meter(job, traffic)
    trainer = make_trainer(job, [meter, *([Saver(job)] if job.kill is not None else [])])
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


def way(module: nn.Module) -> str:
    """How weights are gathered: by copies if those of all units are, as what runs beside updates follows from it."""
    return "copies" if by_copies(sharding.groups(module)) else "collectives"


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


def jobs_of(path: str) -> list[Job]:
    return [Job(**job) for job in json.loads(Path(path).read_text())]


def main(jobs: Sequence[Job]) -> None:
    """Run one after the other; what one leaves behind must not count as the next one's memory."""
    traffic = Traffic(jobs[0].device, jobs[0].ranks)
    for job in jobs:
        work(job, traffic)
        gc.collect()
        if job.device == "cuda":
            torch.cuda.empty_cache()
            left = torch.cuda.memory_allocated() + held(torch.device("cuda", torch.cuda.current_device()))
            if left > LEFT:
                raise RuntimeError(f"{left / 2**30:.2f} GiB are left behind by {job.method}, {job.optimizer}")


if __name__ == "__main__":
    main(jobs_of(sys.argv[1]))
