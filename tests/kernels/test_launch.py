"""Repeated launches reach the launcher with the arguments of ordinary ones, and only while nothing has changed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import BF16, INTERPRETED, make_update
from sparse_cases import sparsify

from lightning_memopt.kernels import dispatch
from lightning_memopt.kernels.memory import CAPACITY, Memory, factors_key, gradient_key

triton = pytest.importorskip("triton")
hopper = pytest.importorskip("lightning_memopt.kernels.fused_hopper", exc_type=ImportError)
# Whether the launcher takes the kernel's arguments as a list, from Triton 3.7 on.
LISTED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


class Launcher:
    """Triton's own launcher, but for the compiled function at its end: that one notes its arguments."""

    def __init__(self, source, metadata) -> None:
        from triton.backends.nvidia import driver as nvidia

        self.global_scratch_size, self.profile_scratch_size = 0, 0
        described = getattr(metadata, "tensordesc_meta", None)
        # Like a function of a compiled module, this one cannot be looked into.
        self.launch = nvidia.wrap_handle_tensordesc(Driver.launched.append_all, dict(source.signature), described)

    def __call__(self, *arguments) -> None:
        first, hooks, own = arguments[:5], arguments[5:9], arguments[9:]
        if LISTED:
            self.launch(*first, False, False, *hooks, None, None, [], b"", own)
        else:
            self.launch(*first, False, False, None, None, *hooks, *own)


class Launched(list):
    def append_all(self, *arguments) -> None:
        self.append(arguments)


class Driver:
    """A Hopper GPU that does nothing."""

    launcher_cls, launched, stream, device = Launcher, Launched(), 7, 0

    def __init__(self) -> None:
        from triton.backends.nvidia import driver as nvidia

        self.map_python_to_cpp_type = nvidia.ty_to_cpp
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 2, 100, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 227 * 1024},
            **dict.fromkeys(["fill_tma_descriptor", "fill_tma_descriptor_tiled"], lambda *taken: ("map", *taken)),
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, _) -> int:
        return self.stream

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def launched(monkeypatch):
    """What reached the launcher, of all launches."""
    from triton.runtime import driver

    from lightning_memopt.kernels import sparse_slab

    kernels = (hopper.weight_gradient_update, _flat().flat_update, sparse_slab.slab_update)
    for kernel in kernels:
        kernel.device_caches.clear()
    Driver.launched.clear()
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 4)
    monkeypatch.setattr(driver, "_active", Driver())
    yield Driver.launched
    for kernel in kernels:
        kernel.device_caches.clear()


def _flat():
    from lightning_memopt.kernels import flat

    return flat


def plain(arguments) -> list:
    """Addresses for tensors; without launch metadata and hooks."""
    hooks = slice(8, 11) if LISTED else slice(10, 13)

    def value(x):
        if isinstance(x, (tuple, list)):
            return tuple(value(part) for part in x)
        return x.data_ptr() if isinstance(x, torch.Tensor) else x

    return [*map(value, arguments[: hooks.start]), *map(value, arguments[hooks.stop :])]


def factors(tokens: int, rows: int, columns: int):
    return torch.randn(tokens, rows).to(BF16), torch.randn(tokens, columns).to(BF16)


@compiles
@pytest.mark.parametrize("rule", ["adamw", "gefen"])
def test_a_repeated_launch_is_an_ordinary_one(rule, launched) -> None:
    from lightning_memopt.kernels import launch, tuning

    update = make_update(rule, (256, 192), "cpu", BF16)
    config = tuning.default(update, 512)
    call = hopper.call(update, *factors(512, 256, 192), config)
    repeat = launch.prepare(call, call.run())
    assert repeat is not None and len(launched) == 1, "preparing launches nothing"
    for tokens in (512, 96):
        dy, x = factors(tokens, 256, 192)
        dy = torch.nn.functional.pad(dy, (0, 8))[:, :256]  # rows further apart
        Driver.stream = tokens
        assert repeat(dy, x)
        hopper.call(update, dy, x, config).run()
        repeated, ordinary = launched[-2:]
        assert plain(repeated) == plain(ordinary)
        assert repeated[3] == tokens, "the stream of now"
        assert plain(repeated) != plain(launched[0])
    assert len(hopper.weight_gradient_update.device_caches[0][0]) == 1, "one kernel serves all"


