"""Peak memory of a training step, by kind and for each way of training, before the run and without a GPU."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_memopt.data import RandomTokens, TextDataModule
from lightning_memopt.errors import MemOptError
from lightning_memopt.planning.live import ROUNDING
from lightning_memopt.planning.methods import METHODS, Groups, Holds, PlannedMethod, forged, stepped
from lightning_memopt.planning.result import RESERVE, Kinds, MethodPlan, Plan
from lightning_memopt.planning.trace import Route, Trace, trace
from lightning_memopt.rules import RULES
from lightning_memopt.run_config import WEIGHT_DTYPES, RunConfig
from lightning_memopt.strategies import sharding

DEFAULT_METHODS = (
    "adamw",
    "adamw_foreach",
    "bnb_adamw8bit",
    "forge_adamw",
    "forge_adamw8bit",
    "forge_gefen",
    "forge_adamw_smet",
    "forge_adamw8bit_smet",
    "forge_gefen_smet",
)
CONFIGURED = "configured"
LESS = (
    "This config does not fit. Less memory: another optimizer of the table; smaller batches; blocks that run again in "
    "backward, by --trainer.strategy lightning_memopt.ForgeStrategy (or ForgeFSDPStrategy) "
    """--trainer.strategy.init_args.checkpoint '["*.layers.*"]'."""
)


def plan(
    source: str | Path | RunConfig | pl.LightningModule,
    batch: Any = None,
    *,
    memory: str | int | None = None,
    methods: Sequence[str] | None = None,
    precision: str | None = None,
    world_size: int | None = None,
    accumulate_grad_batches: int | None = None,
    strategy: Any = None,
    optimizer: Optimizer | None = None,
) -> Plan:
    """Find the peak memory of a training step for several ways of training, without a GPU and without the weights.

    The module's own ``training_step`` and backward pass run on tensors without data, so any architecture works that
    does not branch on values.

    Args:
        source: A config as for ``memopt fit``, its file or read already, or a module.
        batch: A training batch for the module; only shapes and dtypes matter. A config's data module gives its own.
        memory: Of one device, in bytes or as "80GiB"; then each method is said to fit or not.
        methods: Names of `lightning_memopt.planning.methods.METHODS`; by default plain, 8-bit and fused optimizers.
        precision: The Trainer's; a config's own by default, else "32-true".
        world_size: Devices that shard the model. By default those of a config whose strategy shards, else 1.
        accumulate_grad_batches: Such batches in a step; a config's own by default, else 1.
        strategy: A `ForgeStrategy`, or "forge": its options, and a first line for the configuration itself. A config's
            own by default.
        optimizer: The optimizer that line is for; by default what the module's ``configure_optimizers`` makes.

    Raises:
        MemOptError: The module needs values or a Trainer, or a name is unknown.
    """
    with _quiet():
        limit = parse_memory(memory)
        return _plan(source, batch, limit, methods, precision, world_size, accumulate_grad_batches, strategy, optimizer)


def _plan(
    source: str | Path | RunConfig | pl.LightningModule,
    batch: Any,
    limit: int | None,
    methods: Sequence[str] | None,
    precision: str | None,
    world_size: int | None,
    micro_batches: int | None,
    strategy: Any,
    optimizer: Optimizer | None,
) -> Plan:
    config, notes = None, list[str]()
    if world_size is not None and world_size < 1:
        raise MemOptError(f"--world_size {world_size}: at least one device.")
    if isinstance(source, pl.LightningModule):
        if batch is None:
            raise MemOptError("plan(module, batch): a module needs a batch to run on.")
        module, name = on_meta(source, precision), type(source).__name__
    else:
        config = source if isinstance(source, RunConfig) else RunConfig.read(source)
        precision, name = precision or config.precision, config.path.stem
        module, data = config.build("meta")
        strategy = strategy if strategy is not None else config.trainer.strategy
        batch = batch if batch is not None else _first_batch(module, data, config)
        if world_size is None:
            world_size = _sharding(strategy, config)
            if world_size is None:
                notes.append(f"devices={config.trainer.devices} is taken as one device; say how many by --world_size.")
        micro_batches = micro_batches or config.trainer.accumulate_grad_batches
    precision, world_size, micro_batches = precision or "32-true", world_size or 1, micro_batches or 1
    vocab_size = getattr(module, "vocab_size", None)
    groups = _groups(module)
    chosen = {key: _known(key) for key in methods or DEFAULT_METHODS}
    clipped = config is not None and _clips_by_norm(config)
    if clipped:
        chosen = {key: method.clipped() for key, method in chosen.items()}
    own = _configured(module, config, strategy, optimizer)
    if own is not None:
        chosen = {CONFIGURED: own, **chosen}
    wrap = getattr(strategy, "wrap", "auto")
    run = partial(
        trace,
        module,
        batch,
        autocast=torch.bfloat16 if precision in ("bf16-mixed", "16-mixed") else None,
        checkpoint=getattr(strategy, "checkpoint", ()),
        vocab_size=vocab_size,
        ranks=world_size,
        wrap=wrap,
        way=getattr(getattr(strategy, "updater", None), "route", "auto"),
        micro_batches=micro_batches,
    )
    passes = {(method.route, method.wide) for method in chosen.values()}
    traces: dict[tuple[Route, bool], Trace] = {(route, wide): run(route, wide=wide) for route, wide in passes}
    count = _batch_size(batch)
    shards = _Shards(module, world_size, wrap)
    lines = []
    for key, method in chosen.items():
        holds = method.holds(module, groups)
        needs = partial(_peak, shards, traces[method.route, method.wide], holds)
        kinds, when = needs(1.0)
        fits = largest = None
        if limit is not None:
            fits = kinds.total + RESERVE <= limit
            largest = _largest(lambda size, needs=needs: needs(size / count)[0].total + RESERVE <= limit)
        lines.append(MethodPlan(key, _label(method.label, world_size), kinds, when, fits, largest))
    if own is not None and lines[0].fits is False:
        notes.append(LESS)
    parameters, size = sum(param.numel() for param in module.parameters()), (count, _tokens(batch))
    of_step = micro_batches, clipped
    return Plan(name, parameters, *size, precision, world_size, limit, tuple(lines), *of_step, tuple(notes))


def parse_memory(memory: str | int | None) -> int | None:
    """Bytes of "80GiB", "80 GB", "81920MiB" or a number."""
    if memory is None or isinstance(memory, int):
        return memory
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", memory, flags=re.IGNORECASE)
    size = 0
    if match is not None:
        number, prefix, binary = match.groups()
        base = 1024 if binary or not prefix else 1000
        size = int(float(number) * base ** " KMGT".index(prefix.upper() or " "))
    if size < 1 << 20:  # 80 is no number of bytes that anyone means
        raise MemOptError(f"--memory {memory}: write it like 80GiB.")
    return size


def on_meta(module: pl.LightningModule, precision: str | None) -> pl.LightningModule:
    """A copy of a module on the meta device, in the dtype the precision trains in; no weight is copied."""
    dtype = WEIGHT_DTYPES.get(precision or "")
    memo: dict[int, Any] = {}
    for param in module.parameters():
        memo[id(param)] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    twin = copy.deepcopy(module, memo)
    return twin.to(dtype) if dtype is not None else twin


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that Lightning prints for every Trainer."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Shards:
    """Bytes of the module's weights on one of `world_size` devices, and of what is gathered to run a block.

    Args:
        module: On the meta device.
        world_size: Devices that share it.
        wrap: Its blocks, see `lightning_memopt.strategies.sharding.find_blocks`.
    """

    def __init__(self, module: nn.Module, world_size: int, wrap: Sequence[str] | str) -> None:
        self.world_size = world_size
        self.all = _bytes([*module.parameters(), *module.buffers()])
        self.gathered = 0
        if world_size > 1:
            # The block at work and the one fetched ahead are whole, and so is the root.
            sizes = [_bytes(params) for params in sharding.parts(module, wrap)[:-1]]
            self.gathered = 2 * max(sizes, default=0) + self.all - sum(sizes)

    def share(self, size: int) -> int:
        """One device's part."""
        return math.ceil(size / self.world_size)

    @property
    def weights(self) -> int:
        """Resident, and gathered for the block at work."""
        return self.share(self.all) + self.gathered


