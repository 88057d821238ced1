"""Does Gefen learn what AdamW learns? A small Llama on text and a convolutional network on images, several seeds each.

``python -m benchmarks.gefen_learning`` trains every optimizer at the same learning rate, on a GPU or CPU, and writes
``benchmarks/results/gefen_learning.csv`` (one line per evaluation), ``gefen_learning.md`` (final losses) and
``docs/gefen_learning.png``. Runs that the CSV already has are not repeated; ``--jobs`` of them run at the same time, as
a small model leaves most of a GPU to others. Nothing is downloaded: the text is the standard library's, the images are
letters and digits in the fonts of matplotlib, a third of them kept for validation.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_memopt as memopt
from lightning_memopt.data import TextDataModule
from lightning_memopt.models.llama import Llama
from lightning_memopt.optim import AdamW8bit

ROOT = Path(__file__).resolve().parent.parent
FIELDS = (
    "task",
    "optimizer",
    "seed",
    "lr",
    "steps",
    "step",
    "val_loss",
    "bytes_per_param",
    "seconds",
    "device",
    "torch",
)
EVALUATIONS = 20


# --------------------------------------------------------------------------------------------------------------- tasks
@dataclass
class Task:
    """Something to learn.

    Attributes:
        net: Makes the model; the seed is set before.
        batches: Training batches (inputs, targets) without end, from a seed.
        validation: Fixed batches.
        lr: Learning rate that suits AdamW.
    """

    net: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    validation: list[tuple[Tensor, Tensor]]
    lr: float


def text(small: bool, device: str) -> Task:
    """Next-byte prediction."""
    length, size = (64, 4) if small else (256, 32)
    data = TextDataModule(seq_len=length)
    data.setup("fit")
    assert data._train is not None and data._val is not None
    train, val = (windows.tokens.to(device) for windows in (data._train, data._val))

    def windows(tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        start = torch.randint(len(tokens) - length - 1, (size, 1), generator=generator)
        window = tokens[(start + torch.arange(length + 1)).to(device)].long()
        return window[:, :-1], window[:, 1:]

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield windows(train, generator)

    fixed = torch.Generator().manual_seed(0)
    validation = [windows(val, fixed) for _ in range(2 if small else 32)]
    width, layers = (64, 2) if small else (384, 6)
    return Task(
        partial(Llama, hidden_size=width, num_layers=layers, num_heads=width // 64 * 2), batches, validation, 1e-3
    )


CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
FAMILIES = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmr10", "cmss10", "cmtt10", "cmb10", "cmti10")


@cache
def glyphs() -> Tensor:
    """Characters in all fonts: [fonts, characters, 32, 32] in [0, 1]."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts/ttf"
    files = sorted(
        file for file in folder.glob("*.ttf") if file.stem.startswith(FAMILIES) and "Display" not in file.stem
    )
    images = np.zeros((len(files), len(CHARACTERS), 32, 32), np.float32)
    for i, file in enumerate(files):
        font = ImageFont.truetype(str(file), 22)
        for j, character in enumerate(CHARACTERS):
            image = Image.new("L", (32, 32))
            ImageDraw.Draw(image).text((16, 16), character, fill=255, font=font, anchor="mm")
            images[i, j] = np.asarray(image) / 255
    return torch.from_numpy(images)


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def convolutional(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1),
        Residual(width, width, 2),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, len(CHARACTERS)),
    )


