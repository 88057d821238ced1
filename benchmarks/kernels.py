"""One layer's weight gradient and optimizer step: the fused kernel, two kernels, torch, and the limit.

    python -m benchmarks.kernels [--output benchmarks/results/kernels_h200.csv] [--layers 4096x4096 ...]

Every figure is the median over rounds in which all columns of a row take turns, so that clocks and heat are shared; the
calls are replayed from a CUDA graph, so launch overhead on the host is in none of them. All are on bf16 weights with
random operands. Columns, in milliseconds:

    matmul   cuBLAS dW alone
    limit    the larger of that and the bytes that the step must move (weight and moments, in and out) at the speed of a
             large copy, measured in the same run
    torch    cuBLAS dW, then torch's fused optimizer; empty where there is none. For AdamW8bit bitsandbytes' update,
             which no graph records: there, layers of less than 0.1 ms show launch overhead
    flat     cuBLAS dW, then our own kernel on the stored gradient
    fused    ours in one kernel
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from lightning_memopt.kernels import Update, flat, fused_hopper, gpu, tuning
from lightning_memopt.optim import AdamW8bit, Gefen, Lion
from lightning_memopt.rules import rule_for

LAYERS = ["4096x4096", "14336x4096", "4096x14336", "1024x4096", "128256x4096"]
TOKENS = [512, 2048, 8192]
BF16, F32 = torch.bfloat16, torch.float32
# Name: class, options, dtype of dense moments.
RULES: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {
    "AdamW bf16 moments": (torch.optim.AdamW, {"betas": (0.9, 0.95), "weight_decay": 0.1}, BF16),
    "AdamW float32 moments": (torch.optim.AdamW, {"betas": (0.9, 0.95), "weight_decay": 0.1}, F32),
    "AdamW8bit": (AdamW8bit, {"betas": (0.9, 0.95), "weight_decay": 0.1}, F32),
    "Gefen": (Gefen, {"betas": (0.9, 0.95), "weight_decay": 0.1}, F32),
    "Lion bf16 momentum": (Lion, {"weight_decay": 0.1}, BF16),
    "SGD": (torch.optim.SGD, {}, BF16),
}
COLUMNS = ("matmul", "torch", "flat", "fused")


def make_update(name: str, weight: torch.Tensor) -> Update:
    """An update of the named rule on `weight`, with a state that has seen a step."""
    cls, options, dtype = RULES[name]
    param = torch.nn.Parameter(weight)
    optimizer = cls([param], lr=1e-5, **options)
    rule, group = rule_for(optimizer), optimizer.param_groups[0]
    storage = rule.storage(param, group, dtype)
    state = rule.init_state(param, group, storage)
    scalars = {"scale": 1.0, "clip": math.inf, **rule.common_scalars(group), **rule.scalars(group, state)}
    values = list(scalars.values())
    return Update(
        name, weight, state, rule, rule.tile(group), storage, scalars, 12345, "stochastic",
        row=torch.tensor(values, dtype=F32, device="cuda"),
        row_key=torch.tensor(12345, dtype=torch.int32, device="cuda"),
        nonfinite=torch.zeros((), dtype=torch.int32, device="cuda"),
    )  # fmt: skip


def theirs(name: str, weight: torch.Tensor, grad: torch.Tensor) -> Callable[[], object] | None:
    """The same step by torch's fused optimizer or bitsandbytes, if they have one for this rule and these dtypes."""
    cls, options, dtype = RULES[name]
    param = torch.nn.Parameter(weight.clone())
    param.grad = grad
    if cls in (torch.optim.AdamW, torch.optim.SGD) and dtype == BF16:
        capturable = {"capturable": True} if cls is torch.optim.AdamW else {}
        return cls([param], lr=1e-5, fused=True, **capturable, **options).step
    if cls is AdamW8bit:
        try:
            import bitsandbytes
        except ImportError:
            return None
        optimizer = bitsandbytes.optim.AdamW8bit([param], lr=1e-5, **options)
        optimizer.step()
        # Without the wait for the device that ends its `step`.
        return lambda: optimizer.update_step(optimizer.param_groups[0], param, 0, 0)
    return None


# Launches on a stream of its own choice, which a graph does not record.
EAGER = {"AdamW8bit"}