def _peak(shards: _Shards, traced: Trace, holds: Holds, scale: float) -> tuple[Kinds, str]:
    run, end = traced.peak(scale), traced.end.scaled(scale)
    state = shards.share(holds.state)
    passes = Kinds(shards.weights, state, run.gradients + run.factors, run.activations, run.logits, 0)
    step = Kinds(
        shards.share(shards.all),
        state,
        end.gradients + end.factors,
        end.activations,
        end.logits,
        shards.share(holds.scratch),
    )
    return (passes, "forward and backward") if passes.total >= step.total else (step, "optimizer step")


def _largest(fits: Any) -> int:
    """The largest whole number that fits, 0 if none; fitting must be monotone."""
    low, high = 0, 1
    while fits(high) and high < 1 << 24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(-(-size // ROUNDING) * ROUNDING for size in storages.values())


def _groups(module: nn.Module) -> Groups:
    trainable = [param for param in module.parameters() if param.requires_grad]
    return [{"params": trainable}]


def _known(name: str) -> PlannedMethod:
    if name not in METHODS:
        raise MemOptError(f"Unknown method {name}. There are {', '.join(METHODS)}.")
    return METHODS[name]


def _batch_size(batch: Any) -> int:
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def _tokens(batch: Any) -> int | None:
    ids = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dtype == torch.int64]
    return max((leaf.numel() for leaf in ids), default=None)


def _first_batch(module: pl.LightningModule, data: Any, config: RunConfig) -> Any:
    """What the first training step would get; of text only the shape matters, so it is not read."""
    if isinstance(data, TextDataModule | RandomTokens):
        ids = torch.zeros(data.batch_size, data.seq_len, dtype=torch.int64)
        return {"input_ids": ids, "targets": ids}
    source = data if data is not None else module
    trainer = _trainer(config)
    trainer.strategy.connect(module)
    source.trainer = trainer
    try:
        if data is not None:
            data.prepare_data()
            data.setup("fit")
        loader = source.train_dataloader()
        return next(iter(loader))
    finally:
        source.trainer = None


def _trainer(config: RunConfig | None) -> pl.Trainer:
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    length = {}
    if config is not None:
        length = {key: getattr(config.trainer, key) for key in ("max_steps", "max_epochs")}
    return pl.Trainer(**options, **(length or {"max_steps": 1}))  # type: ignore[arg-type]


def _configured(
    module: pl.LightningModule, config: RunConfig | None, strategy: Any, optimizer: Optimizer | None
) -> PlannedMethod | None:
    """The run's own strategy and optimizer; None where neither a config nor an optimizer says."""
    if config is None and optimizer is None and strategy is None:
        return None
    if optimizer is None:
        optimizer = _own_optimizer(module, config)
    if optimizer is None:
        return None
    name = strategy if isinstance(strategy, str) else getattr(strategy, "strategy_name", "auto")
    route: Route = "stored"
    wide = False
    kind, options = type(optimizer), optimizer.defaults
    make = partial(_remake, kind, options)
    holds: Any = partial(stepped, make)
    if name.startswith("forge"):
        route = "deferred" if config is not None and _clips_by_norm(config) else "fused"
        density, wide = None, getattr(getattr(strategy, "updater", None), "state_dtype", "param") == "float32"
        for callback in (config.trainer.callbacks or []) if config is not None else []:
            density = getattr(callback, "density", density) if type(callback).__name__ == "SMET" else density
        holds = partial(forged, make, density=density, wide=wide)
    elif kind in RULES and kind.__module__.startswith("lightning_memopt"):
        holds = partial(forged, make)
    label = f"this config: {name if isinstance(name, str) else 'auto'}, {kind.__name__}"
    return PlannedMethod(label, route, holds, wide)


def _remake(kind: type[Optimizer], options: dict[str, Any], groups: Groups) -> Optimizer:
    if kind is torch.optim.AdamW and options.get("fused"):
        options = {**options, "fused": None, "foreach": False}
    return kind(groups, **{key: value for key, value in options.items() if key != "decoupled_weight_decay"})


def _own_optimizer(module: pl.LightningModule, config: RunConfig | None) -> Optimizer | None:
    module.trainer = _trainer(config)  # schedules ask how long the run is
    try:
        made = module.configure_optimizers()
    except Exception as error:
        raise MemOptError(f"configure_optimizers of {type(module).__name__} failed: {error}") from error
    finally:
        module.trainer = None
    made = made.get("optimizer") if isinstance(made, dict) else made
    while isinstance(made, list | tuple) and made:
        made = made[0]
    return made if isinstance(made, Optimizer) else None


def _clips_by_norm(config: RunConfig) -> bool:
    return bool(config.trainer.gradient_clip_val) and config.trainer.gradient_clip_algorithm != "value"


def _label(label: str, world_size: int) -> str:
    """A method's, by what it is called where several devices share the model."""
    if world_size == 1:
        return label
    return f"FSDP2, {label}" if label.startswith(("torch", "bitsandbytes")) else label.replace("forge,", "forge_fsdp,")


def _sharding(strategy: Any, config: RunConfig) -> int | None:
    """Devices that share the model; None where only the machine that trains knows."""
    name = strategy if isinstance(strategy, str) else type(strategy).__name__.lower()
    devices = config.trainer.devices
    if "fsdp" not in str(name).lower():
        return 1
    if not str(devices).isdigit():
        return None
    return int(devices) * int(config.trainer.num_nodes or 1)
