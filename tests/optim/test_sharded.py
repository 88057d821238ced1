"""Gefen and AdamW8bit on two ranks: equal replicas, states that are the whole one's rows, and flat shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import lightning_memopt as memopt
from lightning_memopt.rules.gefen import LearnedCodes

STEPS = 6


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(150, 99), nn.Tanh(), nn.Linear(99, 130, bias=False), nn.Tanh(), nn.Linear(130, 7))


def batch(step: int, rank: int | None = None) -> Tensor:
    x = torch.randn(8, 150, generator=torch.Generator().manual_seed(step)) * torch.linspace(0.1, 3, 150)
    return x if rank is None else x.chunk(2)[rank]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None = None, steps: Any = None) -> None:
    for step in steps or range(STEPS):
        optimizer.zero_grad()
        module(batch(step, rank)).square().mean().backward()
        optimizer.step()


def _rank(rank: int, size: int, folder: Path, check: Callable[[int, Path], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    check(rank, folder)
    dist.destroy_process_group()


def on_two_ranks(check: Callable[[int, Path], None], folder: Path, size: int = 2) -> None:
    """Run `check` in two forked processes, or `size`."""
    context = torch.multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process that has threads
        ranks = [context.Process(target=_rank, args=(rank, size, folder, check)) for rank in range(size)]
        for process in ranks:
            process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0


def whole(**options: Any) -> tuple[nn.Module, memopt.Gefen]:
    module = net()
    optimizer = memopt.Gefen(module.parameters(), lr=1e-2, **options)
    train(module, optimizer)
    return module, optimizer


def moment(state: dict[str, Any]) -> Tensor:
    """The first moment of the whole weight."""
    return LearnedCodes("exp_avg").load({key: full(value) for key, value in state.items()}, torch.float32)


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


# ----------------------------------------------------------------------------------------------------------------- DDP
def check_ddp(rank: int, folder: Path) -> None:
    module = nn.parallel.DistributedDataParallel(net())
    optimizer = memopt.Gefen(module.parameters(), lr=1e-2)
    train(module, optimizer, rank)
    torch.save((module.module.state_dict(), optimizer.state_dict()["state"]), folder / f"{rank}.pt")


def test_replicas_stay_equal(tmp_path: Path) -> None:
    on_two_ranks(check_ddp, tmp_path)
    (weights0, states0), (weights1, states1) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(weights0[name], weights1[name]) for name in weights0)
    for i, state in states0.items():
        assert all(torch.equal(state[key], states1[i][key]) for key in state)


# --------------------------------------------------------------------------------------------------------------- FSDP2
def assert_goes_on(
    module: nn.Module, optimizer: Any, again: nn.Module, resumed: Any, rank: int | None, first: int
) -> None:
    """A fresh optimizer that takes over what torch's tools gather takes the same steps from `first` on, to the bit."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    saved = get_optimizer_state_dict(module, optimizer)
    with torch.no_grad():
        for param, value in zip(again.parameters(), module.parameters(), strict=True):
            param.copy_(value)
    set_optimizer_state_dict(again, resumed, saved)
    for one, its in ((module, optimizer), (again, resumed)):
        train(one, its, rank, range(first, first + 3))
    for param, twin in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(param.to_local(), twin.to_local())


