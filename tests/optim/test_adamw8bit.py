"""AdamW8bit as an optimizer of its own: learning, memory, dead weights, checkpoints."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import lightning_memopt as memopt
from lightning_memopt.optim import AdamW8bit
from lightning_memopt.rules.storage_8bit import PositiveCodes


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 128, generator=generator)
    x[:, 5] = 0  # a dead input
    return x, torch.tanh(x @ torch.randn(128, 64, generator=generator) / 8)


def train(net, optimizer, steps, seed=2) -> float:
    x, y = make_data()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(0, 512, (64,), generator=generator)
        optimizer.zero_grad()
        (net(x[batch].to(net[0].weight.dtype)).float() - y[batch]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        return (net(x.to(net[0].weight.dtype)).float() - y).square().mean().item()


def test_learns_as_adamw_does() -> None:
    exact, coded = make_net(), make_net()
    wanted = train(exact, torch.optim.AdamW(exact.parameters(), lr=3e-3), 300)
    actual = train(coded, AdamW8bit(coded.parameters(), lr=3e-3), 300)
    assert actual < 1.1 * wanted + 1e-4 < 0.05


def test_bf16_weights_keep_learning() -> None:
    exact, coded = make_net(), make_net().bfloat16()
    wanted = train(exact, torch.optim.AdamW(exact.parameters(), lr=1e-3), 300)
    assert train(coded, AdamW8bit(coded.parameters(), lr=1e-3), 300) < 1.5 * wanted


def test_bytes_per_weight() -> None:
    net = nn.Linear(1024, 512)
    optimizer = AdamW8bit(net.parameters())
    net(torch.randn(2, 1024)).sum().backward()
    optimizer.step()
    held = sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())
    assert held <= 2.1 * sum(p.numel() for p in net.parameters())
    assert optimizer.state[net.weight]["exp_avg"].dtype == torch.uint8
    assert optimizer.state[net.bias]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_weights_without_gradient_never_move(rounding) -> None:
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(64, 200))
    start = weight.detach().clone()
    optimizer = AdamW8bit([weight], lr=0.1, weight_decay=0, rounding=rounding)
    dead = torch.zeros(64, 200, dtype=torch.bool)
    dead[3], dead[:, 17], dead[::5, 4::7] = True, True, True
    for step in range(200):
        scale = 10.0 ** (step % 7 - 3)
        weight.grad = (torch.randn(64, 200) * scale).masked_fill(dead, 0)
        optimizer.step()
    assert torch.equal(weight[dead], start[dead])
    # No live weight leaps either, as one divided by a vanished second moment would.
    assert (weight - start)[~dead].abs().max() < 200 * 0.1 * 5


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_second_moments_follow_the_gradient(rounding) -> None:
    """Their mean is AdamW's while gradients stay alike, and after they have fallen to a tenth."""
    torch.manual_seed(4)
    coded, exact = (nn.Parameter(torch.zeros(64, 128)) for _ in range(2))
    optimizers = AdamW8bit([coded], lr=0, rounding=rounding), torch.optim.AdamW([exact], lr=0)
    for step in range(900):
        coded.grad = exact.grad = torch.randn(64, 128) * (1.0 if step < 500 else 0.1)
        for optimizer in optimizers:
            optimizer.step()
        if step in (499, 899):
            moment = PositiveCodes("exp_avg_sq").load(optimizers[0].state[coded], torch.float32)
            assert moment.mean() == pytest.approx(float(optimizers[1].state[exact]["exp_avg_sq"].mean()), rel=0.02)


def test_small_and_large_gradients_share_a_block() -> None:
    """A second moment far below its block's scale still bounds the step to about lr."""
    weight = nn.Parameter(torch.zeros(32, 128))
    optimizer = AdamW8bit([weight], lr=1e-3, weight_decay=0)
    scale = torch.logspace(-6, 0, 128)
    for _ in range(50):
        before = weight.detach().clone()
        weight.grad = scale * torch.sign(torch.randn(32, 128) + 0.5)
        optimizer.step()
        assert (weight - before).abs().max() < 3.5e-3


def test_resumes_bitwise() -> None:
    net = make_net()
    optimizer = AdamW8bit([{"params": net[0].parameters(), "lr": 2e-3}, {"params": net[2].parameters()}])
    train(net, optimizer, 10)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(net)
    resumed = AdamW8bit([{"params": other[0].parameters()}, {"params": other[2].parameters()}])
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for param, copied in zip(net.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[param].items():
            loaded = resumed.state[copied][key]
            assert torch.equal(value, loaded) and value.dtype == loaded.dtype
    train(net, optimizer, 10, seed=4)
    train(other, resumed, 10, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_loading_does_not_share_memory() -> None:
    net = make_net()
    optimizer = AdamW8bit(net.parameters())
    train(net, optimizer, 1)
    saved = optimizer.state_dict()
    before = saved["state"][0]["exp_avg"].clone()
    other = copy.deepcopy(net)
    resumed = AdamW8bit(other.parameters())
    resumed.load_state_dict(saved)
    train(other, resumed, 1)
    assert torch.equal(saved["state"][0]["exp_avg"], before)


@pytest.mark.parametrize("make", [AdamW8bit, memopt.Gefen])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_takes_nothing_over_from_sgd(make: type[torch.optim.Optimizer], momentum: float) -> None:
    """Not even if it kept no state: its learning rate would be taken for AdamW's."""
    net = make_net()
    other = torch.optim.SGD(net.parameters(), 0.1, momentum)
    train(net, other, 1)
    optimizer = make(net.parameters())
    with pytest.raises(memopt.UnsupportedError, match=r"'betas': .*another one saved it"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3 and not optimizer.state


def test_takes_over_from_adamw() -> None:
    net = make_net()
    exact = torch.optim.AdamW(net.parameters())
    train(net, exact, 10)
    coded = AdamW8bit(net.parameters())
    coded.load_state_dict(exact.state_dict())
    state = coded.state[net[0].weight]
    assert state["exp_avg"].dtype == torch.uint8 and state["step"] == 10
    largest = exact.state[net[0].weight]["exp_avg"].abs().amax()
    assert largest <= state["exp_avg_scale"].amax() <= largest * (1 + 2**-7)
    train(net, coded, 2)


def test_groups_are_live_and_closures_run() -> None:
    net = make_net()
    optimizer = AdamW8bit(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    before = net[0].weight.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(make_data()[0]).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert torch.equal(net[0].weight, before)
    scheduler.step()
    assert copy.deepcopy(optimizer).param_groups[0]["rounding"] == "stochastic"


def test_non_finite_gradients_change_nothing() -> None:
    net = make_net()
    optimizer = AdamW8bit(net.parameters())
    train(net, optimizer, 1)
    before, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state[net[0].weight])
    net[0].weight.grad[3, 4] = float("nan")
    optimizer.step()
    assert torch.equal(net[0].weight, before["0.weight"])
    assert all(torch.equal(optimizer.state[net[0].weight][key], value) for key, value in state.items())


@pytest.mark.parametrize("bad", [{"lr": -1}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"rounding": "up"}])
def test_refuses_arguments_out_of_range(bad) -> None:
    with pytest.raises(ValueError, match="AdamW8bit"):
        AdamW8bit([nn.Parameter(torch.zeros(1))], **bad)


def test_refuses_sparse_gradients() -> None:
    layer = nn.Embedding(100, 64, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW8bit(layer.parameters()).step()
