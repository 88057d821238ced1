"""Which parameters decay: matrices, also where FSDP1 has made flat shards of all."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_memopt as memopt
from lightning_memopt.models import LlamaModule
from lightning_memopt.optim.decay import decay_groups


def test_norms_and_biases_do_not_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    module[1].bias.requires_grad = False
    matrices, rest = decay_groups(module)
    assert matrices["params"] == [module[0].weight]
    assert "weight_decay" not in matrices
    assert [id(p) for p in rest["params"]] == [id(module[0].bias), id(module[1].weight)]
    assert rest["weight_decay"] == 0.0


def test_one_part_of_names_is_not_taken_for_its_letters() -> None:
    decaying, spared = memopt.gefen(nn.Linear(3, 3), no_decay="bias").param_groups
    assert [len(group["params"][0].shape) for group in (decaying, spared)] == [2, 1]


def named(module: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    """Names of each group's parameters, as before a part was wrapped."""
    names = {param: name.replace("_fsdp_wrapped_module.", "") for name, param in module.named_parameters()}
    return [[names[param] for param in group["params"]] for group in groups]


def llama() -> LlamaModule:
    module = LlamaModule(hidden_size=16, num_layers=2, num_heads=2, schedule="constant")
    # What no name tells.
    module.net.ln_f = nn.LayerNorm(16)
    return module


@pytest.fixture
def first_of_two() -> Any:
    """A process of two, of which the other one need not be there to shard a module."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def wrap(module: LlamaModule, use_orig_params: bool = True) -> nn.Module:
    """By blocks, and all of it, as Lightning does."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    unit = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP on a CPU, and FSDP1 itself
        layers = module.net.model.layers
        for i, layer in enumerate(layers):
            layers[i] = unit(layer)
        return unit(module)


MAKE: dict[str, Any] = {"model": lambda module: torch.optim.AdamW(decay_groups(module)), "gefen": memopt.gefen}


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("form", ["model", "gefen"])
def test_flat_shards_decay_by_the_shape_they_had(form: str, attached: bool, first_of_two: None) -> None:
    """Under Lightning, whose Trainer has the outermost unit, or given that."""
    plain, module = llama(), llama()
    whole = wrap(module)
    if attached:
        module._trainer = SimpleNamespace(model=whole)  # type: ignore[assignment]
    assert {param.ndim for param in module.parameters()} == {1}
    make = MAKE[form]
    flat, expected = make(module if attached else whole), make(plain)
    assert named(module, flat.param_groups) == named(plain, expected.param_groups)
    assert [len(group["params"]) for group in flat.param_groups] == [16, 7]


def test_flat_shards_of_unknown_shape_are_refused_where_no_name_tells(first_of_two: None) -> None:
    module = llama()
    whole = wrap(module, use_orig_params=False)
    module._trainer = SimpleNamespace(model=whole)  # type: ignore[assignment]
    for make in (module.configure_optimizers, partial(memopt.gefen, module)):
        with pytest.raises(memopt.UnsupportedError, match=r"_flat_param is a flat piece .* use_orig_params=True"):
            make()
    alone = llama()
    wrap(alone)
    with pytest.raises(memopt.UnsupportedError, match="is a flat piece"):  # the Trainer is not known
        alone.configure_optimizers()
