"""Gradients that autograd stores in small pieces are summed over ranks once per pass; larger ones as FSDP2 does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from harness import Module
from lightning.pytorch import Callback
from sharded import Deep, Ranks, furthest, train, train_plain
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_memopt.backward import averages

STEPS = 3


class Counts(Callback):
    """How many units FSDP2 reduces in each step."""

    def __init__(self) -> None:
        self.reduced: list[int] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        self.reduced.append(0)

    def on_fit_start(self, trainer: Any, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                self._watch(part._get_fsdp_state())

    def _watch(self, state: Any) -> None:
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            group.post_backward = partial(self._post_backward, group, group.post_backward)

    def _post_backward(self, group: Any, plain: Any, *args: Any) -> None:
        stored = any(p._unsharded_param.grad is not None for p in group.fsdp_params)
        self.reduced[-1] += group.reduce_grads and stored
        plain(*args)


def count(small: int, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """Units reduced by FSDP2 in each step, and the run; `small` as of the module."""
    plain, averages.SMALL = averages.SMALL, small
    counts = Counts()
    try:
        run = train(partial(Module, net=Deep), max_steps=STEPS, callbacks=[counts], **options)
    finally:
        averages.SMALL = plain
    return counts.reduced, run


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}])
def test_blocks_wait_for_the_end(two: Ranks, options: dict[str, Any]) -> None:
    """From the second pass on, when it is known that their weights travel as factors; the result stays."""
    few, many = two(count, 200, **options), two(count, 0, **options)
    passes = STEPS * options.get("accumulate_grad_batches", 1)
    plain = train_plain(partial(Module, net=Deep), max_steps=STEPS, **options)
    for (reduced, run), (all_reduced, other) in zip(few, many, strict=True):
        # Two blocks and the root, whose embedding and convolution are too large.
        assert sum(all_reduced) == 3 * passes and sum(reduced) == 3 + 1 * (passes - 1)
        assert furthest(run, other) <= 1e-6 and furthest(run, plain) <= 1e-5


class Hooked(Module):
    """A user's hook waits for the averaged gradient of a norm."""

    def on_fit_start(self) -> None:
        self.seen = 0
        self.net.blocks[0].norm.weight.register_post_accumulate_grad_hook(self._look)

    def _look(self, param: Tensor) -> None:
        self.seen += 1


def count_hooked() -> int:
    run = train(partial(Hooked, net=Deep), max_steps=STEPS, inspect=lambda trainer: trainer.lightning_module.seen)
    return run["said"]


def test_hooks_see_averages(two: Ranks) -> None:
    """FSDP2 runs them, so it is left to reduce that unit."""
    assert two(count_hooked) == [STEPS, STEPS]
