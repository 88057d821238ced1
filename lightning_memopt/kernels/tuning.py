"""Which route is the fastest for a layer: a table, and measurements that overrule it.

The table holds what was best on one H200 (`docs/kernels.md`), so that a first run is already good. `tune` times the
routes on copies of a layer's weight and state, never on the live ones, and keeps the winner on disk, per GPU and
package version; with ``MEMOPT_TUNE=1`` in the environment, `choose` does so when it meets a layer for the first time.
Without it nothing is timed, and the same run takes the same routes, bit for bit.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lightning_memopt.kernels.fused_hopper import (
    FACTORS,
    SHARED,
    SHELF,
    STAGE,
    TOKENS,
    Config,
    bytes_per_slot,
    can_hand_over,
)
from lightning_memopt.kernels.update import Update

Route = Config | Literal["two_pass", "portable"]
TWO_PASS: Literal["two_pass"] = "two_pass"
PORTABLE: Literal["portable"] = "portable"

# Up to so many tokens a layer's weight costs more time than its operands.
FEW = 1024
# Weights of a layer that are copied for a measurement: its first rows.
SAMPLE = 1 << 26
ROUNDS, CALLS = 5, 4


def choose(update: Update, dy: Tensor, x: Tensor, *, fused: bool = False) -> Route:
    """The route for an update that the Hopper kernel supports; never `two_pass` if `fused`."""
    config, found = default(update, len(x)), _measured(update.weight.device).get(_key(update, dy, x))
    if found is None and os.environ.get("MEMOPT_TUNE") == "1" and not torch.cuda.is_current_stream_capturing():
        found = tune(update, dy, x)
    route = found if found is not None else config
    return config if fused and route == TWO_PASS else route


def default(update: Update, tokens: int) -> Config:
    """The Hopper kernel's configuration according to the table."""
    rows, columns = update.weight.shape
    wide = columns >= 2 * rows
    many = 4 if tokens > 4 * FEW and len(update.storage) > 0 else 2
    group = many if tokens > FEW else 8 if wide else 1
    handed = can_hand_over(update) and (tokens <= FEW or (tokens <= 2 * FEW and not wide))
    return _table(bytes_per_slot(update, handed), tokens <= FEW, group, handed)


@cache
def _table(size: int, few: bool, group: int, handed: bool) -> Config:
    """The configuration for chunks of `size` bytes of weight and moments.

    At few tokens the weight's traffic decides, so memory goes to four chunks in flight; at many, to deeper operand
    stages. Where these are fewer than five, they are better halved: a finer ring is refilled earlier.

    Bands of one row of tiles stream the weight best; higher ones share the operands of many tokens, which pays in step
    with the moments that are moved meanwhile, and those of wide layers, of which every row of tiles reads all of x.

    The longest update is handed over to more warps, where few tokens leave the matmul no time to hide it.
    """
    fitting = _fitting(size, handed)
    if handed:
        return Config(3, fitting[3], 0, group, handed=True) if few else _many_halves(size, group)
    for stages in sorted(fitting, reverse=True):
        slots = fitting[stages]
        if slots >= 4 or stages <= (4 if few else 5):
            break
    config = Config(stages, slots, 0, group)
    return config if few or stages >= 5 else _halved(config)