def check_fsdp2(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    for codebook in ("curve", "table"):
        plain_module, plain = whole(codebook=codebook)
        module = fully_shard(net())
        optimizer = memopt.Gefen(module.parameters(), lr=1e-2, codebook=codebook)  # type: ignore[arg-type]
        train(module, optimizer, rank)
        for param, twin in zip(module.parameters(), plain_module.parameters(), strict=True):
            apart = (param.full_tensor() - twin).abs()
            # A code that rounds the other way moves its weight by a share of the learning rate, 1e-2.
            assert apart.max() < 1e-3 and apart.mean() < 2e-5
            state, expected = optimizer.state[param], plain.state[twin]
            assert state.keys() == expected.keys()
            if "codebook" in state:
                # A single code that rounds the other way moves the best values of all 255 by a hair.
                assert torch.allclose(state["codebook"], expected["codebook"], atol=1e-4)
                ours, theirs = moment(state), moment(expected)
                assert (ours - theirs).norm() < 0.01 * theirs.norm()
                assert torch.allclose(state["exp_avg_sq"].full_tensor(), expected["exp_avg_sq"], rtol=1e-3)
                if "column_scale" in state:
                    r = state["column_scale"]
                    assert state["column_step"] == 4 and (r - 1).abs().max() > 0.1
                    assert torch.allclose(r, expected["column_scale"], rtol=1e-3)
                    ranks = [torch.empty_like(r) for _ in range(2)]
                    dist.all_gather(ranks, r)
                    assert torch.equal(*ranks)

        # What torch's tools gather is what they scatter, here into a fresh optimizer.
        again = fully_shard(net())
        resumed = memopt.Gefen(again.parameters(), lr=1e-2, codebook=codebook)  # type: ignore[arg-type]
        assert_goes_on(module, optimizer, again, resumed, rank, STEPS)


def check_fewer_rows_than_ranks(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = fully_shard(nn.Linear(5000, 1, bias=False))
    optimizer = memopt.Gefen(module.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        module(torch.ones(2, 5000)).square().mean().backward()
        optimizer.step()
    (state,) = optimizer.state.values()
    assert state["exp_avg"].to_local().shape == (1 - rank, 5000) and state["step"] == 4
    assert state["codebook"] != 0.9 and torch.isfinite(module.weight.full_tensor()).all()


def test_a_rank_may_have_no_rows(tmp_path: Path) -> None:
    on_two_ranks(check_fewer_rows_than_ranks, tmp_path)


def check_bad_rows(rank: int, folder: Path) -> None:
    """Rows that only one rank holds get a gradient that is not finite, for some steps."""
    from torch.distributed.fsdp import fully_shard

    def run(module: nn.Module, optimizer: memopt.Gefen, rank: int | None) -> None:
        for step in range(8):
            optimizer.zero_grad()
            outputs = module(batch(step, rank))
            outputs.square().mean().backward()
            if step in (1, 2, 5):
                for param in module.parameters():
                    grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                    if rank in (None, step % 2) and grad.dim() > 1 and len(param) > 7:
                        grad[-1 if rank is None or rank else 0, 0] = float("nan")
            optimizer.step()

    plain_module, module = net(), fully_shard(net())
    plain = memopt.Gefen(plain_module.parameters(), lr=1e-2)
    optimizer = memopt.Gefen(module.parameters(), lr=1e-2)  # type: ignore[arg-type]
    run(plain_module, plain, None)
    run(module, optimizer, rank)
    for param, twin in zip(module.parameters(), plain_module.parameters(), strict=True):
        state, expected = optimizer.state[param], plain.state[twin]
        assert state["step"] == expected["step"] == (5 if twin.dim() > 1 and len(twin) > 7 else 8)
        if "column_step" in state:
            assert state["column_step"] == expected["column_step"] == 4
        assert torch.isfinite(param.full_tensor()).all()
        assert (param.full_tensor() - twin).abs().mean() < 2e-5


def test_ranks_leave_out_the_same_updates(tmp_path: Path) -> None:
    on_two_ranks(check_bad_rows, tmp_path)


def test_rows_are_sharded_exactly(tmp_path: Path) -> None:
    on_two_ranks(check_fsdp2, tmp_path)


def step_on(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on given gradients, of which some parameters have none and one has a nan, whatever is sharded."""
    for step in steps:
        generator = torch.Generator("cpu").manual_seed(step)
        for i, param in enumerate(module.parameters()):
            grad = torch.randn(param.shape, generator=generator, device="cpu").to(param.dtype)
            if (step, i) == (4, 0):
                grad[0, 0] = float("nan")
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = None if i == step % 5 else grad
        optimizer.step()


def assert_rows_equal(module: nn.Module, optimizer: Any, twins: nn.Module, twin_optimizer: Any) -> None:
    """Weights and states are those of the unsharded twin, to the bit."""
    for param, twin in zip(module.parameters(), twins.parameters(), strict=True):
        assert torch.equal(full(param), twin)
        state, expected = optimizer.state[param], twin_optimizer.state[twin]
        assert state.keys() == expected.keys()
        for key, value in state.items():
            assert value.dtype == expected[key].dtype and torch.equal(full(value), expected[key]), key
            if isinstance(param, DTensor) and key != "step":
                assert value.to_local().shape[0] == param.to_local().shape[0]


def check_adamw8bit(rank: int, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    def begin(kind: Any, sharded: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
        module = net().to(dtype)
        module = fully_shard(module) if sharded else module
        return module, kind(module.parameters(), lr=1e-2)

    for dtype in (torch.float32, torch.bfloat16):
        plain_module, plain = begin(memopt.AdamW8bit, False, dtype)
        module, optimizer = begin(memopt.AdamW8bit, True, dtype)
        step_on(plain_module, plain, range(STEPS))
        with torch.device("meta"):  # a default that is not the weights' device
            step_on(module, optimizer, range(STEPS))
        assert any(state["exp_avg"].dtype == torch.uint8 for state in optimizer.state.values())
        assert_rows_equal(module, optimizer, plain_module, plain)
        resumed = memopt.AdamW8bit(module.parameters(), lr=1e-2)
        saved = get_optimizer_state_dict(module, optimizer)
        for param in module.parameters():  # torch's tool begins with a step of its own where there are none
            param.grad = None
        set_optimizer_state_dict(module, resumed, saved)
        step_on(plain_module, plain, range(STEPS, STEPS + 3))
        step_on(module, resumed, range(STEPS, STEPS + 3))
        assert_rows_equal(module, resumed, plain_module, plain)
    # The moments of torch's AdamW, sharded, become codes.
    pairs = []
    for one, adamw in (begin(torch.optim.AdamW, sharded) for sharded in (False, True)):
        step_on(one, adamw, range(3))
        pairs.append((one, memopt.AdamW8bit(one.parameters())))
        pairs[-1][1].load_state_dict(adamw.state_dict())
    assert_rows_equal(*pairs[1], *pairs[0])


def test_codes_of_rows_are_sharded_exactly(tmp_path: Path) -> None:
    on_two_ranks(check_adamw8bit, tmp_path)


def check_rows_of_rows(rank: int, folder: Path) -> None:
    """FSDP2 shards the rows that tensor parallelism has left to a rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def begin(make: Any) -> tuple[nn.Module, Any]:
        module = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(module, mesh=mesh["dp"])
        return module, make(module.parameters(), lr=1e-2)

    for make in (memopt.Gefen, memopt.AdamW8bit):
        (module, optimizer), twins = begin(make), net()
        reference = make(twins.parameters(), lr=1e-2)  # type: ignore[operator]
        for one, its in ((module, optimizer), (twins, reference)):
            train(one, its, steps=range(9))
        for param, twin in zip(module.parameters(), twins.parameters(), strict=True):
            apart = (full(param.detach()) - twin).abs()
            assert apart.max() < 1e-3 and apart.mean() < 2e-5
        again, resumed = begin(make)
        assert_goes_on(module, optimizer, again, resumed, None, 9)


def test_rows_of_rows_are_sharded(tmp_path: Path) -> None:
    on_two_ranks(check_rows_of_rows, tmp_path, size=4)


def check_addends(rank: int, folder: Path) -> None:
    """Replicated weights and a batch that is sharded: each rank's gradient is an addend, as DTensor leaves it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (2,))
    for make in (memopt.Gefen, memopt.AdamW8bit, memopt.Lion):
        for shape in ((96, 64), (8, 8)):
            torch.manual_seed(0)
            start = torch.randn(shape)
            param, twin = nn.Parameter(distribute_tensor(start, mesh, [Replicate()])), nn.Parameter(start.clone())
            optimizer, reference = make([param], lr=1e-2), make([twin], lr=1e-2)  # type: ignore[operator]
            for _ in range(STEPS):
                x = torch.randn(8, shape[1])
                optimizer.zero_grad()
                loss = nn.functional.linear(distribute_tensor(x, mesh, [Shard(0)]), param).square().mean()
                loss.full_tensor().backward()
                assert param.grad.placements[0].is_partial()
                optimizer.step()
                reference.zero_grad()
                nn.functional.linear(x, twin).square().mean().backward()
                reference.step()
            # A code that rounds the other way moves its weight by a share of the learning rate.
            assert (param.to_local() - twin).abs().max() < 1e-3
            ranks = [torch.empty(shape) for _ in range(2)]
            dist.all_gather(ranks, param.to_local().detach().contiguous())
            assert torch.equal(*ranks)


def test_addends_of_gradients_are_summed(tmp_path: Path) -> None:
    on_two_ranks(check_addends, tmp_path)


# --------------------------------------------------------------------------------------------------------------- FSDP1
def flattened(use_orig_params: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP on a CPU, and FSDP1 itself
        return FullyShardedDataParallel(net(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def told_in_training(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[str]:
    """What was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(module, optimizer, rank)
    return [str(warning.message) for warning in told]


def check_fsdp1(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (True, False):
        module = flattened(use_orig_params)
        optimizer = memopt.Gefen(module.parameters(), lr=1e-2)
        assert sum("cannot be resharded" in said for said in told_in_training(module, optimizer, rank)) == 1
        with pytest.raises(memopt.UnsupportedError, match="cannot be resharded or gathered"):
            FullyShardedDataParallel.optim_state_dict(module, optimizer)
        coded = [state for state in optimizer.state.values() if "codebook" in state]
        assert coded and all(state["exp_avg"].shape[0] == 1 for state in coded)
        reference, _ = whole()
        with FullyShardedDataParallel.summon_full_params(module):
            for param, twin, start in zip(module.parameters(), reference.parameters(), net().parameters(), strict=True):
                # Blocks begin elsewhere and, in one flat parameter, biases share them with weights.
                if twin.numel() >= 4096:
                    assert (param - twin).norm() < 0.5 * (twin - start).norm()


def test_flat_shards_train_with_blocks_inside_and_say_that_they_cannot_be_resharded(tmp_path: Path) -> None:
    on_two_ranks(check_fsdp1, tmp_path)


def check_flat_vectors(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = flattened(use_orig_params=True)
    optimizer = memopt.AdamW8bit(module.parameters(), lr=1e-2)
    told = told_in_training(module, optimizer, rank)
    assert sum("moments stay float32, 8 bytes per weight" in said for said in told) == 1
    reference = net()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2))
    with FullyShardedDataParallel.summon_full_params(module):
        for param, twin in zip(module.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(param, twin, atol=1e-5)


def test_flat_shards_keep_whole_moments_and_say_so(tmp_path: Path) -> None:
    on_two_ranks(check_flat_vectors, tmp_path)


def test_column_shards_are_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        param = nn.Parameter(distribute_tensor(torch.zeros(64, 128), init_device_mesh("cpu", (1,)), [Shard(1)]))
        param.grad = torch.zeros_like(param)
        for kind in (memopt.Gefen, memopt.AdamW8bit):
            with pytest.raises(memopt.UnsupportedError, match="sharded by rows"):
                kind([param]).step()
    finally:
        dist.destroy_process_group()
