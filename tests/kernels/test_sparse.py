"""Sparse updates in Triton against the plain-torch reference: every rule, formats, shapes, ages, empty tiles."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import Module, Run, difference, fit
from kernel_cases import (
    BF16,
    DEVICES,
    F32,
    F64,
    INTERPRETED,
    RULES,
    check,
    gradient,
    make_update,
    twin,
)
from sparse_cases import place_ages, sparsify

import lightning_memopt as memopt
from lightning_memopt.backward.ages import StepAges
from lightning_memopt.backward.scalars import ROW, StepScalars
from lightning_memopt.kernels import Update, sparse, sparse_reference
from lightning_memopt.kernels.active import Largest
from lightning_memopt.kernels.memory import Memory
from lightning_memopt.kernels.sparse_gradient import accumulate, active_slabs
from lightning_memopt.optim.gefen_columns import SCALE
from lightning_memopt.optim.gefen_learning import CODEBOOK
from lightning_memopt.rules import gefen
from lightning_memopt.rules.gefen import BlockMean
from lightning_memopt.rules.storage import Dense
from lightning_memopt.rules.storage_8bit import Codes
from lightning_memopt.sparsity.bits import unpack
from lightning_memopt.sparsity.spans import WHERE, Where

sparse_arguments = pytest.importorskip("lightning_memopt.kernels.sparse_arguments", exc_type=ImportError)
sparse_fused = pytest.importorskip("lightning_memopt.kernels.sparse_fused", exc_type=ImportError)
sparse_slab = pytest.importorskip("lightning_memopt.kernels.sparse_slab", exc_type=ImportError)
pytestmark = [pytest.mark.parametrize("device", DEVICES)]
CODED_RULES = ["adamw8bit", "gefen", "gefen-64"]
DENSE_RULES = [name for name in RULES if name not in CODED_RULES]


def both(update: Update, factors=(), grad=None, rows: int = 1 << 20, fused: bool = False) -> None:
    """Step a copy by the reference in float64, the update itself by Triton, and compare."""
    expected = twin(update)
    wide = [(dy.double(), x.double()) for dy, x in factors]
    assert sparse_reference.apply(expected, wide, grad.double() if grad is not None else None, rows)
    assert sparse_arguments.supports(update)
    sparse.in_triton(update, factors, grad, rows, fused)
    check(update, expected)


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


def holed_mask(shape, density: float, device: str) -> torch.Tensor:
    """A random mask with rows, spans and tiles that are empty."""
    mask = random_mask(shape, density, device)
    mask[1], mask[2, : shape[1] // 2], mask[-1, -70:] = False, False, False
    return mask


@pytest.mark.parametrize("rule", CODED_RULES)
@pytest.mark.parametrize(("dtype", "rounding"), [(F32, "nearest"), (BF16, "stochastic")])
@pytest.mark.parametrize(
    ("shape", "density"),
    [((33, 130), 0.5), ((63, 128), 0.3), ((10, 700), 0.3), ((8, 1024), 0.25), ((4, 5000), 0.06), ((10, 700), 1.0)],
)
def test_codes(rule, dtype, rounding, shape, density, device) -> None:
    """Spans that are one or several in a row or in a tile, short last ones, rows inside segments of the mask."""
    torch.manual_seed(8)
    update = make_update(rule, shape, device, dtype, rounding=rounding)
    update = sparsify(update, holed_mask(shape, density, device), density=density)
    both(update, grad=gradient(shape, device))


@pytest.mark.parametrize("rule", ["adamw8bit", "gefen"])
@pytest.mark.parametrize("rows", [1, 4])
def test_codes_of_slabs(rule, rows, device) -> None:
    torch.manual_seed(9)
    update = sparsify(make_update(rule, (9, 500), device), holed_mask((9, 500), 0.3, device))
    factors = [tuple(torch.randn(6, n, device=device) for n in (9, 500))]
    both(update, factors=factors, rows=rows)


@pytest.mark.parametrize(("rule", "density"), [("adamw8bit", 0.5), ("gefen-64", 0.5), ("gefen", 1.0), ("gefen", 0.3)])
def test_codes_fused(rule, density, device) -> None:
    """In registers where spans fit a tile, else on slabs."""
    torch.manual_seed(10)
    update = sparsify(make_update(rule, (160, 256), device), random_mask((160, 256), density, device), density=density)
    update.weight[130:], tokens = 0.0, 40
    factors = [tuple(torch.randn(tokens, n, device=device) / tokens for n in (160, 256))]
    assert sparse_fused.fuses(update) == (density >= 0.5)
    both(update, factors=factors, fused=True)


@pytest.mark.parametrize(
    ("rule", "dtype", "rounding"),
    [*((rule, BF16, "stochastic") for rule in ("adamw", *CODED_RULES)), ("adamw8bit", F32, "nearest")],
)
@pytest.mark.parametrize("offset", [78, 77])
def test_random_bits_are_the_references(rule, dtype, rounding, offset, device) -> None:
    torch.manual_seed(11)
    shape = (16, 501)
    update = make_update(rule, shape, device, dtype, rounding=rounding)
    update = sparsify(update, random_mask(shape, 0.4, device))
    update = replace(update, offset=offset)
    expected, grad = twin(update, None), gradient(shape, device)
    assert sparse_reference.apply(expected, (), grad, 16)
    sparse.in_triton(update, (), grad, 16, fused=False)
    for actual, wanted in [(update.weight, expected.weight)] + [
        (update.state[s.name], expected.state[s.name]) for s in update.storage if s.name == "exp_avg_sq"
    ]:
        # The last bit of a float32 operation may move a value across a threshold.
        wrong = ~torch.isclose(actual, wanted, rtol=1e-6) if actual.dtype == F32 else actual != wanted
        assert wrong.float().mean() < 1e-3


@pytest.mark.parametrize("rule", ["adamw", *CODED_RULES])
def test_a_step_that_is_not_finite_leaves_out_elements(rule, device) -> None:
    """These keep weight and moments, as far as the new scale can tell them, and do not count in their block's mean."""
    torch.manual_seed(12)
    shape, limit = (20, 300), 2.0**55
    mask = holed_mask(shape, 0.5, device)
    update = sparsify(make_update(rule, shape, device), mask)
    before, grad = twin(update, None), gradient(shape, device)
    bad = (torch.rand(shape) < 0.05).to(device)
    bad[3] = True  # blocks with nothing left
    worst = -limit if rule.startswith("gefen") else float("inf")
    sparse.in_triton(update, (), grad.masked_fill(bad, worst), 7, fused=False)
    assert update.nonfinite.item() == 1
    assert torch.equal(update.weight[bad], before.weight[bad])
    assert torch.equal(update.weight[~mask], before.weight[~mask])
    good = (mask & ~bad)[mask]
    where = {WHERE: Where.of(update.active.bits, mask.numel(), shape[1])}
    old, new = ([s.load({**u.state, **where}, F64)[0] for s in u.storage] for u in (before, update))
    g, s, share = grad[mask].double(), update.scalars, update.storage[1]
    if isinstance(share, BlockMean):
        number = where[WHERE].blocks(update.state[share.name]).number
        count, total = (torch.zeros(int(number.max()) + 1, dtype=F64, device=device) for _ in range(2))
        count.index_add_(0, number, good.double())
        total.index_add_(0, number, torch.where(good, g**2, 0))
        v = old[1] * s["beta2"] + (total / count)[number] * s["one_minus_beta2"]
        v, alive = torch.where(count[number] > 0, v, old[1]), good
        torch.testing.assert_close(new[1], v, rtol=1e-5, atol=0)
    else:
        v, alive = old[1] * s["beta2"] + g**2 * s["one_minus_beta2"], good
    m = old[0].lerp(g, s["one_minus_beta1"])
    ages = torch.tensor(update.active.ages.rows, dtype=F64, device=device)[update.active.cohort.int()]
    aged = {name: ages[:, 1 + i] for i, name in enumerate(update.active.ages.names)}
    own = {**s, **aged}
    w = before.weight[mask].double() * s["decay"]
    w = w - ages[:, 0] * own["step_size"] * m / (v.sqrt() * own["inv_sqrt_bias2"] + s["eps"])
    torch.testing.assert_close(update.weight[mask][alive].double(), w[alive], rtol=2e-5, atol=2e-6)
    for moment, was, now in zip(update.storage, old, new, strict=True):
        if isinstance(moment, Dense):
            assert torch.equal(was[~good], now[~good])
        elif isinstance(moment, Codes):
            scale = where[WHERE].blocks(update.state[moment.scale_name]).spread(update.state[moment.scale_name])[0]
            # A level of the first moment is at most a 64th of the scale from the next, one of the second 2^(1/12) up.
            far = (was - now).abs() > torch.maximum(scale.double() / 64, 0.08 * was.abs())
            assert not far[~good].any()