def _halved(config: Config) -> Config:
    """Twice as many stages of half as many tokens."""
    return replace(config, stages=2 * config.stages, tokens=TOKENS // 2)


def _many_halves(size: int, group: int) -> Config:
    """As many stages of half the tokens as leave room for three strips, for tiles that are handed over."""
    return Config((SHARED - SHELF - 3 * size) // (STAGE // 2), 3, 0, group, TOKENS // 2, handed=True)


def candidates(update: Update, tokens: int) -> list[Config]:
    """Configurations of the Hopper kernel worth a try, the table's first."""
    first = default(update, tokens)
    others = [
        Config(stages, slots, lag, group, handed=handed)
        for handed in (False, True)[: 1 + can_hand_over(update)]
        for stages, slots in _fitting(bytes_per_slot(update, handed), handed).items()
        for lag in range(1 if handed else min(2, slots - 1))
        for group in (1, 2, 4, 8)
    ]
    others += [_halved(config) for config in others if config.stages < 5 and not config.lag]
    return [first, *(config for config in others if config != first)]


def _fitting(size: int, handed: bool) -> dict[int, int]:
    """How many chunks fit beside a number of operand stages, for numbers that leave room for two; eight are enough."""
    room = SHARED - (SHELF if handed else FACTORS)
    slots = {stages: (room - stages * STAGE) // size for stages in range(3, 7)}
    return {stages: min(8, count) for stages, count in slots.items() if count >= 2}


def tune(update: Update, dy: Tensor, x: Tensor) -> Route:
    """Time every route on copies of the layer's first rows and remember the fastest."""
    from lightning_memopt.kernels import gpu

    rows = min(len(update.weight), max(128, SAMPLE // update.weight.shape[1]))
    sample = copy(update.rows(0, rows))
    routes: list[Route] = [*candidates(update, len(x)), TWO_PASS]
    part = dy[:, :rows]
    calls = [partial(gpu.run, route, sample, part, x) for route in routes]
    times = interleaved([(recorded(call, CALLS), CALLS) for call in calls], ROUNDS)
    route = routes[times.index(min(times))]
    _remember(update.weight.device, _key(update, dy, x), route)
    return route


def copy(update: Update) -> Update:
    """The same update on copies of weight and state."""
    assert update.nonfinite is not None
    state = {
        key: value.clone() if isinstance(value, Tensor) and value.is_cuda else value
        for key, value in update.state.items()
    }
    return replace(update, weight=update.weight.clone(), state=state, nonfinite=update.nonfinite.clone(), memory=None)


def interleaved(repeated: list[tuple[Callable[[], object], int]], rounds: int) -> list[float]:
    """Median milliseconds of calls, timed in turns so that clocks and heat are shared fairly.

    Args:
        repeated: What makes a call several times, and how many.
        rounds: Turns of each.
    """
    times: list[list[float]] = [[] for _ in repeated]
    for _ in range(rounds):
        for (calls, count), samples in zip(repeated, times, strict=True):
            samples.append(milliseconds(calls) / count)
    return [statistics.median(samples) for samples in times]


@cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    # One, as the matmul library keeps memory for each stream that it meets.
    return torch.cuda.Stream(device)


def recorded(call: Callable[[], object], repeats: int) -> Callable[[], object]:
    """So many calls as a CUDA graph: the host takes longer for a launch than the GPU for a small layer."""
    stream = _recording_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(), call()  # what is compiled or remembered cannot be while a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, which load data, may allocate meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(repeats):
            call()
    return graph.replay


def milliseconds(call: Callable[[], object]) -> float:
    """GPU time of a call, right after another one."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _key(update: Update, dy: Tensor, x: Tensor) -> str:
    rows, columns = update.weight.shape
    tokens = 1 << (len(x) - 1).bit_length()  # to the next power of two
    types = [update.weight, *(update.state[storage.name] for storage in update.storage), x]
    names = "-".join(str(tensor.dtype).removeprefix("torch.") for tensor in types)
    return f"{rows}x{columns} {tokens} {update.tile} {names} {update.rounding}"


def _file(device: torch.device) -> Path:
    from lightning_memopt import __version__

    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "lightning_memopt" / __version__ / f"{torch.cuda.get_device_name(device).replace(' ', '_')}.json"


@cache
def _measured(device: torch.device) -> dict[str, Route]:
    """Routes found by `tune`, in this process or an earlier one."""
    try:
        saved = json.loads(_file(device).read_text())
        return {key: Config(**route) if isinstance(route, dict) else route for key, route in saved.items()}
    except (OSError, ValueError, TypeError):
        return {}  # no measurements yet, or a file that another version or a full disk left behind


def _remember(device: torch.device, key: str, route: Route) -> None:
    measured = _measured(device)
    measured[key] = route
    path = _file(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may write; each replaces the file whole.
        temporary = path.with_suffix(f".{os.getpid()}")
        saved = {k: asdict(r) if isinstance(r, Config) else r for k, r in measured.items()}
        temporary.write_text(json.dumps(saved, indent=1))
        temporary.replace(path)
    except OSError:
        pass  # a read-only home costs a measurement per process, no more
