"""On sharded weights, too, changes of the optimizer hold for the step in which they were made."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from harness import Module
from sharded import Deep, Ranks, furthest, train, train_plain

import lightning_memopt as memopt
from lightning_memopt.compat import CASES


class Warms(Module):
    """Sets its learning rate in `training_step`, and begins to train the head there."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.trainer.optimizers[0]
        optimizer.param_groups[0].update(lr=1e-3 * (self.global_step + 1), weight_decay=0.1 * (self.global_step % 3))
        self.net.head.requires_grad_(self.global_step >= 2)
        return super().training_step(batch, batch_idx)


class TakesOut(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        group = self.trainer.optimizers[0].param_groups[0]
        if batch_idx == 2:
            group["params"] = group["params"][1:]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}])
def test_options_set_in_the_step(two: Ranks, options: dict[str, Any]) -> None:
    make = partial(Warms, net=Deep)
    plain, results = train_plain(make, **options), two(train, make, **options)
    assert furthest(results[0], results[1]) == 0
    assert furthest(plain, results[0]) <= 1e-5


def test_taking_parameters_out_is_refused(two: Ranks) -> None:
    (case,) = [case for case in CASES if case.feature == "parameters taken out of their optimizer, sharded"]
    for error in two.attempt(train, partial(TakesOut, net=Deep)):
        assert isinstance(error, memopt.UnsupportedError) and case.message in str(error)
