"""Gefen as a torch optimizer: its arithmetic, what must never move, its groups and checkpoints."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gefen_cases import equal, through_a_file, weight
from torch import Tensor, nn

import lightning_memopt as memopt
from lightning_memopt.rules.storage_8bit import BLOCK

SHAPE = (40, 300)  # rows of blocks of which the last is short


def gradients(shape: tuple[int, ...] = SHAPE, seed: int = 1) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(shape, generator=generator) + 0.1
    drift = torch.randn(shape, generator=generator) * 0.3
    return lambda: (torch.randn(shape, generator=generator) + drift) * size


def train(optimizer: torch.optim.Optimizer, param: nn.Parameter, grad: Callable[[], Tensor], steps: int) -> None:
    for _ in range(steps):
        param.grad = grad().to(param.dtype)
        optimizer.step()


# --------------------------------------------------------------------------------------------------------- arithmetic
def oracle(w: Tensor, g: Tensor, state: dict[str, Any], block: int, group: dict[str, Any]) -> tuple[Tensor, ...]:
    """One step in float64, block by block, from the formulas; returns weight, moment before coding, scales and v."""
    w, g = w.double().clone(), g.double() * state.get("column_scale", torch.ones(())).double()
    codes, codebook = state["exp_avg"].view(torch.int8).double(), state["codebook"].double()
    t = float(state["step"]) + 1
    (beta1, beta2), lr = group["betas"], group["lr"]
    m, scales, v = torch.empty_like(w), [], []
    for row in range(w.shape[0]):
        for index, start in enumerate(range(0, w.shape[1], BLOCK)):
            at = (row, slice(start, start + BLOCK))
            c, scale = codes[at], state["exp_avg_scale"][row, index].double()
            if codebook.dim():
                old = codebook[c.long()] * scale
            else:
                old = scale * c / (127 * (1 + codebook) - codebook * c.abs())
            m[at] = beta1 * old + (1 - beta1) * g[at]
            scales.append(m[at].abs().max())
        for index, start in enumerate(range(0, w.shape[1], block)):
            at = (row, slice(start, start + block))
            v.append(beta2 * state["exp_avg_sq"][row, index].double() + (1 - beta2) * g[at].square().mean())
            w[at] *= 1 - lr * group["weight_decay"]
            w[at] -= lr / (1 - beta1**t) * m[at] / ((v[-1] / (1 - beta2**t)).sqrt() + group["eps"])
    return w, m, torch.stack(scales), torch.stack(v)


@pytest.mark.parametrize("codebook", ["curve", "table"])
@pytest.mark.parametrize("block", [None, 32, 128, 512])
@pytest.mark.parametrize("rows", [40, 72])  # without and with a factor per column
def test_steps_are_those_of_a_float64_oracle(rows: int, block: int | None, codebook: str) -> None:
    shape = (rows, 300)
    param, grad = weight(shape), gradients(shape)
    optimizer = memopt.Gefen([param], lr=1e-2, weight_decay=0.1, block=block, codebook=codebook)  # type: ignore[arg-type]
    (group,), state = optimizer.param_groups, optimizer.state[param]
    length = block or 128
    for step in range(8):
        before, g = param.detach().clone(), grad()
        if step == 0:
            old = {"exp_avg": torch.zeros(shape, dtype=torch.uint8), "codebook": torch.tensor(0.9), "step": 0}
            old |= {"exp_avg_scale": torch.zeros(rows, 5), "exp_avg_sq": torch.zeros(rows, -(-shape[1] // length))}
        else:
            old = copy.deepcopy(dict(state))
        param.grad = g
        optimizer.step()
        if step in (1, 4):
            continue  # codebook or factors were learned before this step: see the tests of learning
        assert ("column_scale" in old and bool((old["column_scale"] != 1).any())) == (rows == 72 and step > 4)
        w, m, scales, v = oracle(before, g, old, length, group)
        assert torch.allclose(param.detach().double(), w, rtol=1e-6, atol=1e-7)
        stored = state["exp_avg_scale"].double()
        assert (stored.flatten() >= scales * (1 - 1e-6)).all() and (stored.flatten() <= scales * (1 + 2**-7)).all()
        assert torch.allclose(state["exp_avg_sq"].double().flatten(), v, rtol=1e-5)
        # The code is the nearest value of all 255, up to ties and what a curve rounds differently near them.
        every = torch.arange(-127, 128)
        book = state["codebook"].double()
        values = book[every] if book.dim() else every / (127 * (1 + book) - book * every.abs())
        x = m / stored.repeat_interleave(BLOCK, 1)[:, : shape[1]]
        code = state["exp_avg"].view(torch.int8).long()
        error = (values[code + 127] - x).abs()
        best = (values - x[..., None]).abs().min(-1).values
        assert (error - best).max() < 2e-4 and (error - best > 1e-6).double().mean() < 0.01


def better_factors(r: Tensor, m: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """What moments of one and the same step say of the factors of columns, and how second moments follow; by blocks."""
    new, growth = r.clone(), torch.ones_like(v)
    for start in range(0, len(r), block):
        at = slice(start, start + block)
        share = (m[:, at] ** 2 / v[:, at]).mean(0)
        share = torch.where(share > 0, share / share.mean(), 1.0) if share.any() else torch.ones_like(share)
        c = share / r[at] ** 2
        new[at] = 1 / (c / c.mean()).clamp(min=1 / 64).sqrt()
        growth[:, at] = (share * (new[at] / r[at]) ** 2).mean()
    return new, growth


def shared_adamw(w: Tensor, grads: list[Tensor], block: int, lr: float, decay: float) -> Tensor:
    """AdamW in float64 with whole first moments and a second moment shared by hand; factors from 64 rows on."""
    w, m, v = w.double().clone(), torch.zeros_like(w).double(), torch.zeros_like(w).double()
    r = torch.ones_like(w[0])
    for t, g in enumerate(grads, 1):
        if len(w) >= 64 and t in (5, 9, 17, 33, 65):
            new, growth = better_factors(r, m, v, block)
            m, v, r = m * (new / r), v * growth, new
        g = g.double() * r
        shared = torch.cat([p.square().mean(1, keepdim=True).expand_as(p) for p in g.split(block, 1)], 1)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * shared
        w = w * (1 - lr * decay) - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return w


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("rows", [40, 72])
def test_runs_follow_adamw_with_shared_second_moments_up_to_quantisation(rows: int, block: int) -> None:
    param, grad = weight((rows, 300)), gradients((rows, 300))
    start, grads = param.detach().clone(), [grad() for _ in range(60)]
    optimizer = memopt.Gefen([param], lr=1e-2, weight_decay=0.1, block=block)
    todo = iter(grads)
    train(optimizer, param, lambda: next(todo), len(grads))
    expected = shared_adamw(start, grads, block, 1e-2, 0.1)
    way = (expected - start).norm()
    assert (param.detach() - expected).norm() / way < 0.01


@pytest.mark.parametrize("shape", [(32, 16, 3, 3), (8, 40, 96), (700, 9), (2, 5000), (5000, 1)])
def test_tensors_of_any_shape_are_cut_along_their_first_dimension(shape: tuple[int, ...]) -> None:
    param, grad = weight(shape), gradients(shape)
    start, grads = param.detach().clone().flatten(1), [grad() for _ in range(20)]
    todo = iter(grads)
    train(memopt.Gefen([param], lr=1e-2, weight_decay=0.1, block=128), param, lambda: next(todo), len(grads))
    expected = shared_adamw(start, [g.flatten(1) for g in grads], 128, 1e-2, 0.1)
    assert (param.detach().flatten(1) - expected).norm() < 0.01 * (expected - start).norm()


def test_float64_weights_are_updated_in_float64() -> None:
    param, grad = weight(SHAPE, dtype=torch.float64), gradients()
    start, grads = param.detach().clone(), [grad().double() for _ in range(3)]
    todo = iter(grads)
    train(memopt.Gefen([param], lr=1e-3, block=128), param, lambda: next(todo), 1)
    assert torch.allclose(param.detach(), shared_adamw(start, grads[:1], 128, 1e-3, 0.01), rtol=0, atol=1e-9)


def test_small_tensors_and_vectors_are_updated_as_by_adamw() -> None:
    torch.manual_seed(0)
    params = [weight((8, 16)), weight((5000,)), weight(())]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    ours, theirs = memopt.Gefen(params, lr=1e-2), torch.optim.AdamW(twins, lr=1e-2, weight_decay=0.01)
    for _ in range(5):
        for param, twin in zip(params, twins, strict=True):
            param.grad = torch.randn_like(param)
            twin.grad = param.grad.clone()
        ours.step()
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.allclose(param, twin, rtol=1e-6, atol=1e-7)
        assert ours.state[param].keys() == theirs.state[twin].keys()


# ----------------------------------------------------------------------------------------------------------- learning
def test_the_code_is_learned_once_after_the_first_step() -> None:
    param, grad = weight(SHAPE), gradients()
    optimizer = memopt.Gefen([param])
    train(optimizer, param, grad, 1)
    assert optimizer.state[param]["codebook"] == torch.tensor(0.9)
    train(optimizer, param, grad, 1)
    learned = optimizer.state[param]["codebook"].clone()
    assert optimizer.state[param].keys() == {"step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "codebook"}
    train(optimizer, param, lambda: grad() ** 3, 5)
    assert torch.equal(optimizer.state[param]["codebook"], learned)


def test_the_table_pins_zero_and_ends_at_one_and_serves_all_weights() -> None:
    params = [weight(SHAPE), weight((64, 64))]
    optimizer = memopt.Gefen(params, codebook="table")
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    first, second = (optimizer.state[param]["codebook"] for param in params)
    assert first is second and first.shape == (256,)
    signed = first[torch.arange(-127, 128)]
    assert signed[127] == 0 and signed[0] == -1 and signed[-1] == 1
    assert (signed.diff() > 0).all() and torch.equal(signed, -signed.flip(0))


def test_shorter_blocks_get_the_second_moment_they_would_have_had() -> None:
    shape = (256, 512)
    scale = torch.tensor([1.0, 10.0]).repeat_interleave(64).repeat(4)
    runs = []
    for block in (None, 64):
        param, grad = weight(shape), gradients(shape)
        even = weight(shape)  # has no need of shorter blocks and leaves its share of the bytes
        optimizer = memopt.Gefen([even, param], block=block)
        for size in (1, 0):
            param.grad, even.grad = grad() * scale * size, torch.ones(shape)
            optimizer.step()
        runs.append(optimizer.state[param])
    chosen, fixed = runs
    assert block == 64 or optimizer.state[even]["exp_avg_sq"].shape == (256, 4)
    assert chosen["exp_avg_sq"].shape == (256, 8)
    # Up to the rounding of the codes that say how a block's second moment divides; together they are exact.
    assert torch.allclose(chosen["exp_avg_sq"], fixed["exp_avg_sq"], rtol=0.02)
    both = [state["exp_avg_sq"].unflatten(1, (4, 2)).mean(2) for state in (chosen, fixed)]
    assert torch.allclose(*both, rtol=1e-5)


def test_blocks_stay_long_where_neighbours_agree() -> None:
    param = weight((64, 512))
    optimizer = memopt.Gefen([param])
    train(optimizer, param, lambda: torch.randn(64, 512), 2)
    assert optimizer.state[param]["exp_avg_sq"].shape == (64, 4)


def test_learning_waits_for_a_gradient_that_is_not_zero() -> None:
    param, grad = weight(SHAPE), gradients()
    optimizer = memopt.Gefen([param], weight_decay=0.0)
    train(optimizer, param, lambda: torch.zeros(SHAPE), 3)
    start = float(optimizer.state[param]["codebook"])
    assert optimizer.state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "codebook"}
    train(optimizer, param, grad, 2)
    assert start == torch.tensor(0.9) and float(optimizer.state[param]["codebook"]) != start


def test_learning_does_not_wait_for_ever() -> None:
    param = weight(SHAPE)
    optimizer = memopt.Gefen([param])
    train(optimizer, param, lambda: torch.zeros(SHAPE), 11)
    assert optimizer.state[param].keys() == {"step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "codebook"}
    assert 0.9 < float(optimizer.state[param]["codebook"]) < 0.92


# ------------------------------------------------------------------------------------------------------------- safety
def dead_rows() -> Tensor:
    mask = torch.ones(SHAPE, dtype=torch.bool)
    mask[5] = mask[17:30] = False
    return mask


def dead_columns() -> Tensor:
    mask = torch.ones(SHAPE, dtype=torch.bool)
    mask[:, ::7] = mask[:, 128:256] = False
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codebook", ["curve", "table"])
@pytest.mark.parametrize("dead", [dead_rows, dead_columns])
def test_coordinates_without_gradient_never_move(dead: Callable[[], Tensor], codebook: str, dtype: torch.dtype) -> None:
    param, grad, live = weight(SHAPE, dtype=dtype), gradients(), dead()
    start = param.detach().clone()
    optimizer = memopt.Gefen([param], lr=1e-3, weight_decay=0.0, codebook=codebook)  # type: ignore[arg-type]
    train(optimizer, param, lambda: grad() * live, 100)
    assert torch.equal(param[~live], start[~live])
    assert (param[live] != start[live]).float().mean() > 0.98
    assert (param - start).abs().max() < 0.3
    assert (optimizer.state[param]["exp_avg_sq"] > 0).all()


def test_weights_of_constant_zero_inputs_never_move() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10))
    x = torch.randn(32, 256)
    x[:, 40:60] = 0
    x[:, 200] = 0
    start = net[0].weight.detach().clone()
    optimizer = memopt.Gefen(net.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    still = x.eq(0).all(0)
    assert torch.equal(net[0].weight[:, still], start[:, still])
    assert (net[0].weight[:, ~still] != start[:, ~still]).any(0).all()


def test_a_layer_unfrozen_later_learns_then() -> None:
    params = [weight(SHAPE, seed=0), weight(SHAPE, seed=1)]
    optimizer = memopt.Gefen(params, lr=1e-3, codebook="table")
    for step in range(6):
        params[0].grad = torch.randn(SHAPE)
        params[1].grad = torch.randn(SHAPE) if step > 2 else None
        optimizer.step()
    states = [optimizer.state[param] for param in params]
    assert torch.equal(states[0]["codebook"], states[1]["codebook"])
    assert [int(state["step"]) for state in states] == [6, 3]


@pytest.mark.parametrize("size", [1e6, 1e12, 3e16])
def test_huge_gradients_take_no_huge_step(size: float) -> None:
    param, start = weight(SHAPE), weight(SHAPE).detach()
    g = torch.randn(SHAPE).clamp(-1, 1)
    g[3, 4] = size
    g[5] *= size
    optimizer = memopt.Gefen([param], lr=1e-3, weight_decay=0.0)
    train(optimizer, param, lambda: g, 3)
    train(optimizer, param, lambda: torch.randn(SHAPE), 3)
    assert torch.isfinite(param).all()
    assert all(torch.isfinite(optimizer.state[param][key]).all() for key in ("exp_avg_scale", "exp_avg_sq"))
    assert (param - start).abs().max() < 0.1
    assert (param[6:] != start[6:]).all()


@pytest.mark.parametrize("size", [4e16, 1e25, 1e38])
def test_gradients_whose_squares_overflow_are_left_out(size: float) -> None:
    param, grad = weight(SHAPE), gradients()
    optimizer = memopt.Gefen([param])
    train(optimizer, param, grad, 3)
    before, state = param.detach().clone(), copy.deepcopy(dict(optimizer.state[param]))
    param.grad = grad()
    param.grad[3, 4] = -size
    optimizer.step()
    assert torch.equal(param, before) and equal(state, dict(optimizer.state[param]))


@pytest.mark.parametrize("size", [1e-20, 1e-30, 1e-38, 1e-44])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_denormal_gradients_take_no_step_larger_than_the_learning_rate(size: float, eps: float) -> None:
    param, start = weight(SHAPE), weight(SHAPE).detach()
    optimizer = memopt.Gefen([param], lr=1e-3, eps=eps, weight_decay=0.0)
    train(optimizer, param, lambda: torch.randn(SHAPE).clamp(-3, 3) * size, 5)
    assert torch.isfinite(param).all()
    assert (optimizer.state[param]["exp_avg_sq"] > 0).all()
    assert (param - start).abs().max() < 5 * 4 * 1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_left_out(bad: float) -> None:
    param, grad = weight(SHAPE), gradients()
    optimizer = memopt.Gefen([param])
    for steps in (0, 3):
        train(optimizer, param, grad, steps)
        before, state = param.detach().clone(), copy.deepcopy(dict(optimizer.state[param]))
        param.grad = grad()
        param.grad[7, 7] = bad
        optimizer.step()
        assert torch.equal(param, before)
        assert not steps or equal(state, dict(optimizer.state[param]))
    train(optimizer, param, grad, 2)
    assert torch.isfinite(param).all()


def test_bf16_weights_are_rounded_stochastically_and_reproducibly() -> None:
    def run(**options: Any) -> Tensor:
        param = nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16))
        optimizer = memopt.Gefen([param], lr=1e-4, weight_decay=0.0, **options)
        train(optimizer, param, lambda: torch.ones(SHAPE), 50)
        return param.detach().float()

    moved = run()
    # Each step is 1/40 of a bf16 step at 1: to nearest none would be taken; stochastically all are, on average.
    assert moved.mean().item() == pytest.approx(1 - 50e-4, abs=2e-4)
    assert torch.equal(moved, run()) and not torch.equal(moved, run(seed=1))
    assert torch.equal(run(rounding="nearest"), torch.ones(SHAPE))


# --------------------------------------------------------------------------------------------------- as torch's AdamW
def test_groups_are_live_and_can_be_added() -> None:
    params = [weight(SHAPE, seed=i) for i in range(3)]
    start = [param.detach().clone() for param in params]
    groups = [{"params": params[:1], "lr": 0.0, "weight_decay": 0.0}, {"params": params[1:2], "betas": (0.5, 0.9)}]
    optimizer = memopt.Gefen(groups, lr=1e-2)
    optimizer.add_param_group({"params": params[2:], "lr": 1e-3, "weight_decay": 0.0})
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999), (0.5, 0.9), (0.9, 0.999)]
    for param in params:
        param.grad = torch.ones(SHAPE)
    optimizer.step()
    moved = [(param - old).abs().max().item() for param, old in zip(params, start, strict=True)]
    assert moved[0] == 0 and moved[1] == pytest.approx(1e-2, rel=0.01) and moved[2] == pytest.approx(1e-3, rel=0.01)
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    assert not torch.equal(params[0], start[0])


def test_schedulers_and_warm_restarts_work() -> None:
    param = weight(SHAPE)
    optimizer = memopt.Gefen([param], lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)  # also cycles betas
    for _ in range(9):
        param.grad = torch.randn(SHAPE)
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] < 1e-3 and torch.isfinite(param).all()


def test_closures_make_the_gradients() -> None:
    param, target = weight(SHAPE), torch.zeros(SHAPE)
    optimizer = memopt.Gefen([param], lr=1e-2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param - target).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    "options",
    [{"lr": -1}, {"betas": (1.0, 0.9)}, {"block": 100}, {"max_block": 8}, {"codebook": "x"}, {"rounding": "x"}],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        memopt.Gefen([weight(SHAPE)], **options)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(100, 64, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        memopt.Gefen(table.parameters()).step()


def test_the_factory_spares_biases_and_norms_from_decay() -> None:
    net = nn.ModuleDict({"fc": nn.Linear(80, 80), "LayerNorm": nn.LayerNorm(80), "frozen": nn.Linear(8, 8)})
    net["frozen"].requires_grad_(False)
    optimizer = memopt.gefen(net, lr=2e-3, weight_decay=0.3, betas=(0.8, 0.9))
    decay, spared = optimizer.param_groups
    assert decay["params"] == [net["fc"].weight] and decay["weight_decay"] == 0.3
    assert len(spared["params"]) == 3 and spared["weight_decay"] == 0
    assert decay["lr"] == spared["lr"] == 2e-3 and decay["betas"] == (0.8, 0.9)


def test_the_factory_spares_vectors_of_any_name_and_what_is_named() -> None:
    net = nn.ModuleDict({"fc": nn.Linear(80, 80), "ln_1": nn.LayerNorm(80), "head": nn.Linear(80, 80, bias=False)})
    decay, spared = memopt.gefen(net, no_decay=("head",)).param_groups
    assert decay["params"] == [net["fc"].weight]
    spared_ids = {id(p) for p in spared["params"]}
    assert spared_ids == {id(p) for p in (net["fc"].bias, *net["ln_1"].parameters(), net["head"].weight)}


def test_the_factory_knows_flat_shards_by_name_only() -> None:
    net = nn.ModuleDict({"fc": nn.Linear(80, 80), "norm": nn.LayerNorm(80)})
    for name, part in net.items():  # as FSDP1 leaves its parameters
        flat = nn.Parameter(part.weight.detach().flatten())
        flat._fsdp_flattened = True
        net[name].weight, net[name].bias = flat, None
    decay, spared = memopt.gefen(net).param_groups
    assert decay["params"] == [net["fc"].weight] and spared["params"] == [net["norm"].weight]


# --------------------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("codebook", ["curve", "table"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_resuming_is_exact(steps: int, dtype: torch.dtype, codebook: str) -> None:
    def fresh() -> tuple[list[nn.Parameter], memopt.Gefen]:
        params = [weight(SHAPE, dtype=dtype), weight((256,), dtype)]
        return params, memopt.Gefen(params, lr=1e-2, codebook=codebook)  # type: ignore[arg-type]

    def go_on(params: list[nn.Parameter], optimizer: memopt.Gefen, first: int, last: int) -> None:
        for step in range(first, last):
            for param in params:
                generator = torch.Generator().manual_seed(step)
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            optimizer.step()

    params, optimizer = fresh()
    go_on(params, optimizer, 0, steps)
    saved = through_a_file({"optimizer": optimizer.state_dict(), "params": params})
    go_on(params, optimizer, steps, 9)

    resumed, other = fresh()
    with torch.no_grad():
        for param, value in zip(resumed, saved["params"], strict=True):
            param.copy_(value)
    other.load_state_dict(saved["optimizer"])
    go_on(resumed, other, steps, 9)
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))
    assert equal(optimizer.state_dict(), other.state_dict())


def test_loading_copies() -> None:
    param, grad = weight(SHAPE), gradients()
    optimizer = memopt.Gefen([param])
    train(optimizer, param, grad, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    untouched = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    train(optimizer, param, grad, 2)
    assert equal(saved, untouched)


def test_loading_twice() -> None:
    """A run that goes back to an earlier state more than once, also with a copy of its optimizer."""
    param, grad = weight(SHAPE), gradients()
    optimizer = memopt.Gefen([param])
    train(optimizer, param, grad, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for again in (optimizer, optimizer, copy.deepcopy(optimizer)):
        again.load_state_dict(saved)
        assert equal(again.state_dict()["state"], saved["state"])


@pytest.mark.parametrize("lost", ["codebook", "exp_avg_scale"])
def test_codes_without_their_codebook_are_refused(lost: str) -> None:
    param, grad = weight(SHAPE), gradients()
    optimizer = memopt.Gefen([param])
    train(optimizer, param, grad, 3)
    saved = optimizer.state_dict()
    del saved["state"][0][lost]
    with pytest.raises(memopt.UnsupportedError, match=f"no '{lost}'"):
        memopt.Gefen([weight(SHAPE)]).load_state_dict(saved)


def test_codes_of_another_shape_are_refused() -> None:
    param = weight(SHAPE)
    optimizer = memopt.Gefen([param])
    train(optimizer, param, gradients(), 3)
    with pytest.raises(memopt.UnsupportedError, match="shape"):
        memopt.Gefen([weight((41, 300))]).load_state_dict(optimizer.state_dict())


def test_adamw_checkpoints_convert() -> None:
    param, twin = weight(SHAPE), weight(SHAPE)
    bias, bias_twin = weight((64,)), weight((64,))
    adamw = torch.optim.AdamW([twin, bias_twin], lr=3e-3, betas=(0.8, 0.99), weight_decay=0.2, fused=False)
    grad = gradients()
    for _ in range(20):
        twin.grad, bias_twin.grad = grad(), torch.randn(64)
        adamw.step()
    ours = memopt.Gefen([param, bias], lr=1.0)
    with torch.no_grad():
        param.copy_(twin)
        bias.copy_(bias_twin)
    ours.load_from_adamw(through_a_file(adamw.state_dict()))
    (group,) = ours.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-3, (0.8, 0.99), 0.2)
    assert ours.state[param]["step"] == 20
    expected = torch.stack([part.mean() for part in adamw.state[twin]["exp_avg_sq"][3].split(64)])
    assert torch.allclose(ours.state[param]["exp_avg_sq"][3], expected)
    assert torch.equal(ours.state[bias]["exp_avg"], adamw.state[bias_twin]["exp_avg"])
    param.grad, bias.grad = grad(), torch.randn(64)
    twin.grad, bias_twin.grad = param.grad.clone(), bias.grad.clone()
    start = param.detach().clone()
    ours.step()
    adamw.step()
    longer = torch.stack([part.mean() for part in adamw.state[twin]["exp_avg_sq"][3].split(128)])
    assert torch.allclose(ours.state[param]["exp_avg_sq"][3], longer, rtol=0.05)
    assert ours.state[param]["codebook"] != torch.tensor(0.9)
    assert torch.allclose(bias, bias_twin)
    ours_way, theirs_way = (param - start).flatten(), (twin - start).flatten()
    assert torch.nn.functional.cosine_similarity(ours_way, theirs_way, dim=0) > 0.85


def test_load_from_adamw_refuses_another_state() -> None:
    param = weight(SHAPE)
    sgd = torch.optim.SGD([param], momentum=0.9)
    train(sgd, param, gradients(), 1)
    with pytest.raises(ValueError, match="AdamW"):
        memopt.Gefen([param]).load_from_adamw(sgd.state_dict())


def test_copies_and_pickles_keep_the_state() -> None:
    net = nn.Linear(80, 80)
    optimizer = memopt.gefen(net)
    net(torch.randn(4, 80)).sum().backward()
    optimizer.step()
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert equal(clone.state_dict(), optimizer.state_dict())
        for group, own in zip(clone.param_groups, optimizer.param_groups, strict=True):
            for param, twin in zip(group["params"], own["params"], strict=True):
                param.grad = twin.grad.clone()
        clone.step()
    optimizer.step()
    assert equal(clone.state_dict(), optimizer.state_dict())
