"""Updates on NVIDIA GPUs: which Triton kernel takes one, and how operands are brought into the form it wants.

Every route reads its scalars from the device, so a step neither waits for the device nor recompiles when a schedule
moves, and a CUDA graph can capture it. A non-finite gradient element leaves its weight and state as they were and sets
``update.nonfinite``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from functools import partial

import torch
from torch import Tensor

from lightning_memopt.kernels import blocks, flat, flat_batch, fused_hopper, fused_triton, launch, tuning
from lightning_memopt.kernels.batches import Batches, Together
from lightning_memopt.kernels.memory import Repeat, factors_key, gradient_key
from lightning_memopt.kernels.slabs import GPU_SLAB_ELEMENTS, Factors, equal_rows, join, matmul, slabs
from lightning_memopt.kernels.update import Update

# A gradient that is formed in more parts than this is large enough for their launches not to matter.
MOST_SLABS = 16


def supports(update: Update) -> bool:
    """Whether the kernels know this update's device, dtypes and storages."""
    return update.weight.is_cuda and update.row is not None and blocks.supports(update)


def apply_gradient(update: Update, grad: Tensor, kernel: str) -> None:
    """Take one step on a stored gradient of the weight's shape."""
    memory = update.memory
    if memory is None or not grad.is_contiguous() or not grad.numel() or torch.cuda.is_current_stream_capturing():
        flat.apply_gradient(update, grad)
        return
    repeat = _flat(update, grad)
    if repeat is not None:
        memory.keep(gradient_key(grad, kernel), repeat)


def apply_batches(updates: Sequence[Update], grads: Sequence[Tensor], kernel: str, batches: Batches) -> Set[int]:
    """Take those of many steps on stored gradients that go together; returns which, by their numbers."""
    capturing = torch.cuda.is_current_stream_capturing()
    together = batches.recall(updates, grads, kernel, capturing, partial(_together, updates, grads))
    if together is None:
        return frozenset()
    for numbers, batch in together.batches:
        batch.step([grads[i] for i in numbers])
    return together.taken


def _together(updates: Sequence[Update], grads: Sequence[Tensor]) -> Together:
    kinds: dict[Hashable, list[int]] = {}
    for i, (update, grad) in enumerate(zip(updates, grads, strict=True)):
        if supports(update):
            kinds.setdefault(flat_batch.kind(update, grad), []).append(i)
    several = [numbers for kind, numbers in kinds.items() if kind is not None and len(numbers) > 1]
    batches = [(of, flat_batch.Batch([updates[i] for i in of], [grads[i] for i in of])) for of in several]
    return Together(batches, frozenset(i for numbers in several for i in numbers))


def apply_factors(update: Update, factors: Sequence[Factors], grad: Tensor | None, kernel: str) -> None:
    """Take one step on dW = sum of dYᵀ x over `factors`, plus `grad` if a part of the sum is stored.

    Args:
        kernel: "fused", "two_pass" or "auto", which takes the faster one (`kernels.tuning`).
    """
    if not update.weight.numel():
        return
    if grad is not None:
        # No kernel of ours adds a stored gradient faster than the two passes do.
        if kernel == "fused":
            fused_triton.apply_factors(update, factors, grad)
        else:
            two_pass(update, factors, grad)
        return
    given = join(factors)
    dy, x = for_tma(*given)
    hopper = fused_hopper.available(update.weight.device) and fused_hopper.supports(update, dy, x)
    route: tuning.Route
    if not hopper:
        route = tuning.PORTABLE if kernel == "fused" else tuning.TWO_PASS
    elif kernel == "two_pass":
        route = tuning.TWO_PASS
    else:
        route = tuning.choose(update, dy, x, fused=kernel == "fused")
    memory = update.memory
    # What is launched in a capture may not be what is best: nothing is measured there.
    if memory is None or dy is not given[0] or x is not given[1] or torch.cuda.is_current_stream_capturing():
        run(route, update, dy, x)
        return
    # Another number of tokens often takes the same route.
    key = route, dy.dtype
    repeat = memory.recall(update, key)
    if repeat is None or not repeat(dy, x):
        repeat = _route(route, update, dy, x)
    if repeat is not None:
        memory.keep(key, repeat)
        memory.keep(factors_key(dy, x, kernel), repeat)