@compiles
def test_a_repeated_flat_launch_is_an_ordinary_one(launched) -> None:
    from lightning_memopt.kernels import blocks, launch

    flat, update = _flat(), make_update("adamw8bit", (64, 100), "cpu", BF16)
    call = flat.call(update, torch.zeros(64, 100), blocks.arguments(update))
    repeat = launch.prepare(call, call.run())
    grad = torch.zeros(64, 100)
    assert repeat is not None and repeat(grad)
    flat.call(update, grad, blocks.arguments(update)).run()
    assert plain(launched[-2]) == plain(launched[-1])
    assert len(flat.flat_update.device_caches[0][0]) == 1


@compiles
@pytest.mark.parametrize("rule", ["adamw", "gefen"])
def test_a_repeated_sparse_launch_is_an_ordinary_one(rule, launched) -> None:
    """With the gradient and the ages of another step, but not where other tensors have moved."""
    from lightning_memopt.kernels import sparse_slab

    update = replace(sparsify(make_update(rule, (40, 200), "cpu", BF16), torch.rand(40, 200) < 0.5), memory=Memory())
    steps, names = [], update.active.ages.names
    for row_key in (update.row_key, update.row_key, update.row_key.clone()):
        update.row_key, update.state["smet_steps"] = row_key, len(steps)
        update.active.ages.table = torch.rand(256 * (1 + len(names)) + 4)
        for start, rows in ((0, 24), (24, 16)):
            grad = torch.zeros(rows, 200)
            steps.append(update.memory.recall(update, (start, rows, names, gradient_key(grad, "slab"))) is not None)
            sparse_slab.apply(update, grad, start)
            sparse_slab.call(update, grad, start).run()
            assert plain(launched[-2]) == plain(launched[-1])
    assert steps == [False, False, True, True, False, False]
    assert len(sparse_slab.slab_update.device_caches[0][0]) == 1


@compiles
def test_profilers_and_other_devices_take_the_ordinary_way(launched, monkeypatch) -> None:
    from lightning_memopt.kernels import blocks, launch

    flat, update = _flat(), make_update("sgd", (64,), "cpu", BF16)
    grad = torch.zeros(64)
    call = flat.call(update, grad, blocks.arguments(update))
    compiled = call.run()
    repeat = launch.prepare(call, compiled)
    assert repeat is not None
    count = len(launched)
    with monkeypatch.context() as other:
        other.setattr(Driver, "device", 1)
        assert not repeat(grad)
    hooks = triton.knobs.runtime.launch_enter_hook
    listen = lambda metadata: None  # noqa: E731
    hooks.add(listen)
    try:
        assert not repeat(grad)
    finally:
        hooks.remove(listen)
    assert len(launched) == count and repeat(grad) and len(launched) == count + 1
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    assert launch.prepare(call, compiled) is None


def changes(update):
    """Everything that a prepared launch depends on, changed one at a time: updates, and states changed in place."""
    state = dict(update.state)
    yield "weight", replace(update, weight=update.weight.clone())
    yield "shape", replace(update, weight=update.weight.view(-1, 128))
    yield "offset", replace(update, offset=update.offset + 1)
    yield "rounding", replace(update, rounding="nearest")
    yield "tile", replace(update, tile="lion")
    yield "row", replace(update, row=update.row.clone())
    yield "key", replace(update, row_key=update.row_key.clone())
    yield "flag", replace(update, nonfinite=update.nonfinite.clone())
    yield "coupled decay", replace(update, scalars={**update.scalars, "l2": 0.1})
    yield "storage", replace(update, storage=update.storage[:1])
    for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq"):
        yield key, replace(update, state={**state, key: state[key].clone()})
    yield "dtype", replace(update, state={**state, "exp_avg_sq": state["exp_avg_sq"].view(torch.int32)})
    yield "codebook", replace(update, state={**state, "codebook": state["codebook"].clone()})
    yield "learning", replace(update, state={**state, "exp_avg_histogram": torch.zeros(4)})


