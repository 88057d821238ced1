"""This package's optimizers where torch's own would be used: loading, hooks, groups, torch's surroundings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adamax, AdamW, NAdam, Optimizer

import lightning_memopt as memopt
from lightning_memopt.optim import AdamW8bit, Gefen, Lion

OURS = (Gefen, AdamW8bit, Lion)
CODED = (Gefen, AdamW8bit)


def weight() -> nn.Parameter:
    """Large enough for codes."""
    return nn.Parameter(torch.randn(128, 64, generator=torch.Generator().manual_seed(0)))


def take_steps(optimizer: Optimizer, steps: int = 5, seed: int = 0, step_by: Callable[[], Any] | None = None) -> None:
    """Steps on gradients that depend on the parameter's name, or else its place, and the step.

    `step_by` takes a step in place of ``optimizer.step``.
    """
    for step in range(steps):
        for group in optimizer.param_groups:
            for place, param in enumerate(group["params"]):
                name = group["param_names"][place] if "param_names" in group else str(place)
                generator = torch.Generator().manual_seed(100 * step + seed + ord(name[-1]))
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        (step_by or optimizer.step)()


def copied(state: Any) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


# ------------------------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("make", [*OURS, AdamW])
def test_a_hook_that_renumbers_states_is_followed(make: Any) -> None:
    """Torch's own recipe for parameters in another order."""
    first = make([("a", weight()), ("b", weight())])
    take_steps(first)
    second = make([("b", weight()), ("a", weight())])

    def renumber(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        (old,), (new,) = saved["param_groups"], optimizer.param_groups
        states = {i: saved["state"][old["param_names"].index(name)] for i, name in enumerate(new["param_names"])}
        return {"state": states, "param_groups": [old | {"param_names": new["param_names"]}]}

    seen = []
    second.register_load_state_dict_pre_hook(renumber)
    second.register_load_state_dict_post_hook(lambda it: seen.extend(copied(state) for state in it.state.values()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    (mine,), (theirs,) = second.param_groups, first.param_groups
    states = [second.state[mine["params"][1 - i]] for i in range(2)]
    for state, param, at_hook in zip(states, theirs["params"], reversed(seen), strict=True):
        for key, value in first.state[param].items():
            assert torch.equal(state[key], value) and torch.equal(at_hook[key], value), key


@pytest.mark.parametrize("make", OURS)
def test_entries_of_the_users_own_are_kept(make: Any) -> None:
    optimizer = make([weight()])
    (param,) = optimizer.param_groups[0]["params"]
    optimizer.state[param]["mine"] = torch.arange(3)
    again = make([weight()])
    again.load_state_dict(optimizer.state_dict())  # before a step
    take_steps(again)
    fresh = make([nn.Parameter(again.param_groups[0]["params"][0].detach().clone())])
    fresh.load_state_dict(again.state_dict())
    for one in (again, fresh):
        (state,) = one.state.values()
        assert state["mine"].tolist() == [0, 1, 2] and "exp_avg" in state
    take_steps(again)
    take_steps(fresh)
    assert torch.equal(again.param_groups[0]["params"][0], fresh.param_groups[0]["params"][0])


FOREIGN = {
    "nadam": NAdam, "adamax": Adamax, "sgd": SGD, "momentum": partial(SGD, momentum=0.9), "lion": Lion,
    "gefen": Gefen, "adamw8bit": AdamW8bit, "adamw": AdamW,
    "amsgrad": partial(AdamW, amsgrad=True),
}  # fmt: skip
# AdamW's state becomes codes, and 8-bit codes have none of Gefen's codebooks.
TAKEN = {Gefen: ("gefen", "adamw"), AdamW8bit: ("adamw8bit", "adamw"), Lion: ("lion",)}


@pytest.mark.parametrize("other", FOREIGN)
@pytest.mark.parametrize("make", OURS)
def test_foreign_states_are_refused_and_change_nothing(make: Any, other: str) -> None:
    saved = FOREIGN[other]([weight()], lr=0.5)
    take_steps(saved)
    optimizer, twin = make([weight()], lr=1e-3), make([weight()], lr=1e-3)
    take_steps(optimizer, 2)
    take_steps(twin, 2)
    if other in TAKEN[make]:
        optimizer.load_state_dict(saved.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.5
        return
    with pytest.raises(memopt.UnsupportedError):
        optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    take_steps(optimizer, 3, seed=7)
    take_steps(twin, 3, seed=7)
    assert torch.equal(optimizer.param_groups[0]["params"][0], twin.param_groups[0]["params"][0])


@pytest.mark.parametrize("make", CODED)
@pytest.mark.parametrize("coded", [False, True])
def test_states_of_another_shape_are_refused(make: Any, coded: bool) -> None:
    """As many elements do not make a moment that of this weight."""
    saved = (make if coded else AdamW)([nn.Parameter(torch.randn(64, 128))])
    take_steps(saved)
    optimizer = make([weight()])
    with pytest.raises(memopt.UnsupportedError, match=r"\(64, 128\)"):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state


@pytest.mark.parametrize("make", OURS)
def test_a_loaded_group_is_checked_and_other_entries_are_kept(make: Any) -> None:
    saved = make([weight()])
    take_steps(saved)
    given = saved.state_dict()
    given["state"]["everyone"] = {"mine": 1}
    optimizer = make([weight()], lr=1e-3)
    with pytest.raises(ValueError, match="out of range"):
        optimizer.load_state_dict({**given, "param_groups": [{**given["param_groups"][0], "lr": -1.0}]})
    assert optimizer.param_groups[0]["lr"] == 1e-3 and not optimizer.state
    optimizer.load_state_dict(given)
    assert optimizer.state["everyone"] == {"mine": 1}
    (param,) = optimizer.param_groups[0]["params"]
    for key, value in optimizer.state[param].items():  # steps here do not change what was given
        assert torch.equal(value, given["state"][0][key]) and value.data_ptr() != given["state"][0][key].data_ptr()


# -------------------------------------------------------------------------------------------------------------- groups
@pytest.mark.parametrize("make", CODED)
def test_options_of_a_group_outlive_a_checkpoint_that_has_none(make: Any) -> None:
    adamw = AdamW([weight()], lr=0.5, foreach=False, capturable=False)
    take_steps(adamw)
    optimizer = make([{"params": [weight()], "rounding": "nearest", "seed": 7}])
    optimizer.load_state_dict(adamw.state_dict())
    (group,) = optimizer.param_groups
    assert (group["rounding"], group["seed"], group["lr"]) == ("nearest", 7, 0.5)
    assert not {"foreach", "fused", "capturable"} & group.keys()


@pytest.mark.parametrize(
    ("make", "option"),
    [(Gefen, {"block": 100}), (Gefen, {"block": 0}), (Gefen, {"max_block": 100}), (Gefen, {"codebook": "tabel"})]
    + [(make, {"rounding": "Nearest"}) for make in CODED]
    + [(make, {"lr": -1.0}) for make in OURS],
)
def test_options_of_groups_are_checked(make: Any, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{make.__name__}: "):
        make([{"params": [weight()], **option}])
    optimizer = make([weight()])
    with pytest.raises(ValueError, match=f"{make.__name__}: "):
        optimizer.add_param_group({"params": [weight()], **option})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("make", OURS)
def test_a_group_may_maximize(make: Any) -> None:
    up, down = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = make([{"params": [up], "maximize": True}, {"params": [down]}], lr=0.1, weight_decay=0.0)
    for param in (up, down):
        param.grad = torch.ones(3)
    optimizer.step()
    assert up.tolist() == pytest.approx([0.1] * 3) and torch.equal(up, -down)


@pytest.mark.parametrize("make", OURS)
def test_what_the_rule_does_not_know_is_refused(make: Any) -> None:
    param = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(memopt.UnsupportedError, match="is complex"):
        make([param]).step()
    table = nn.Embedding(4, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        make(table.parameters()).step()
    param = weight()
    param.grad = torch.ones_like(param)
    with pytest.raises(memopt.UnsupportedError, match="amsgrad"):
        make([{"params": [param], "amsgrad": True}]).step()


# -------------------------------------------------------------------------------------------------------- surroundings
@pytest.mark.parametrize("make", OURS)
def test_another_default_device_or_dtype_does_not_matter(make: Any) -> None:
    """The meta device stands for a GPU."""
    plain, other = make([weight()]), make([weight()])
    take_steps(plain)

    def step() -> None:
        try:
            torch.set_default_dtype(torch.float16)
            with torch.device("meta"):
                other.step()
        finally:
            torch.set_default_dtype(torch.float32)

    take_steps(other, step_by=step)
    (state,), (expected,) = other.state.values(), plain.state.values()
    assert {key: (value.dtype, value.device) for key, value in state.items()} == {
        key: (value.dtype, value.device) for key, value in expected.items()
    }
    assert torch.equal(other.param_groups[0]["params"][0], plain.param_groups[0]["params"][0])


@pytest.mark.parametrize("make", OURS)
def test_a_compiled_step_is_the_step(make: Any) -> None:
    torch._dynamo.reset()
    plain, compiled = make([weight()]), make([weight()])
    take_steps(plain)
    take_steps(compiled, step_by=torch.compile(compiled.step, backend="aot_eager"))
    assert torch.allclose(compiled.param_groups[0]["params"][0], plain.param_groups[0]["params"][0], atol=1e-6)