# The interpreter launches nothing that could be remembered.
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=pytest.mark.skipif(INTERPRETED, reason="needs a GPU"))
        for rule in ("adamw", "gefen", "gefen-64")
    ]
    + ["adamw8bit"],
)
def test_launches_are_remembered(rule, device, monkeypatch) -> None:
    """Steps that repeat the launches of three slabs are those that do not, with other ages and a state that moved."""
    torch.manual_seed(14)
    shape = (16, 256)
    monkeypatch.setattr(sparse, "_in_triton", lambda update: not update.memory or update.memory.look(update) or True)
    monkeypatch.setattr(sparse, "_height", lambda update: 6)
    update = sparsify(make_update(rule, shape, device, BF16), random_mask(shape, 0.4, device))
    again = replace(twin(update, None), memory=Memory())
    for step in range(4):
        ages = update.active.ages
        ages.rows = [(row[0] * 0.9, *row[1:]) for row in ages.rows]
        place_ages(update)
        if step == 2:
            again.state |= {key: value.clone() for key, value in again.state.items() if value.dim()}
        for one in (update, again):
            sparse.apply(one, [tuple(torch.full((2, n), step + 0.5, device=device) for n in shape)], None, "auto")
        assert len(again.memory._launches) == (0 if INTERPRETED else 3)
        assert torch.equal(update.weight, again.weight)
        assert all(torch.equal(update.state[key], again.state[key]) for key in update.state)


