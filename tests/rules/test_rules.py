"""Rules against their torch optimizers on given gradients, option by option; what a rule refuses; its state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import OPTIMIZERS, Module, Run, fit, square_loss, vectors
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.utils.data import DataLoader

import lightning_memopt as memopt
from lightning_memopt.rules import RULES, rule_for

SHAPE = (7, 5)


class Weight(nn.Module):
    """One weight; the loss ``(weight * batch).sum()`` makes the batch its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SHAPE))


def given(net: Any, batch: list[Tensor]) -> Tensor:
    return (net.weight * batch[0].to(net.weight.dtype)).sum()


def random_gradients(steps: int) -> Tensor:
    return torch.randn(steps, *SHAPE, generator=torch.Generator().manual_seed(3))


def wide_gradients(steps: int) -> Tensor:
    """Sizes from 1e-6 to 1e6, constant in time for each weight but for their signs."""
    sizes = 10 ** torch.linspace(-6, 6, SHAPE[0] * SHAPE[1]).view(SHAPE)
    return random_gradients(steps).sign() * sizes


def sparse_gradients(steps: int) -> Tensor:
    """Mostly zero, and all zero in the first step."""
    gradients = random_gradients(steps)
    return torch.where(gradients > 1, gradients, 0.0).index_fill(0, torch.tensor([0]), 0.0)


GRADIENTS = {"random": random_gradients, "wide": wide_gradients, "sparse": sparse_gradients}


def run(make: Any, gradients: Tensor, strategy: Any, precision: Any = "64-true", **options: Any) -> Run:
    """Take one step on each gradient."""
    data: DataLoader[Any] = DataLoader([(g,) for g in gradients], batch_size=None)
    return fit(Module(Weight, make, given), strategy, data, precision=precision, max_steps=len(gradients), **options)


OPTIONS: dict[str, Callable[..., Optimizer]] = {
    **OPTIMIZERS,
    "adamw_no_decay": partial(AdamW, lr=1e-2, weight_decay=0.0),
    "adamw_betas": partial(AdamW, lr=1e-2, betas=(0.5, 0.6), eps=1e-3),
    "adamw_no_momentum": partial(AdamW, lr=1e-2, betas=(0.0, 0.999)),
    "adamw_maximize": partial(AdamW, lr=1e-2, maximize=True, weight_decay=0.3),
    "adamw_tensor_lr": lambda params: AdamW(params, lr=torch.tensor(1e-2, dtype=torch.float64)),
    "adamw_foreach": partial(AdamW, lr=1e-2, foreach=True),
    "adamw_fused": partial(AdamW, lr=1e-2, fused=True),
    "adamw_zero_lr": partial(AdamW, lr=0.0),
    "adam_maximize": partial(Adam, lr=1e-2, maximize=True, weight_decay=0.3),
    "sgd_tensor_lr": lambda params: SGD(params, lr=torch.tensor(1e-2, dtype=torch.float64), momentum=0.5),
    "sgd_dampening_without_momentum": partial(SGD, lr=1e-2, dampening=0.5),
    "sgd_nesterov_maximize": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    "rmsprop_alpha": partial(RMSprop, lr=1e-3, alpha=0.5, momentum=0.3, centered=True, weight_decay=0.1, eps=1e-2),
    "rmsprop_maximize": partial(RMSprop, lr=1e-3, maximize=True, weight_decay=0.1),
    "adagrad_plain": partial(Adagrad, lr=1e-1),
    "adagrad_maximize": partial(Adagrad, lr=1e-1, maximize=True, lr_decay=0.5, eps=1e-3),
    "nadam_decay": partial(NAdam, lr=1e-2, momentum_decay=0.1, betas=(0.8, 0.9)),
    "nadam_maximize": partial(NAdam, lr=1e-2, maximize=True),
    "radam_never_rectified": partial(RAdam, lr=1e-2, betas=(0.9, 0.5)),
    "radam_maximize": partial(RAdam, lr=1e-2, maximize=True, weight_decay=0.1),
    "lion_betas": partial(memopt.Lion, lr=1e-3, betas=(0.0, 0.5)),
}