def _flat(update: Update, grad: Tensor) -> Repeat | None:
    """Take one step on a contiguous gradient; returns what repeats it on another one."""
    given = blocks.arguments(update)
    call = flat.call(update, grad, given)
    compiled = call.run()
    given.write_back()
    return None if given.copies else launch.prepare(call, compiled)


def _route(route: tuning.Route, update: Update, dy: Tensor, x: Tensor) -> Repeat | None:
    """Take one step by the given route; returns what repeats it on other factors of the same dtype."""
    repeat: Repeat | None
    if isinstance(route, fused_hopper.Config):
        call = fused_hopper.call(update, dy, x, route)
        repeat = launch.prepare(call, call.run())
    elif route == tuning.TWO_PASS and update.weight.numel() <= GPU_SLAB_ELEMENTS:
        repeat = _flat(update, _product(dy, x))
        repeat = None if repeat is None else partial(_two_passes, repeat)
    else:
        run(route, update, dy, x)
        repeat = None
    return None if repeat is None else partial(_if_readable, repeat)


def _product(dy: Tensor, x: Tensor) -> Tensor:
    return matmul(dy.t(), x, torch.float32)


def _two_passes(flat: Repeat, dy: Tensor, x: Tensor) -> bool:
    return flat(_product(dy, x))


def _if_readable(repeat: Repeat, dy: Tensor, x: Tensor) -> bool:
    return fused_hopper.readable(dy) and fused_hopper.readable(x) and repeat(dy, x)


def run(route: tuning.Route, update: Update, dy: Tensor, x: Tensor) -> None:
    """Take one step by the given route."""
    if isinstance(route, fused_hopper.Config):
        fused_hopper.apply_factors(update, dy, x, route)
    elif route == tuning.TWO_PASS:
        two_pass(update, [(dy, x)], None)
    else:
        fused_triton.apply_factors(update, [(dy, x)], None)


def two_pass(update: Update, factors: Sequence[Factors], grad: Tensor | None) -> None:
    """Form dW in float32, a slab of rows at a time, each consumed by the flat kernel before the next is formed."""
    rows, columns = update.weight.shape
    height = equal_rows(rows, columns, GPU_SLAB_ELEMENTS)
    remembers = update.memory is not None and rows <= MOST_SLABS * height
    for start, stop, slab in slabs(factors, grad, torch.float32, height):
        if not (remembers and _repeat_slab(update, start, stop, slab)):
            flat.apply_gradient(update.rows(start, stop), slab)


def _repeat_slab(update: Update, start: int, stop: int, slab: Tensor) -> bool:
    """Take one step on some rows by a launch that is remembered from now on; False, with nothing done, if none is."""
    memory = update.memory
    assert memory is not None
    key = (start, stop, gradient_key(slab, "slab"))
    repeat = memory.recall(update, key)
    if repeat is not None and repeat(slab):
        return True
    if not slab.is_contiguous() or torch.cuda.is_current_stream_capturing():
        return False
    repeat = _flat(update.rows(start, stop), slab)
    if repeat is not None:
        memory.keep(key, repeat)
    return True


def for_tma(dy: Tensor, x: Tensor) -> Factors:
    """The factors in one dtype, with rows that TMA can read if a copy makes it so; never without tokens."""
    if dy.dtype != x.dtype:
        dtype = torch.promote_types(dy.dtype, x.dtype)
        dy, x = dy.to(dtype), x.to(dtype)
    if not len(x):
        dy, x = dy.new_zeros(1, dy.shape[1]), x.new_zeros(1, x.shape[1])
    return _rows_for_tma(dy), _rows_for_tma(x)


def _rows_for_tma(factor: Tensor) -> Tensor:
    return factor if fused_hopper.readable(factor) else factor.clone(memory_format=torch.contiguous_format)
