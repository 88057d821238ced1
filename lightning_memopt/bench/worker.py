"""The process that trains with one method through a real Trainer and sends back what it measured."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_memopt.bench.job import Job, Row, phases
from lightning_memopt.bench.methods import METHODS, NotInstalledError
from lightning_memopt.bench.recorder import Recorder
from lightning_memopt.data import RandomTokens
from lightning_memopt.errors import MemOptError, UnsupportedError
from lightning_memopt.run_config import RunConfig

# Messages of the pipe: (kind, row or None).
ROW, FAILED, DONE = "row", "failed", "done"


def work(connection: Connection, job: Job) -> None:
    """Read the config, wait for the word to start, train, and leave the process.

    The parent starts the next process while the current one trains, so that its imports cost no time; it touches the
    GPU only once it may.
    """
    os.makedirs(os.path.dirname(job.log), exist_ok=True)
    with open(job.log, "w") as log:  # noqa: SIM117
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            _work(connection, job)


def _work(connection: Connection, job: Job) -> None:
    def leave(error: BaseException | None, tokens: int | None) -> None:
        if error is None:
            connection.send((DONE, None))
        else:
            import traceback

            traceback.print_exception(error)
            connection.send((FAILED, Row(tokens=tokens, status=explain(error))))
        connection.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    try:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        config = RunConfig.read(job.config)
        connection.recv()
        replays = "cuda_graph" in (METHODS[job.method].forge or {})
        train(config, job, Recorder(phases(job), lambda row: connection.send((ROW, row)), leave, replays))
    except BaseException as error:
        leave(error, None)


def train(config: RunConfig, job: Job, recorder: Recorder) -> None:
    """Train the config's model as the job says, with the recorder watching.

    A step's tokens are those of all its micro-batches.

    Raises:
        MemOptError: The config's data is not `RandomTokens`, whose length can be chosen; or its batch size times the
            micro-batches is no divisor of the tokens.
        UnsupportedError: Gradients accumulate, but the method updates in every backward pass.
    """
    method = METHODS[job.method]
    strategy = method.strategy(config.trainer.strategy)
    pl.seed_everything(0, verbose=False)  # the same weights for every method
    module, data = config.build(job.device)
    if not isinstance(data, RandomTokens):
        raise MemOptError("memopt bench chooses the tokens per step: set data to lightning_memopt.data.RandomTokens.")
    method.install(module)
    micro_batches = config.trainer.accumulate_grad_batches
    if method.hooks and micro_batches > 1:
        raise UnsupportedError("hooks that step in every backward pass accumulate nothing over micro-batches.")
    trainer = pl.Trainer(
        accelerator="gpu" if job.device == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision=config.trainer.precision,
        accumulate_grad_batches=micro_batches,
        max_epochs=1,
        callbacks=[*method.callbacks(), recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **method.trainer,
    )
    batches: Any = []
    for phase in recorder.phases:
        sequences = data.batch_size * micro_batches
        if phase.tokens % sequences:
            raise MemOptError(f"{phase.tokens} tokens are no whole number of {sequences} sequences.")
        batch = data.batch(module.vocab_size, phase.tokens // sequences)  # type: ignore[arg-type]
        batches += [batch] * micro_batches * (phase.warmup + phase.steps)
    trainer.fit(module, DataLoader(batches, batch_size=None))


def explain(error: BaseException) -> str:
    """Why a method has no numbers, in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, NotInstalledError):
        return str(error)
    words = " ".join(str(error).split())
    if isinstance(error, UnsupportedError):
        return f"refused: {words}"
    return f"failed: {type(error).__name__}: {words}"[:300]