@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_against_torch(options: str, gradients: str) -> None:
    """Twelve steps on the same gradients in float64: weights and every state entry agree to rounding."""
    sequence = GRADIENTS[gradients](12)
    plain, fused = (run(OPTIONS[options], sequence, strategy) for strategy in ("auto", "forge"))
    torch.testing.assert_close(fused.weights, plain.weights, rtol=1e-11, atol=1e-13)
    moved = (plain.weights["net.weight"] - Module(Weight).net.weight.detach()).abs().max()
    assert (moved > 1e-6) == (options != "adamw_zero_lr")
    expected, got = (run.optimizer.state.get(run.module.net.weight, {}) for run in (plain, fused))
    for key, value in expected.items():
        if value is not None:
            torch.testing.assert_close(got[key], value, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("options", ["adamw", "nadam", "radam", "adagrad"])
def test_bias_corrections_far_out(options: str) -> None:
    """After a hundred steps, bias corrections and momentum products still agree."""
    plain, fused = (run(OPTIONS[options], random_gradients(100), strategy) for strategy in ("auto", "forge"))
    torch.testing.assert_close(fused.weights, plain.weights, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_float32_arithmetic(options: str) -> None:
    """In float32 twenty steps on gradients of all sizes differ by rounding only."""
    sequence = wide_gradients(20)
    if options.startswith("sgd"):
        sequence = sequence.clamp(-10, 10)
    plain, fused = (run(OPTIONS[options], sequence, strategy, "32-true") for strategy in ("auto", "forge"))
    torch.testing.assert_close(fused.weights, plain.weights, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("state_dtype", ["param", "float32"])
@pytest.mark.parametrize("options", OPTIMIZERS)
def test_state_dtype(options: str, state_dtype: Any) -> None:
    """Moments of bf16 weights are stored as the option says, whatever torch's constructor made."""
    strategy = memopt.ForgeStrategy(state_dtype=state_dtype)
    fused = run(OPTIONS[options], random_gradients(2), strategy, "bf16-true")
    dtype = torch.float32 if state_dtype == "float32" else torch.bfloat16
    state = fused.optimizer.state.get(fused.module.net.weight, {})
    moments = {key: value.dtype for key, value in state.items() if value.shape == SHAPE}
    assert set(moments.values()) <= {dtype}
    assert bool(moments) == (options != "sgd")


def test_wide_moments_are_used() -> None:
    """With float32 moments and nearest rounding, a bf16 run equals float32 torch on widened weights."""
    make, sequence = OPTIMIZERS["adamw"], random_gradients(10)
    strategy = memopt.ForgeStrategy(rounding="nearest", state_dtype="float32")
    fused = run(make, sequence, strategy, "bf16-true")
    weight = nn.Parameter(Module(Weight).net.weight.detach().bfloat16().float())
    optimizer = make([weight])
    for gradient in sequence:
        weight.grad = gradient.bfloat16().float()
        optimizer.step()
        weight.data = weight.data.bfloat16().float()
    assert torch.equal(fused.weights["net.weight"].float(), weight.detach())


def test_momentum_from_zero() -> None:
    """A momentum that a schedule raises from zero gets its buffer when it is first needed, as in torch."""

    class Warm(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.optimizers[0].param_groups[0]["momentum"] = min(0.9, 0.3 * batch_idx)

    net = partial(nn.Linear, 8, 8)
    plain, fused = (
        fit(Warm(net, partial(SGD, lr=0.02), square_loss), strategy, vectors(), max_steps=6)
        for strategy in ("auto", "forge")
    )
    torch.testing.assert_close(fused.weights, plain.weights, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- refusals

REFUSED: dict[str, tuple[Any, str]] = {
    "adamw_amsgrad": (partial(AdamW, amsgrad=True), r"AdamW\(amsgrad=True\).*set amsgrad=False"),
    "adam_amsgrad": (partial(Adam, amsgrad=True), r"Adam\(amsgrad=True\)"),
    "adamw_differentiable": (partial(AdamW, differentiable=True), r"AdamW\(differentiable=True\)"),
    "sgd_differentiable": (partial(SGD, lr=0.1, differentiable=True), r"SGD\(differentiable=True\)"),
    "sgd_dampening": (partial(SGD, lr=0.1, momentum=0.9, dampening=0.1), r"SGD\(dampening != 0\).*set dampening=0"),
    "lbfgs": (torch.optim.LBFGS, r"LBFGS has no fused update rule.*Adagrad, Adam, AdamW.*strategy='auto'"),
    "adamax": (torch.optim.Adamax, r"Adamax has no fused update rule"),
    "rprop": (torch.optim.Rprop, r"Rprop has no fused update rule"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """What a rule cannot do exactly is refused at set-up, by the option's or the class's name."""
    make, message = REFUSED[case]
    with pytest.raises(memopt.UnsupportedError, match=message):
        run(make, random_gradients(1), "forge")


def test_capturable_is_refused() -> None:
    """capturable=True is refused as well (torch itself accepts it on the CPU until the first step)."""
    with pytest.raises(memopt.UnsupportedError, match=r"AdamW\(capturable=True\)"):
        run(partial(AdamW, capturable=True), random_gradients(1), "forge")


def test_option_set_later_is_refused() -> None:
    """Options are read at every step: amsgrad switched on in the middle is not ignored."""

    class Later(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.trainer.optimizers[0].param_groups[0]["amsgrad"] = True

    with pytest.raises(memopt.UnsupportedError, match="amsgrad"):
        fit(Later(partial(nn.Linear, 8, 8), loss=square_loss), data=vectors(), max_steps=4)


def test_subclasses_are_not_taken_for_their_base() -> None:
    """A subclass may override `step`, so that its base's rule would be a guess."""

    class Mine(AdamW):
        pass

    with pytest.raises(memopt.UnsupportedError, match=r"Mine is a subclass of AdamW"):
        rule_for(Mine([nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize("optimizer", RULES, ids=lambda cls: cls.__name__)
def test_registry(optimizer: type[Optimizer]) -> None:
    """Every rule is found by its class and names each of its scalars once."""
    rule = RULES[optimizer]
    assert rule.optimizer is optimizer
    instance = optimizer([nn.Parameter(torch.ones(4, 4))], **({"lr": 0.1} if optimizer is SGD else {}))
    assert rule_for(instance) is rule
    assert len(set(rule.scalar_names)) == len(rule.scalar_names)


# ---------------------------------------------------------------- Lion, which torch does not have


def test_lion_by_hand() -> None:
    """Two steps of Lion on one number, by the paper's formula."""
    weight = nn.Parameter(torch.tensor([1.0]))
    lion = memopt.Lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    weight.grad = torch.tensor([2.0])
    lion.step()  # m = 0: sign(0.1 * 2) = 1
    first = 1 * (1 - 0.1 * 0.5) - 0.1
    assert weight.item() == pytest.approx(first)
    assert lion.state[weight]["exp_avg"].item() == pytest.approx(0.02)
    weight.grad = torch.tensor([-0.1])
    assert lion.step(lambda: 3.0) == 3.0  # 0.9 * 0.02 - 0.1 * 0.1 = 0.008 > 0
    assert weight.item() == pytest.approx(first * (1 - 0.1 * 0.5) - 0.1)
    assert lion.state[weight]["exp_avg"].item() == pytest.approx(0.99 * 0.02 - 0.01 * 0.1)


@pytest.mark.parametrize(
    "arguments", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -1.0}]
)
def test_lion_refuses_nonsense(arguments: dict[str, Any]) -> None:
    """Values out of range are an error at construction."""
    with pytest.raises(ValueError, match="out of range"):
        memopt.Lion([nn.Parameter(torch.zeros(1))], **arguments)


@pytest.mark.parametrize("optimizer", [AdamW, NAdam, SGD, memopt.Gefen])
def test_counts_of_many_parameters_are_kept_together(optimizer: type[Optimizer]) -> None:
    """Counting all is counting each, whoever has replaced or moved some counts; a copy counts by itself."""
    params = [nn.Parameter(torch.randn(3)) for _ in range(4)]
    made = optimizer(params, lr=0.1)
    rule, group = rule_for(made), made.param_groups[0]
    states = [rule.init_state(param, group, rule.storage(param, group, torch.float32)) for param in params]

    def count(numbers: list[int]) -> None:
        rule.advance_all([(group, states[i]) for i in numbers])

    def seen() -> list[dict[str, float]]:
        keys = rule.cache_keys(states)
        assert keys == [rule.cache_key(state) for state in states]
        return [{key: float(state[key]) for key in rule.counts} for state in states]

    expected = [{key: state[key].clone() for key in rule.counts} for state in states]
    rule.settle_all(states)
    count([0, 1, 2, 3])
    count([1, 3])
    states[2]["step"] = torch.tensor(7.0, dtype=torch.float64)  # loaded
    copied = copy.deepcopy(states)
    rule.settle_all(states)
    count([0, 1, 2, 3])
    for times, state in zip((2, 3, 2, 3), expected, strict=True):
        for _ in range(times):
            rule.advance(group, state)
    if "step" in rule.counts:
        expected[2]["step"] = torch.tensor(8.0)
        assert [float(state["step"]) for state in copied] == [1, 2, 7, 2]
        assert all(state["step"].dtype == torch.float32 for state in states)
    wanted = [{key: float(value) for key, value in state.items()} for state in expected]
    if "mu_product" not in rule.counts:  # which follows from the step
        assert seen() == wanted
    else:
        assert [state["step"] for state in seen()] == [state["step"] for state in wanted]
