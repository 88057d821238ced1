"""Gefen as a torch optimizer, and the function that makes one of a module's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim.optimizer import ParamsT

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.optim.base import CheckedOptimizer
from lightning_memopt.optim.decay import decay_groups

if TYPE_CHECKING:
    from lightning_memopt.rules.base import Rule

# Completed by what follows from it.
FLAT_SHARDS = (
    "Gefen on the flat shards of FullyShardedDataParallel (strategy 'fsdp'): blocks lie inside each rank's shard, so "
    "the optimizer's state belongs to this world size and wrapping and cannot be resharded or gathered. With "
    "fully_shard (strategies 'forge_fsdp' and ModelParallelStrategy) it can."
)


class Gefen(CheckedOptimizer):
    """AdamW with about one byte of state per weight (Gefen, arXiv 2606.13894); AdamW's learning rates carry over.

    The first moment is stored in one byte per weight, by a code that is learned from the first gradients; the second
    is shared by blocks of up to `max_block` consecutive weights of a row. `lightning_memopt.rules.gefen` lists the
    state. Vectors, and tensors of fewer than 4096 elements, keep AdamW's float32 moments.

    bf16 weights are rounded stochastically; the random bits depend on `seed`, the step count and the parameter's place
    in `params` only, so a resumed run takes the same steps.

    A step leaves a parameter alone whose gradient is not finite.

    Args:
        params: Parameters or parameter groups; float32, bf16 or float64.
        lr: Learning rate.
        betas: Decay of first and second moment.
        eps: Added to the root of the corrected second moment.
        weight_decay: Decoupled weight decay.
        block: Length of all blocks, a power of two; None to choose it for each weight from its first gradient.
        max_block: Length of blocks by default, a power of two; 64 is the shortest that may be chosen instead, as far as
            all state stays within 1.1 bytes per parameter.
        codebook: What is learned of the code: a "curve" of one parameter for each weight, which kernels compute; or
            the best "table" of 255 values for all weights, which runs in plain torch.
        rounding: "nearest" rounds bf16 weights to nearest instead. Under a fused strategy its option of this name
            holds.
        seed: Seed of stochastic rounding; the same goes for it.

    Raises:
        ValueError: An argument out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        block: int | None = None,
        max_block: int = 128,
        codebook: Literal["curve", "table"] = "curve",
        rounding: Literal["stochastic", "nearest"] = "stochastic",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"block": block, "max_block": max_block, "codebook": codebook}
        super().__init__(params, defaults | {"rounding": rounding, "seed": seed})

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Also those of blocks and code.

        Raises:
            ValueError: One is out of range.
        """
        super().check_options(options)
        for name in ("block", "max_block"):
            value = options[name]
            if value is not None and (value < 16 or value & (value - 1)):
                raise ValueError(f"Gefen: {name}={value}; use a power of two from 16 on.")
        if options["codebook"] not in ("curve", "table"):
            raise ValueError(f"Gefen: codebook={options['codebook']!r}; use 'curve' or 'table'.")

    def _rule(self) -> Rule:
        from lightning_memopt.rules.gefen import GefenRule

        return GefenRule()

    def _take_step(self) -> None:
        from lightning_memopt.optim.apply import step_parameters

        self._warn_on_flat_shards(f"{FLAT_SHARDS} It trains, but its optimizer state is not saved.")
        step_parameters(self, self._rule())

    def state_dict(self) -> dict[str, Any]:
        """As torch.

        Raises:
            UnsupportedError: The state lies on flat shards, from which FSDP would gather nonsense.
        """
        if self.state and self.on_flat_shards:
            raise UnsupportedError(
                f"{FLAT_SHARDS} Save weights only, for example ModelCheckpoint(save_weights_only=True)."
            )
        return super().state_dict()

    def load_from_adamw(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the state of a ``torch.optim.AdamW`` over the same parameters, in the same order.

        The code is learned from the first moments, blocks are chosen by the second. Learning rate, betas, eps and
        decay of the groups are AdamW's.

        Raises:
            ValueError: `state_dict` is not that of an Adam or AdamW.
        """
        if not all({"step", "exp_avg", "exp_avg_sq"} <= state.keys() for state in state_dict["state"].values()):
            raise ValueError("load_from_adamw: expected the state_dict of torch.optim.AdamW (exp_avg, exp_avg_sq).")
        self.load_state_dict(dict(state_dict))


def gefen(
    module: nn.Module,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    no_decay: Iterable[str] = ("bias", "norm"),
    **options: Any,
) -> Gefen:
    """A `Gefen` over the trainable parameters of `module`, for ``configure_optimizers``.

    Args:
        module: A module.
        lr: Learning rate of all parameters.
        weight_decay: Decay of matrices and larger tensors whose name has none of `no_decay` in it. Vectors (biases
            and norms, whatever they are called) never decay.
        no_decay: Parts of names, or one, in any case, of parameters without decay.
        options: See `Gefen`.

    Raises:
        UnsupportedError: See `lightning_memopt.optim.decay.decay_groups`.
    """
    return Gefen(decay_groups(module, no_decay), lr=lr, weight_decay=weight_decay, **options)