def test_any_change_forgets_launches() -> None:
    update = make_update("gefen", (64, 256), "cpu", BF16)
    names = []
    for name, changed in changes(update):
        memory = Memory()
        assert memory.recall(update, "key") is None
        memory.keep("key", lambda: True)
        assert memory.recall(update, "key") is not None, "nothing changed"
        assert memory.recall(update, "another") is None
        assert memory.recall(changed, "key") is None, name
        assert memory.recall(update, "key") is None, f"{name}: forgotten for good"
        names.append(name)
    assert len(names) == len(set(names)) == 16


def test_memory_is_bounded() -> None:
    update, memory = make_update("sgd", (4, 64), "cpu"), Memory()
    memory.recall(update, 0)
    for key in range(3 * CAPACITY):
        memory.keep(key, lambda: True)
    assert len(memory._launches) <= CAPACITY


def test_keys_tell_apart_what_kernels_are_compiled_for() -> None:
    whole = torch.zeros(130)
    assert gradient_key(whole[:128], "auto") != gradient_key(whole[1:129], "auto"), "alignment"
    assert gradient_key(whole, "auto") != gradient_key(whole[::2], "auto"), "strides"
    assert gradient_key(whole, "auto") != gradient_key(whole.bfloat16(), "auto")
    dy, x = factors(8, 64, 64)
    assert factors_key(dy, x, "auto") != factors_key(dy, x, "fused")
    assert factors_key(dy, x, "auto") != factors_key(dy[:4], x[:4], "auto")
    assert factors_key(dy, x, "auto") != factors_key(dy.float(), x, "auto")


def test_tma_reads_rows_of_their_own() -> None:
    dy, _ = factors(8, 64, 64)
    assert hopper.readable(dy) and hopper.readable(dy[:, :40]) and hopper.readable(dy[:1])
    assert not hopper.readable(dy[:1].expand(8, 64)), "one row for all tokens"
    assert not hopper.readable(dy.flatten().as_strided((8, 64), (32, 1))), "rows that overlap"
    assert not hopper.readable(dy.t()) and not hopper.readable(dy[:, 1:])


def test_dispatch_repeats_what_is_remembered() -> None:
    update = replace(make_update("adamw", (64, 64), "cpu"), memory=Memory())
    assert update.memory is not None
    weight, (dy, x) = update.weight.clone(), factors(8, 64, 64)
    seen: list[tuple] = []
    update.memory.recall(update, None)
    update.memory.keep(factors_key(dy, x, "auto"), lambda *operands: not seen.append(operands))
    assert dispatch.apply_factors(update, [(dy, x)], None, "auto")
    assert len(seen) == 1 and seen[0][0] is dy and torch.equal(update.weight, weight)
    # Sums of several uses, stored parts and rows of the weight are none of it.
    dispatch.apply_factors(update, [(dy, x), (dy, x)], None, "auto")
    dispatch.apply_factors(update, [(dy, x)], torch.zeros(64, 64), "auto")
    assert len(seen) == 1 and not torch.equal(update.weight, weight)
    assert update.rows(0, 8).memory is None
    # A launch that declines has done nothing, so the update is taken another way.
    update.memory.keep(gradient_key(weight, "auto"), lambda grad: False)
    before = update.weight.clone()
    assert dispatch.apply_gradient(update, weight, "auto") and not torch.equal(update.weight, before)


def test_a_standing_update_is_compared_once() -> None:
    """Not again until another update of the parameter came between, even one that was never used itself."""
    memory = Memory()
    first = replace(make_update("adamw", (64, 64), "cpu"), memory=memory)
    first.standing = True
    memory.recall(first, "key")
    memory.keep("key", lambda: True)
    moved = replace(first, weight=first.weight.clone())
    assert memory.recall(first, "key") is not None and not moved.standing
    moved.standing = True
    assert memory.recall(moved, "key") is None, "compared at its first use"
    memory.keep("key", lambda: False)
    assert memory.recall(moved, "key") is not None
    assert memory.recall(first, "key") is None, "the launch is the other one's"