def images(small: bool, device: str) -> Task:
    """Which character it is, turned, moved, scaled and under noise; every third font is for validation."""
    fonts = glyphs()
    held_out = torch.arange(len(fonts)) % 3 == 2
    size = 16 if small else 128

    def draw(source: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        font = torch.randint(len(source), (size,), generator=generator)
        label = torch.randint(len(CHARACTERS), (size,), generator=generator)
        turn, scale, dx, dy = torch.rand(4, size, generator=generator) - 0.5
        turn, scale = turn * 0.7, torch.exp(scale * 0.6)
        cos, sin = torch.cos(turn) * scale, torch.sin(turn) * scale
        affine = torch.stack([cos, -sin, dx * 0.4, sin, cos, dy * 0.4], 1).view(size, 2, 3)
        image = source[font, label][:, None]
        image = F.grid_sample(image, F.affine_grid(affine, list(image.shape), align_corners=False), align_corners=False)
        image = image + 0.3 * torch.randn(image.shape, generator=generator)
        return image.to(device), label.to(device)

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield draw(fonts[~held_out], generator)

    fixed = torch.Generator().manual_seed(0)
    validation = [draw(fonts[held_out], fixed) for _ in range(2 if small else 32)]
    return Task(partial(convolutional, 8 if small else 64), batches, validation, 1e-3)


TASKS = {"text": text, "images": images}


@cache
def make_task(name: str, small: bool, device: str) -> Task:
    """One of `TASKS`, once in each process."""
    return TASKS[name](small, device)


# ---------------------------------------------------------------------------------------------------------- optimizers
def bitsandbytes(params: list[nn.Parameter], **options: float) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit as TheirAdamW8bit

    return TheirAdamW8bit(params, **options)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Gefen": memopt.Gefen,
    "Gefen, table": partial(memopt.Gefen, codebook="table"),
    "Gefen, blocks of 64": partial(memopt.Gefen, block=64),
    "AdamW8bit": AdamW8bit,
    "bitsandbytes AdamW8bit": bitsandbytes,
}


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state per parameter."""

    def tensors(value: object) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            for item in value.values():
                yield from tensors(item)

    storages = {t.untyped_storage().data_ptr(): t for state in optimizer.state.values() for t in tensors(state)}
    total = sum(t.numel() * t.element_size() for t in storages.values())
    return total / sum(p.numel() for group in optimizer.param_groups for p in group["params"])


# ------------------------------------------------------------------------------------------------------------ training
def train(name: str, optimizer_name: str, seed: int, steps: int, small: bool, device: str) -> list[dict[str, object]]:
    """One run; cosine schedule with a short warm-up, bf16 autocast on a GPU."""
    task = make_task(name, small, device)
    lr = task.lr
    torch.manual_seed(seed)
    net = task.net().to(device)
    optimizer = OPTIMIZERS[optimizer_name](list(net.parameters()), lr=lr, weight_decay=0.1)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * np.cos(np.pi * min(1.0, step / steps))),
    )
    autocast = partial(torch.autocast, device, torch.bfloat16, enabled=device == "cuda")

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        with autocast():
            logits = net(batch[0])
        return F.cross_entropy(logits.float().flatten(0, -2), batch[1].flatten())

    rows: list[dict[str, object]] = []
    batches, start = task.batches(seed), time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_of(next(batches)).backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // EVALUATIONS) == 0 or step == steps:
            net.eval()
            with torch.no_grad():
                loss = torch.stack([loss_of(batch) for batch in task.validation]).mean().item()
            net.train()
            values = (name, optimizer_name, seed, lr, steps, step, loss, round(state_bytes(optimizer), 4))
            hardware = torch.cuda.get_device_name() if device == "cuda" else "CPU"
            seconds = round(time.perf_counter() - start, 2)
            rows.append(dict(zip(FIELDS, (*values, seconds, hardware, torch.__version__), strict=True)))
    return rows


# ------------------------------------------------------------------------------------------------------------- results
def read(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open())) if file.exists() else []


def table(rows: list[dict[str, str]]) -> str:
    """Final validation losses: mean and standard deviation over seeds, and distance from AdamW's mean."""
    lines = ["| task | optimizer | bytes of state per parameter | final validation loss | against AdamW | seeds |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    final = [row for row in rows if row["step"] == row["steps"]]
    for task in dict.fromkeys(row["task"] for row in final):
        losses = {
            name: [float(row["val_loss"]) for row in final if (row["task"], row["optimizer"]) == (task, name)]
            for name in OPTIMIZERS
        }
        for name, values in losses.items():
            if not values:
                continue
            size = next(row["bytes_per_param"] for row in final if (row["task"], row["optimizer"]) == (task, name))
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
            change = f"{mean(values) / mean(losses['AdamW']) - 1:+.2%}" if losses["AdamW"] else ""
            lines.append(
                f"| {task} | {name} | {float(size):.3f} | {mean(values):.4f}{spread} | {change} | {len(values)} |"
            )
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, str]], file: Path) -> None:
    """Validation loss over steps, mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.6 * len(tasks), 3.8), layout="constrained", squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for i, name in enumerate(OPTIMIZERS):
            mine = [row for row in rows if (row["task"], row["optimizer"]) == (task, name)]
            steps = sorted({int(row["step"]) for row in mine})
            losses = [mean(float(row["val_loss"]) for row in mine if int(row["step"]) == step) for step in steps]
            if mine:
                axis.plot(steps, losses, label=name, color=f"C{i}", linestyle="--" if i else "-", linewidth=1.5)
        axis.set(title=task, xlabel="step", ylabel="validation loss", yscale="log")
        axis.legend(fontsize=8)
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU, for each run")
    parser.add_argument("--small", action="store_true", help="tiny models and batches, to try the script")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--plots", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.results.mkdir(parents=True, exist_ok=True)
    file = args.results / "gefen_learning.csv"
    done = {(row["task"], row["optimizer"], int(row["seed"])) for row in read(file)}
    # Seed by seed, so that what is stopped early still compares all optimizers.
    cells = [(name, opt, seed) for seed in range(args.seeds) for name in args.tasks for opt in args.optimizers]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, context, initializer=torch.set_num_threads, initargs=(args.threads,)) as pool:
        waiting = {
            pool.submit(train, *cell, args.steps, args.small, device): cell for cell in cells if cell not in done
        }
        for future in as_completed(waiting):
            name, optimizer, seed = waiting[future]
            try:
                rows = future.result()
            except ImportError as error:
                print(f"{optimizer}, seed {seed}: {error}; left out")
                continue
            with file.open("a", newline="") as stream:
                writer = csv.DictWriter(stream, FIELDS)
                if stream.tell() == 0:
                    writer.writeheader()
                writer.writerows(rows)
            last = rows[-1]
            print(f"{name}, {optimizer}, seed {seed}: {last['val_loss']:.4f} in {last['seconds']} s", flush=True)
    rows = read(file)
    (args.results / "gefen_learning.md").write_text(table(rows))
    plot(rows, args.plots / "gefen_learning.png")
    print(table(rows))


if __name__ == "__main__":
    main()
