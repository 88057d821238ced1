"""What is compared: each method as an optimizer, a strategy and the Trainer's options, under a fixed name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_memopt as memopt
from lightning_memopt.optim import AdamW8bit, Gefen, Lion
from lightning_memopt.optim.decay import decay_groups

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]

LR, BETAS, DECAY = 1e-4, (0.9, 0.95), 0.1
CLIP, DENSITY = 1.0, 0.25


class NotInstalledError(memopt.MemOptError, ImportError):
    """A method needs a package that is not there."""


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        optimizer: Makes the optimizer from parameter groups.
        label: For tables and plots.
        package: Distribution whose version belongs beside the numbers.
        forge: Options of `ForgeStrategy`, or None for a plain strategy.
        hooks: Step each parameter in a hook of autograd's as soon as its gradient is complete, and free that.
        trainer: Further arguments of the Trainer.
        smet: Train a sparse network with `memopt.SMET`.
    """

    optimizer: MakeOptimizer
    label: str
    package: str = "torch"
    forge: Mapping[str, Any] | None = None
    hooks: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)
    smet: bool = False

    @property
    def package_version(self) -> str:
        """Name and version of the optimizer's package.

        Raises:
            NotInstalledError: It is not installed.
        """
        name = "lightning-memopt" if self.package == "lightning_memopt" else self.package
        try:
            return f"{self.package} {version(name)}"
        except PackageNotFoundError:
            if self.package == "lightning_memopt":  # run from its folder
                return f"{self.package} {memopt.__version__}"
            raise NotInstalledError(f"{self.package} is not installed") from None

    def strategy(self, configured: Any) -> Any:
        """The Trainer's strategy; options of a `ForgeStrategy` in the config hold where the method sets no others."""
        if self.forge is None:
            return "auto"
        name = getattr(configured, "class_path", "")
        options = configured.init_args.as_dict() if name.endswith("ForgeStrategy") else {}
        return memopt.ForgeStrategy(**{**options, **self.forge})

    def callbacks(self) -> list[pl.Callback]:
        """Callbacks that the method needs."""
        if not self.smet:
            return []
        smet = getattr(memopt, "SMET", None)
        if smet is None:
            raise NotInstalledError("this version has no SMET")
        return [smet(density=DENSITY)]

    def install(self, module: pl.LightningModule) -> None:
        """Make the module's ``configure_optimizers`` that of the method."""
        setup = partial(_step_in_hooks if self.hooks else _one_optimizer, module, self.optimizer)
        module.configure_optimizers = setup  # type: ignore[method-assign]


def _one_optimizer(module: nn.Module, make: MakeOptimizer) -> Optimizer:
    return make(decay_groups(module))


def _step_in_hooks(module: nn.Module, make: MakeOptimizer) -> None:
    """The way of torch's tutorial: an optimizer per parameter, called when its gradient has accumulated.

    Returns:
        None: for Lightning the module has no optimizer, so that it runs forward and backward only.
    """
    for group in decay_groups(module):
        for param in group["params"]:
            optimizer = make([group | {"params": [param]}])
            param.register_post_accumulate_grad_hook(partial(_step_now, optimizer))


def _step_now(optimizer: Optimizer, param: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _imported(module: str, name: str, *args: Any, **kwargs: Any) -> Optimizer:
    """An optimizer of a package that need not be installed."""
    try:
        make = getattr(import_module(module), name)
    except ImportError as error:
        raise NotInstalledError(f"{module.split('.')[0]} is not installed: {error}") from error
    return make(*args, **kwargs)


_adam: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}
_adamw = partial(torch.optim.AdamW, **_adam)
_fused = partial(torch.optim.AdamW, fused=True, **_adam)
_bnb: Callable[..., Any] = partial(_imported, "bitsandbytes.optim", **_adam)
_torchao: Callable[..., Any] = partial(_imported, "torchao.optim", **_adam)
_lion = partial(Lion, lr=LR / 5, weight_decay=DECAY)
_sgd = partial(torch.optim.SGD, lr=LR)
_clip = {"gradient_clip_val": CLIP}
_alone = partial(Method, package="lightning_memopt")
_ours = partial(_alone, forge={})