def test_what_is_left_to_plain_torch(device) -> None:
    torch.manual_seed(13)
    shape = (5, 5000)
    update = sparsify(make_update("gefen", shape, device), random_mask(shape, 0.3, device))
    assert sparse_arguments.supports(update)
    others = [
        replace(update, state={**update.state, CODEBOOK: torch.zeros(256, device=device)}),
        replace(update, state={**update.state, SCALE: torch.ones(5000, device=device)}),
        replace(update, state={**update.state, "exp_avg_sq": torch.zeros(5, 1, device=device)}),
        replace(update, weight=update.weight.double()),
        replace(update, weight=torch.zeros(5000, 5, device=device).t()),
    ]
    assert not any(sparse_arguments.supports(other) for other in others)


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
    mask = random_mask((12, 10), 0.5, device).repeat_interleave(run, 1)
    grad = (gradient(mask.shape, device) * 4).round()
    found = []
    for rows in (1, 5, 12):
        update = replace(sparsify(make_update("adamw", tuple(mask.shape), device), mask), offset=3 * mask.shape[1])
        update.active.growth = Largest(15, run)
        sparse.in_triton(update, (), grad, rows, fused=False)
        found.append(update.active.growth.runs - 3 * mask.shape[1] // run)
    scores = grad.abs().view(-1, run).sum(1).masked_fill(mask.view(-1, run)[:, 0], -1.0)
    wanted = scores.argsort(descending=True, stable=True)[:15]
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


def sparse_run(optimizer, growth: str, **options) -> tuple[Run, memopt.SMET]:
    smet = memopt.SMET(0.5, update_every=4, warmup_steps=3, growth=growth, stop_at=None, prune_schedule="constant")
    module = Module(optimizer=partial(optimizer, lr=1e-3))
    options = {"max_steps": 14} | options
    return fit(module, memopt.ForgeStrategy(rounding="nearest"), callbacks=[smet], **options), smet


@pytest.fixture
def in_kernels(monkeypatch):
    """Has runs on the CPU take these kernels, once called; scalars lie where a GPU has them."""
    monkeypatch.setattr(gefen, "MIN_ELEMENTS", 1)
    fill = StepScalars.fill

    def fill_and_place(self, slots, *arguments) -> None:
        fill(self, slots, *arguments)
        rows = [[*slot.scalars.values(), *[0.0] * (ROW - len(slot.scalars))] for slot in slots]
        self._upload(slots, torch.tensor(rows), torch.tensor([slot.key for slot in slots]))
        self.nonfinite = None  # flags are not looked at: that takes events of a GPU

    def take() -> None:
        monkeypatch.setattr(StepScalars, "fill", fill_and_place)
        monkeypatch.setattr(StepAges, "_read_by_kernels", lambda self: True)
        monkeypatch.setattr(sparse, "_in_triton", lambda update: True)

    return take


whole_runs = pytest.mark.skipif(not INTERPRETED, reason="on a GPU, runs take these kernels anyhow")


@whole_runs
@pytest.mark.parametrize(
    ("optimizer", "growth", "tolerance"),
    [
        (torch.optim.AdamW, "random", 1e-6),
        # Sums in another order tip a code now and then.
        (memopt.Gefen, "gradient", 1e-4),
    ],
)
def test_whole_run(optimizer, growth, tolerance, device, in_kernels) -> None:
    """A training run through the kernels: the weights and masks of one in plain torch."""
    plain, wanted = sparse_run(optimizer, growth)
    in_kernels()
    kernels, found = sparse_run(optimizer, growth)
    assert difference(plain, kernels) <= tolerance
    assert all(torch.equal(mask, wanted.masks[name]) for name, mask in found.masks.items())


@whole_runs
@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [(torch.optim.NAdam, 0.05), (memopt.Gefen, None)],
)
def test_launches_of_one_step_serve_all(optimizer, clip, device, in_kernels, monkeypatch) -> None:
    """What a launch reads beside its gradient is renewed where it lies, as ages, a schedule and masks change: a CUDA
    graph may hold it."""
    in_kernels()
    options = {"max_steps": 9, "gradient_clip_val": clip}
    expected, wanted = sparse_run(optimizer, "random", **options)
    launches: dict[tuple[str, int], Any] = {}
    taken = []

    def first_or_again(update: Update, grad: torch.Tensor, first_row: int) -> None:
        call = sparse_slab.call(update, grad, first_row)
        first = launches.setdefault((update.name, first_row), call)
        assert call.constants == first.constants and call.programs == first.programs
        replace(first, arguments=(grad, *first.arguments[1:])).run()
        taken.append(update.active.bits.clone())

    monkeypatch.setattr(sparse_slab, "apply", first_or_again)
    run, found = sparse_run(optimizer, "random", **options)
    assert len(launches) == 2 and len({tuple(bits.tolist()) for bits in taken}) == 2 * 3, "of two layers"
    assert all(torch.equal(weight, expected.weights[name]) for name, weight in run.weights.items())
    assert all(torch.equal(mask, wanted.masks[name]) for name, mask in found.masks.items())
    assert all(torch.equal(ages, wanted.ages[name]) for name, ages in found.ages.items())
    for state, known in zip(run.optimizer.state.values(), expected.optimizer.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(known[key])) for key in known)