def repeated(call: Callable[[], object], graph: bool, duration: float = 4.0) -> tuple[Callable[[], object], int]:
    """About so many milliseconds of calls, as a graph or as a loop, and their number."""
    call()
    count = max(1, min(200, round(duration / tuning.milliseconds(call))))

    def loop() -> None:
        for _ in range(count):
            call()

    return (tuning.recorded(call, count) if graph else loop), count


def interleaved(calls: dict[str, Callable[[], object]], rounds: int, eager: bool) -> dict[str, float]:
    """Median milliseconds of each call; the column "torch" without a graph if `eager`."""
    repeats = [repeated(call, not (eager and name == "torch")) for name, call in calls.items()]
    return dict(zip(calls, tuning.interleaved(repeats, rounds), strict=True))


def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written, of a copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # Not from a graph, where copies are slower.
    times = [tuning.milliseconds(lambda: target.copy_(source)) for _ in range(5)]
    return 2 * source.nbytes / statistics.median(times)


def board() -> dict[str, Any]:
    """SM clock and power of the board while it is busy; empty without NVIDIA's management library."""
    try:
        return {"sm_mhz": torch.cuda.clock_rate(), "watts": round(torch.cuda.power_draw() / 1000)}
    except Exception:  # whatever the optional library raises
        return {}


def measure(rows: int, columns: int, tokens: int, name: str, bandwidth: float, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    weight = torch.randn(rows, columns, device="cuda", dtype=BF16)
    dy = torch.randn(tokens, rows, device="cuda", dtype=BF16)
    x = torch.randn(tokens, columns, device="cuda", dtype=BF16)
    grad = torch.empty_like(weight)
    update = make_update(name, weight)
    flat_update = tuning.copy(update)
    route = tuning.choose(update, dy, x, fused=True)

    def matmul() -> None:
        torch.mm(dy.t(), x, out=grad)

    matmul()
    calls: dict[str, Callable[[], object]] = {
        "matmul": matmul,
        "flat": lambda: (matmul(), flat.apply_gradient(flat_update, grad)),
        "fused": lambda: gpu.run(route, update, dy, x),
    }
    if (step := theirs(name, weight, grad)) is not None:
        calls["torch"] = lambda: (matmul(), step())
    times = interleaved(calls, rounds, name in EAGER)
    state = sum(update.state[entry].nbytes for storage in update.storage for entry in storage.entries())
    limit = max(times["matmul"], 2 * (weight.nbytes + state) / bandwidth)
    for _ in range(max(1, round(30 / times["fused"]))):
        calls["fused"]()
    busy = board()
    torch.cuda.synchronize()
    result: dict[str, Any] = {"layer": f"{rows}x{columns}", "tokens": tokens, "rule": name, "limit": limit}
    result |= {column: times.get(column, "") for column in COLUMNS}
    result["fused/limit"] = times["fused"] / limit
    result["torch/fused"] = times["torch"] / times["fused"] if "torch" in times else ""
    result["flat/fused"] = times["flat"] / times["fused"]
    result["default_route"] = str(tuning.choose(update, dy, x))
    return {key: f"{value:.4f}" if isinstance(value, float) else value for key, value in (result | busy).items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="CSV to write")
    parser.add_argument("--layers", nargs="+", default=LAYERS, metavar="ROWSxCOLUMNS")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if not fused_hopper.available(torch.device("cuda", torch.cuda.current_device())):
        raise SystemExit("the fused kernel that this compares needs a Hopper GPU")
    bandwidth = copy_bandwidth()
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    about += f"; copy {bandwidth / 1e9:.2f} TB/s"
    print(about)
    table = []
    for layer in arguments.layers:
        rows, columns = (int(size) for size in layer.split("x"))
        for tokens in arguments.tokens:
            for name in arguments.rules:
                table.append(measure(rows, columns, tokens, name, bandwidth, arguments.rounds))
                print("  ".join(str(value) for value in table[-1].values()), flush=True)
                torch.cuda.empty_cache()
                if arguments.output:
                    write(arguments.output, f"{about}; python -m benchmarks.kernels", table)


def write(path: Path, about: str, table: list[dict[str, Any]]) -> None:
    """The whole table anew, so that a run that is cut short keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {key: None for row in table for key in row}
    with path.open("w", newline="") as file:
        file.write(f"# {about}\n")
        writer = csv.DictWriter(file, list(fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
