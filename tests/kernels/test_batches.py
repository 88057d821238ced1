"""What is remembered of sets of updates; that their launches are right is `test_flat_batch`'s."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kernel_cases import F32, make_update, twin

from lightning_memopt.kernels import Update, apply_gradients, reference
from lightning_memopt.kernels.batches import CAPACITY, Batches, Together


def updates_and_gradients(count: int) -> tuple[list[Update], list[torch.Tensor]]:
    updates = [make_update("adamw", (5 + i,)) for i in range(count)]
    return updates, [torch.randn(update.weight.shape) for update in updates]


def test_the_reference_takes_one_after_another() -> None:
    updates, grads = updates_and_gradients(3)
    expected = [twin(update, F32) for update in updates]
    grads[1][0] = float("nan")
    assert apply_gradients(updates, grads, "auto", Batches()) == [True, False, True]
    for update, wanted, grad in zip(updates, expected, grads, strict=True):
        reference.apply_gradient(wanted, grad)
        assert torch.equal(update.weight, wanted.weight)


def recall(batches: Batches, updates: Sequence[Update], grads: Sequence[torch.Tensor], capturing: bool = False):
    return batches.recall(updates, grads, "auto", capturing, lambda: Together([], frozenset()))


def test_launches_are_made_for_a_set_that_comes_again() -> None:
    updates, grads = updates_and_gradients(3)
    batches = Batches()
    assert recall(batches, updates, grads) is None
    made = recall(batches, updates, grads)
    assert made is not None and recall(batches, updates, grads) is made
    assert recall(batches, updates[:2], grads[:2]) is None, "fewer"
    assert recall(batches, [*updates[:2], make_update("adamw", (7,))], grads) is None, "another"
    assert recall(batches, updates, [grad.bfloat16() for grad in grads]) is None, "of another dtype"
    batches.clear()
    assert recall(batches, updates, grads) is None


def test_memory_is_bounded_but_for_what_a_graph_reads() -> None:
    updates, grads = updates_and_gradients(2)
    batches = Batches()
    assert recall(batches, updates, grads) is None
    assert recall(batches, updates, grads, capturing=True) is None, "nothing is copied to the device in a capture"
    made = recall(batches, updates, grads)
    assert made is not None and recall(batches, updates, grads, capturing=True) is made
    for _ in range(3 * CAPACITY):
        others, _ = updates_and_gradients(2)
        recall(batches, others, grads)
        assert len(batches._known) <= CAPACITY + 1
    assert recall(batches, updates, grads) is made