METHODS: dict[str, Method] = {
    "adamw": Method(_fused, "torch AdamW, fused"),
    "adamw_clip": Method(_fused, "torch AdamW, fused, clipped", trainer=_clip),
    "adamw_foreach": Method(partial(torch.optim.AdamW, foreach=True, **_adam), "torch AdamW, foreach"),
    "adamw_hooks": Method(_fused, "torch AdamW, fused, in backward hooks", hooks=True),
    "adamw_foreach_hooks": Method(
        partial(torch.optim.AdamW, foreach=True, **_adam), "torch AdamW, foreach, in backward hooks", hooks=True
    ),
    "bnb_adamw8bit": Method(partial(_bnb, "AdamW8bit"), "bitsandbytes AdamW8bit", "bitsandbytes"),
    "bnb_adamw8bit_hooks": Method(
        partial(_bnb, "AdamW8bit"), "bitsandbytes AdamW8bit, in backward hooks", "bitsandbytes", hooks=True
    ),
    "bnb_paged_adamw8bit": Method(partial(_bnb, "PagedAdamW8bit"), "bitsandbytes PagedAdamW8bit", "bitsandbytes"),
    "torchao_adamw8bit": Method(partial(_torchao, "AdamW8bit"), "torchao AdamW8bit", "torchao"),
    "torchao_adamw4bit": Method(partial(_torchao, "AdamW4bit"), "torchao AdamW4bit", "torchao"),
    "adamw8bit": _alone(partial(AdamW8bit, **_adam), "AdamW8bit, without forge"),
    "gefen": _alone(partial(Gefen, **_adam), "Gefen, without forge"),
    "forge_adamw": _ours(_adamw, "forge, AdamW"),
    "forge_adamw_clip": _ours(_adamw, "forge, AdamW, clipped", trainer=_clip),
    "forge_adamw_smet": _ours(_adamw, "forge, AdamW, SMET", smet=True),
    "forge_adamw8bit": _ours(partial(AdamW8bit, **_adam), "forge, AdamW8bit"),
    "forge_adamw8bit_clip": _ours(partial(AdamW8bit, **_adam), "forge, AdamW8bit, clipped", trainer=_clip),
    "forge_adamw8bit_smet": _ours(partial(AdamW8bit, **_adam), "forge, AdamW8bit, SMET", smet=True),
    "forge_gefen": _ours(partial(Gefen, **_adam), "forge, Gefen"),
    "forge_gefen_clip": _ours(partial(Gefen, **_adam), "forge, Gefen, clipped", trainer=_clip),
    "forge_gefen_smet": _ours(partial(Gefen, **_adam), "forge, Gefen, SMET", smet=True),
    "forge_lion": _ours(_lion, "forge, Lion"),
    "forge_lion_clip": _ours(_lion, "forge, Lion, clipped", trainer=_clip),
    "forge_sgd": _ours(_sgd, "forge, SGD"),
    "forge_sgd_clip": _ours(_sgd, "forge, SGD, clipped", trainer=_clip),
}
# The fused methods again with the whole step in one CUDA graph, under NAME_graph.
METHODS |= {
    f"{name}_graph": replace(method, label=f"{method.label}, CUDA graph", forge={"cuda_graph": True})
    for name, method in METHODS.items()
    if method.forge is not None
}


def chosen(names: Iterable[str]) -> dict[str, Method]:
    """Methods by name, in the order given.

    Raises:
        MemOptError: A name is unknown; the message lists those that are.
    """
    names = list(names)
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise memopt.MemOptError(f"Unknown methods {', '.join(unknown)}. There are {', '.join(METHODS)}.")
    return {name: METHODS[name] for name in names}
