"""AdamW with about two bytes of state per weight, as a torch optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch.optim.optimizer import ParamsT

from lightning_memopt.optim.base import CheckedOptimizer

if TYPE_CHECKING:
    from lightning_memopt.rules.base import Rule


class AdamW8bit(CheckedOptimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) whose moments are 8-bit codes with a scale per block.

    State of a matrix: ``exp_avg`` and ``exp_avg_sq``, uint8 of the weight's shape; ``exp_avg_scale`` and
    ``exp_avg_sq_scale``, bf16, one per 64 weights of a row (`lightning_memopt.rules.storage_8bit`): 2.06 bytes per
    weight. Vectors, and tensors of fewer than 4096 elements or with rows shorter than 16, keep float32 moments; so do
    the flat shards of FSDP1, which are vectors. Where FSDP2 shards weights by rows, codes and scales are sharded alike.

    bf16 weights and the codes of ``exp_avg_sq`` are rounded stochastically; the random bits depend on `seed`, the step
    count and the parameter's place in `params` (under a fused strategy, its name) only, so a resumed run takes the same
    steps.

    A step leaves a parameter alone whose gradient is not finite. A gradient of 2^64 (1.8e19) or more has an infinite
    square in float32: AdamW never moves its weight again, this one bounds the second moment and may move it far.

    Args:
        params: Parameters or parameter groups; float32, bf16 or float64.
        lr: Learning rate.
        betas: Decay of first and second moment.
        eps: Added to the root of the corrected second moment.
        weight_decay: Decoupled weight decay.
        rounding: "nearest" rounds bf16 weights to nearest instead. Codes of ``exp_avg_sq`` are not: they would stall.
            Under a fused strategy its option of this name holds instead.
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
        rounding: Literal["stochastic", "nearest"] = "stochastic",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"rounding": rounding, "seed": seed})

    def _rule(self) -> Rule:
        from lightning_memopt.rules.adamw8bit import AdamW8bitRule

        return AdamW8bitRule()

    def _take_step(self) -> None:
        from lightning_memopt.optim.apply import step_parameters

        self._warn_on_flat_shards(
            "AdamW8bit on the flat shards of FullyShardedDataParallel (strategy 'fsdp'): they are vectors, whose "
            "moments stay float32, 8 bytes per weight. With fully_shard (strategies 'forge_fsdp' and "
            "ModelParallelStrategy) matrices have two."
        )
        step_parameters(self, self._rule())
