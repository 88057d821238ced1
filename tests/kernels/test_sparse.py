"""Sparse updates in Triton against the plain-torch reference: every rule, formats, shapes, ages, empty tiles."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import Module, Run, difference, fit
from kernel_cases import BF16, DEVICES, F32, INTERPRETED, RULES, _check_dense, gradient, make_update

import lightning_memopt as memopt
from lightning_memopt.backward.scalars import StepScalars
from lightning_memopt.kernels import Update, sparse, sparse_reference
from lightning_memopt.kernels.active import Active, Ages, Largest
from lightning_memopt.kernels.sparse_gradient import accumulate, active_slabs
from lightning_memopt.sparsity.bits import make_index, pack, unpack
from lightning_memopt.sparsity.state import gather

pytest.importorskip("lightning_memopt.kernels.sparse_triton", exc_type=ImportError)
pytestmark = [pytest.mark.parametrize("device", DEVICES)]
DENSE_RULES = [name for name in RULES if not name.startswith(("adamw8bit", "gefen"))]


def sparsify(update: Update, mask: torch.Tensor, ages: int = 3) -> Update:
    """The same update of the weights that `mask` keeps, in cohorts of different ages."""
    total, device = mask.numel(), mask.device
    bits = pack(total, lambda a, b: mask.view(-1)[a:b], device)
    index = make_index(bits, total)
    cohort = (torch.arange(int(index[-1]), device=device) % ages).to(torch.uint8)
    names = update.rule.aged_scalars
    rows = [(min(1.0, 0.25 * (i + 2)), *(update.scalars[name] * (1 + 0.3 * i) for name in names)) for i in range(ages)]
    kept = {storage.name: gather(update.state[storage.name], bits) for storage in update.storage}
    weight = update.weight.masked_fill(~mask, 0.0).contiguous()
    active = Active(bits, index, cohort, Ages(names, rows))
    return replace(update, weight=weight, state={**update.state, **kept}, active=active)


def both(update: Update, factors=(), grad=None, rows: int = 1 << 20, fused: bool = False) -> None:
    """Step a copy by the reference in float64, the update itself by Triton, and compare."""
    state = {k: v.double() if torch.is_tensor(v) and v.dim() else v for k, v in copy.deepcopy(update.state).items()}
    expected = replace(update, weight=update.weight.double(), state=state)
    wide = [(dy.double(), x.double()) for dy, x in factors]
    assert sparse_reference.apply(expected, wide, grad.double() if grad is not None else None, rows)
    sparse.in_triton(update, factors, grad, rows, fused)
    assert not update.nonfinite.item()
    _check_dense(update.weight, expected.weight, "weight")
    for storage in update.storage:
        _check_dense(update.state[storage.name], expected.state[storage.name], storage.name)


def random_mask(shape, density: float, device: str) -> torch.Tensor:
    return (torch.rand(shape) < density).to(device)


# Gefen keeps the moments of small weights whole.
@pytest.mark.parametrize("rule", [*DENSE_RULES, "gefen"])
@pytest.mark.parametrize(("dtype", "moment_dtype", "rounding"), [(F32, F32, "nearest"), (BF16, BF16, "stochastic")])
def test_every_rule(rule, dtype, moment_dtype, rounding, device) -> None:
    torch.manual_seed(0)
    shape = (33, 70)
    update = sparsify(make_update(rule, shape, device, dtype, moment_dtype, rounding), random_mask(shape, 0.4, device))
    both(update, grad=gradient(shape, device))


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (16, 128), (40, 200), (3, 1000)])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_slabs(shape, density, rows, device) -> None:
    """Slabs that begin and end within segments."""
    torch.manual_seed(1)
    update = sparsify(make_update("adamw", shape, device), random_mask(shape, density, device))
    both(update, grad=gradient(shape, device), rows=rows)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("shape", "tokens"), [((160, 256), 40), ((7, 128), 3)])
def test_fused(shape, tokens, dtype, device) -> None:
    torch.manual_seed(2)
    update = sparsify(make_update("adamw", shape, device), random_mask(shape, 0.3, device))
    factors = [(torch.randn(tokens, n, device=device).to(dtype) / tokens for n in shape) for _ in range(2)]
    both(update, factors=[tuple(pair) for pair in factors], fused=True)


@pytest.mark.parametrize("rows", [1, 5])
def test_parts_of_a_shard(rows, device, monkeypatch) -> None:
    """A gradient that comes in parts, of a weight that is the lower rows of another: random bits go by place."""
    torch.manual_seed(7)
    monkeypatch.setattr(sparse, "_in_triton", lambda update: True)
    shape, mask = (14, 50), random_mask((14, 50), 0.4, device)
    whole = sparsify(make_update("adamw", shape, device, BF16, BF16, "stochastic"), mask)
    lower = sparsify(make_update("adamw", (8, 50), device, BF16, BF16, "stochastic"), mask[6:])
    grad, first = gradient(shape, device), int(mask[:6].sum())
    lower.weight.copy_(whole.weight[6:])
    for key in ("exp_avg", "exp_avg_sq"):
        lower.state[key].copy_(whole.state[key][:, first:])
    lower.active.cohort.copy_(whole.active.cohort[first:])
    whole = replace(whole, offset=0)
    lower = replace(lower, offset=300, key=whole.key, row=whole.row, row_key=whole.row_key)
    for update in (whole, lower):
        update.active.growth = Largest(20, 1)
    sparse.in_triton(whole, (), grad, 100, fused=False)
    assert sparse.apply_slabs(lower, ((i, min(i + rows, 8), grad[6:][i : i + rows]) for i in range(0, 8, rows)), "auto")
    assert torch.equal(lower.weight, whole.weight[6:])
    assert torch.equal(lower.state["exp_avg_sq"], whole.state["exp_avg_sq"][:, first:])
    scores = grad.abs().view(-1).masked_fill(mask.view(-1), -1.0)[300:]
    assert torch.equal(lower.active.growth.runs, 300 + scores.argsort(descending=True, stable=True)[:20])


def test_empty_tiles_are_skipped(device) -> None:
    """An empty tile is left before its operands are read: NaN there changes nothing and is not reported."""
    torch.manual_seed(3)
    mask = random_mask((256, 256), 0.3, device)
    mask[:128, 128:] = False
    update = sparsify(make_update("adamw", (256, 256), device), mask)
    dy, x = torch.randn(16, 256, device=device), torch.randn(16, 256, device=device)
    before = update.weight.clone()
    sparse.in_triton(update, [(dy, x)], None, 1 << 20, fused=True)
    assert not update.weight[:128, 128:].any() and (update.weight != before)[mask].all()


def test_non_finite_elements(device) -> None:
    """Reported where a weight is active, ignored where not; never written."""
    torch.manual_seed(4)
    mask = random_mask((8, 100), 0.5, device)
    mask[0, :2] = torch.tensor([True, False])
    for column, reported in ((0, True), (1, False)):
        update = sparsify(make_update("adamw", (8, 100), device), mask)
        grad = gradient((8, 100), device)
        grad[0, column] = float("nan")
        before = update.weight.clone()
        sparse.in_triton(update, (), grad, 3, fused=False)
        assert bool(update.nonfinite.item()) == reported
        assert update.weight.isfinite().all() and update.weight[0, 0].equal(before[0, 0]) == reported


@pytest.mark.parametrize("run", [1, 4])
def test_growth_scores_do_not_depend_on_slabs(run, device) -> None:
    """The same largest gradients of inactive runs, ties by index, whatever the slabs."""
    torch.manual_seed(5)
    mask = random_mask((24, 10), 0.5, device).repeat_interleave(run, 1)
    grad = (gradient(mask.shape, device) * 4).round()
    found = []
    for rows in (1, 5, 24):
        update = replace(sparsify(make_update("adamw", tuple(mask.shape), device), mask), offset=3 * mask.shape[1])
        update.active.growth = Largest(30, run)
        sparse.in_triton(update, (), grad, rows, fused=False)
        found.append(update.active.growth.runs - 3 * mask.shape[1] // run)
    scores = grad.abs().view(-1, run).sum(1).masked_fill(mask.view(-1, run)[:, 0], -1.0)
    wanted = scores.argsort(descending=True, stable=True)[:30]
    assert all(torch.equal(runs, wanted) for runs in found)
    assert torch.equal(unpack(update.active.bits, 0, mask.numel()).view(mask.shape), mask)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [3, 1000])
def test_accumulated_gradient(dtype, rows, device) -> None:
    """A part known for active weights only, alone and with the factors of a last micro-batch."""
    torch.manual_seed(6)
    shape, tokens = (13, 50), 6
    mask = random_mask(shape, 0.3, device)
    dy, x = (torch.randn(tokens, n, device=device).to(dtype) for n in shape)
    for factors in ((), ((dy, x),)):
        update = sparsify(make_update("adamw", shape, device), mask)
        update.active.stored = torch.zeros(int(mask.sum()), device=device)
        slabs = active_slabs(shape, update.active.bits, [(dy, x), (2 * dy, x)], None, None, F32, rows)
        accumulate(update.active.stored, slabs)
        torch.testing.assert_close(update.active.stored, 3 * (dy.float().t() @ x.float())[mask])
        both(update, factors=factors, rows=rows, fused=True)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, runs take these kernels anyhow")
@pytest.mark.parametrize("growth", ["random", "gradient"])
def test_whole_run(growth, device, monkeypatch) -> None:
    """A training run through the kernels: the weights and masks of one in plain torch."""

    def run() -> tuple[Run, memopt.SMET]:
        smet = memopt.SMET(0.5, update_every=4, warmup_steps=3, growth=growth)
        module = Module(optimizer=partial(torch.optim.AdamW, lr=1e-3))
        return fit(module, memopt.ForgeStrategy(rounding="nearest"), max_steps=14, callbacks=[smet]), smet

    plain, wanted = run()
    fill = StepScalars.fill

    def fill_and_place(self, slots, *arguments) -> None:
        fill(self, slots, *arguments)
        for slot in slots:
            slot.row = torch.tensor([*slot.scalars.values()])
            slot.row_key, slot.nonfinite = torch.zeros(2, dtype=torch.int32)

    monkeypatch.setattr(StepScalars, "fill", fill_and_place)
    monkeypatch.setattr(sparse, "_in_triton", lambda update: True)
    kernels, found = run()
    assert difference(plain, kernels) <= 1e-6
    assert all(torch.equal(mask, wanted.masks[name]) for name, mask in found.masks.items())
