"""The compatibility table: every refused row is provoked, every row is well-formed, and the page shows the table."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, Module, assert_equal_runs, fit, square_loss, vectors
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

import lightning_memopt as memopt
from lightning_memopt.compat import CASES, page, refusal
from lightning_memopt.kernels import sparse

ROOT = Path(__file__).parents[1]
Linear = partial(nn.Linear, 8, 8)


def train(module: Any = None, strategy: Any = "forge", **options: Any) -> None:
    """Two steps of some module on vectors."""
    module = module or Module(Linear, loss=square_loss)
    fit(module, strategy, vectors(), **{"max_steps": 2} | options)


def optimizer(make: Any) -> Callable[[], None]:
    return lambda: train(Module(Linear, make, square_loss))


# ---------------------------------------------------------------- modules that provoke a refusal


class OwnClipping(Module):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pass


class ClipsTwice(Module):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="value")
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")


class ZeroesInPlace(Module):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class NeverZeroes(Module):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        pass


class SometimesZeroes(Module):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx != 3:
            optimizer.zero_grad()


class ClipsInAnotherHook(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class OwnClipGradients(Module):
    def clip_gradients(self, optimizer: Any, **_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def listed_twice(params: Any) -> Any:
    params = list(params)
    return torch.optim.AdamW([*params, params[0]])


class ChangesClip(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.trainer.gradient_clip_val = 0.5


def catches(module: Any, optimizer: Any, x: Tensor) -> None:
    with memopt.fused_step(optimizer, gradient_clip_val=1.0), contextlib.suppress(RuntimeError):
        module.manual_backward(raises_between(module.net, [x]))
    optimizer.step()


def catches_outside(module: Any, optimizer: Any, x: Tensor) -> None:
    """And goes on without a step."""
    with contextlib.suppress(RuntimeError), memopt.fused_step(optimizer):
        module.manual_backward(raises_between(module.net, [x]))


class Untrained(Module):
    def configure_optimizers(self) -> Any:
        return None


class CatchesErrors(Module):
    """A hook between the two layers raises, when one of them is updated."""

    def backward(self, loss: Tensor) -> None:
        try:
            loss.backward()
        except RuntimeError:
            self.zero_grad()


def raises_between(net: Any, batch: list[Tensor]) -> Tensor:
    inner = net[0](batch[0])

    def error(_: Tensor) -> None:
        raise RuntimeError("between")

    inner.register_hook(error)
    return net[1](inner).square().mean()


def two_layers() -> nn.Module:
    return nn.Sequential(Linear(), Linear())


class Manual(Module):
    """Manual optimization; `hand` is the training step."""

    def __init__(self, hand: Callable[[Any, Any, Tensor], None], net: Callable[[], nn.Module] = Linear) -> None:
        super().__init__(net)
        self.automatic_optimization, self.hand = False, hand

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.hand(self, self.optimizers(), batch[0])


def forgets(module: Any, optimizer: Any, x: Tensor) -> None:
    module.manual_backward(module(x).sum())
    optimizer.step()


def clips_late(module: Any, optimizer: Any, x: Tensor) -> None:
    with memopt.fused_step(optimizer):
        module.manual_backward(module(x).sum())
    module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


def opens_twice(module: Any, optimizer: Any, x: Tensor) -> None:
    for _ in range(2):
        with memopt.fused_step(optimizer):
            pass


def goes_back_twice(module: Any, optimizer: Any, x: Tensor) -> None:
    with memopt.fused_step(optimizer):
        module.manual_backward(module(x).sum())
        module.manual_backward(module(x).sum())


def detached(net: Any, batch: list[Tensor]) -> Tensor:
    return net[1](nn.functional.linear(net[0](batch[0]), net[1].weight.detach())).square().mean()


def narrow_weight(dtype: torch.dtype) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8))
    net.extra = nn.Parameter(torch.zeros(3, dtype=dtype))
    return net


def aliased() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight.data = net[0].weight.data
    return net


def halves_in_place(net: Any, batch: list[Tensor]) -> Tensor:
    """The gradient of the inner sum is also that of the second layer's output."""
    inner = net[0](batch[0])
    total = inner + net[1](torch.tanh(batch[0]))
    inner.register_hook(lambda g: g.mul_(0.5))
    return total.square().mean()


class OtherPrecision(MixedPrecision):
    """A precision plugin of the user's own."""


def sparse_embedding() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Embedding(4, 8, sparse=True))


def captured(module: Any = None, nonfinite: Any = "raise", **options: Any) -> None:
    """Set-up of a run with ``cuda_graph=True`` as on a GPU; the check comes before anything touches the device."""
    strategy: Any = memopt.ForgeStrategy(cuda_graph=True, nonfinite=nonfinite)
    trainer = pl.Trainer(**(QUIET | options), strategy=strategy)  # type: ignore[arg-type]
    strategy.connect(module or Module(Linear))
    with mock.patch.object(memopt.ForgeStrategy, "root_device", torch.device("cuda", 0)):
        strategy.setup_optimizers(trainer)


def captured_in_torch() -> None:
    """The update of a sparse weight that no kernel takes, while a graph is captured."""
    update: Any = SimpleNamespace(name="net.weight", weight=torch.zeros(2, 2))
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        sparse.apply(update, (), torch.zeros(2, 2), "reference")


def other_optimizer() -> None:
    """Adam's checkpoint resumed with SGD."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "adam.ckpt")
        adam = fit(Module(Linear, torch.optim.Adam, square_loss), "forge", vectors(), max_steps=1)
        adam.trainer.save_checkpoint(path)
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        fit(Module(Linear, sgd, square_loss), "forge", vectors(), max_steps=2, ckpt_path=path)


def folder_on_one_device() -> None:
    """What a sharded run writes, resumed with one device's strategy."""
    with tempfile.TemporaryDirectory() as folder:
        fit(Module(Linear, loss=square_loss), "forge", vectors(), max_steps=2, ckpt_path=folder)


class OwnAdamW(torch.optim.AdamW):
    """A subclass, which might step otherwise."""


def two_owners() -> None:
    """Two optimizers with the same parameters."""

    class Shared(Manual):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(2)]

    train(Shared(forgets))


# Feature -> what provokes it; a pattern of the message where the table's text only describes it.
SCENARIOS: dict[str, Callable[[], None] | tuple[Callable[[], None], str]] = {
    "weight.detach() used beside its layer": (
        lambda: train(Module(lambda: nn.Sequential(Linear(), Linear()), loss=detached)),
        r"use weight\.detach\(\)\.clone",
    ),
    "configure_gradient_clipping without self.clip_gradients": lambda: train(OwnClipping(Linear, loss=square_loss)),
    "self.clip_gradients called twice in one step": lambda: train(ClipsTwice(Linear, loss=square_loss)),
    "zero_grad(set_to_none=False)": lambda: train(ZeroesInPlace(Linear, loss=square_loss)),
    "optimizer_zero_grad that keeps gradients": lambda: train(NeverZeroes(Linear, loss=square_loss)),
    "gradient_clip_val changed in a step": lambda: train(ChangesClip(Linear, loss=square_loss), gradient_clip_val=1.0),
    "self.clip_gradients in another hook": lambda: train(ClipsInAnotherHook(Linear, loss=square_loss)),
    "an error in the backward pass that the module catches": lambda: train(
        CatchesErrors(two_layers, loss=raises_between)
    ),
    "gradients that are NaN or infinite": (
        lambda: train(Module(Linear, loss=lambda net, batch: square_loss(net, batch) * math.inf)),
        "(?i)nan|infinite|finite",
    ),
    # Given by its plugin: Lightning turns the flag into bf16-mixed on a CPU.
    "precision 16-mixed": lambda: train(plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]),
    "precision 16-true": lambda: train(precision="16-true"),
    "other precision plugins": lambda: train(plugins=[OtherPrecision("bf16-mixed", "cpu")]),
    "manual optimization without fused_step": lambda: train(Manual(forgets)),
    "clip_gradients after fused_step": lambda: train(Manual(clips_late)),
    "second fused_step before optimizer.step()": lambda: train(Manual(opens_twice)),
    "several devices": lambda: train(devices=2),
    "optimizer options amsgrad, capturable, differentiable": (
        optimizer(partial(torch.optim.Adam, amsgrad=True)),
        r"^Adam\(amsgrad=True\) cannot be fused; set amsgrad=False",
    ),
    "SGD with dampening and momentum": (
        optimizer(partial(torch.optim.SGD, momentum=0.9, dampening=0.5)),
        r"^SGD\(dampening != 0\) cannot be fused; set dampening=0",
    ),
    "configure_optimizers that returns None": lambda: train(Untrained(Linear, loss=square_loss)),
    "optimizer without a rule": (
        optimizer(torch.optim.Adamax),
        r"torch\.optim\.adamax\.Adamax has no fused update rule\. Use one of .*AdamW.*SGD",
    ),
    "subclass of an optimizer with a rule": (
        optimizer(OwnAdamW),
        r"OwnAdamW is a subclass of AdamW, which may step in another way.* Use AdamW itself",
    ),
    "a checkpoint folder on one device": folder_on_one_device,
    "float16 or complex parameters": (
        lambda: train(Module(partial(narrow_weight, torch.float16))),
        r"net\.extra is float16; fused updates need float32, bfloat16 or float64",
    ),
    "sparse embedding gradients": lambda: train(Module(sparse_embedding)),
    "kernel 'fused' on a CPU": lambda: train(strategy=memopt.ForgeStrategy(kernel="fused")),
    "a second backward pass in one fused step": (
        lambda: train(Manual(goes_back_twice)),
        r"net\.(weight|bias) received another gradient after its update in step 0",
    ),
    "cuda_graph without a GPU": lambda: train(strategy=memopt.ForgeStrategy(cuda_graph=True)),
    "cuda_graph with SMET in plain torch": (captured_in_torch, r"the update of net\.weight runs in plain torch"),
    "cuda_graph in manual optimization": lambda: captured(Manual(forgets)),
    "cuda_graph with accumulate_grad_batches": lambda: captured(accumulate_grad_batches=2),
    "cuda_graph with nonfinite='skip' and norm clipping": lambda: captured(nonfinite="skip", gradient_clip_val=1.0),
    "a checkpoint of another optimizer": other_optimizer,
    "two parameters in one memory (b.data = a.data)": (
        lambda: train(Module(aliased, loss=square_loss)),
        r"net\.0\.weight and net\.1\.weight are two parameters in the same memory",
    ),
    "a layer's output gradient changed in place after its use (g.mul_ in a hook)": (
        lambda: train(Module(lambda: nn.Sequential(Linear(), Linear()), loss=halves_in_place), gradient_clip_val=1.0),
        r"the gradient of the output of net\.1\.weight's layer was changed in place",
    ),
    "a parameter twice in one optimizer": optimizer(listed_twice),
    "a parameter in two optimizers": (two_owners, r"net\.weight belongs to two optimizers"),
}
REFUSED = {case.feature: case.message for case in CASES if case.verdict == "refused"}


@pytest.mark.parametrize("feature", SCENARIOS)
def test_refusal(feature: str) -> None:
    """The row's error is raised, and says what the table says."""
    scenario = SCENARIOS[feature]
    provoke, pattern = scenario if isinstance(scenario, tuple) else (scenario, re.escape(REFUSED[feature]))
    with pytest.raises(memopt.MemOptError, match=pattern):
        provoke()


def clips_in_closure(module: Any, optimizer: Any, x: Tensor) -> None:
    def closure() -> None:
        optimizer.zero_grad()
        module.manual_backward(module(x).sum())
        module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    optimizer.step(closure=closure)


@pytest.mark.parametrize(
    ("feature", "module"),
    [("optimizer_zero_grad that keeps gradients", lambda: SometimesZeroes(Linear, loss=square_loss)),
     ("configure_gradient_clipping without self.clip_gradients", lambda: OwnClipGradients(Linear, loss=square_loss)),
     ("clip_gradients after fused_step", lambda: Manual(clips_in_closure)),
     ("an error in the backward pass that the module catches", lambda: Manual(catches, two_layers)),
     ("an error in the backward pass that the module catches", lambda: Manual(catches_outside, two_layers)),
     ("a parameter twice in one optimizer", lambda: ListsLater(Linear, loss=square_loss))],
)  # fmt: skip
def test_other_ways_to_the_same_refusal(feature: str, module: Callable[[], Any]) -> None:
    """Gradients that are kept in the fourth step only, and clipping that would find none."""
    with pytest.raises(memopt.UnsupportedError, match=re.escape(REFUSED[feature])):
        train(module(), max_steps=6)


class ListsLater(Module):
    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 2:
            self.trainer.optimizers[0].param_groups[0]["params"].append(self.net.weight)


class Counts(Module):
    """Its hook needs what a run sets up, as many do."""

    def on_train_start(self) -> None:
        self.zeroed = 0

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zeroed += 1
        self.log("zeroed", float(self.zeroed))
        for param in self.parameters():
            param.grad = None


def test_an_overridden_optimizer_zero_grad_runs_as_often_as_in_a_plain_run() -> None:
    counts = []
    for strategy in ("auto", "forge"):
        train(module := Counts(Linear, loss=square_loss), strategy, accumulate_grad_batches=2, max_steps=3)
        counts.append(module.zeroed)
        assert all(param.grad is None for param in module.parameters()) or strategy == "auto"
    assert counts == [3, 3]


def test_a_hook_that_fails_leaves_no_gradient_behind() -> None:
    """Nor anything that the next run of the same Trainer would be blamed for."""

    class Fails(Module):
        def optimizer_zero_grad(self, *_: Any) -> None:
            raise ValueError("mine")

    trainer = pl.Trainer(strategy="forge", max_steps=2, **QUIET)
    module = Fails(Linear, loss=square_loss)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(module, vectors())
    assert all(param.grad is None for param in module.parameters())
    assert not {"zero_grad", "optimizer_zero_grad"} & set(vars(module))
    trainer.fit(Module(Linear, loss=square_loss), vectors())


def test_a_module_may_zero_in_a_way_of_its_own() -> None:
    class Zeroes(Module):
        def zero_grad(self) -> None:  # type: ignore[override]
            super().zero_grad()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.zero_grad()
            copy.deepcopy(self.net).zero_grad(set_to_none=False)
            return super().training_step(batch, batch_idx)

    assert_equal_runs(partial(Zeroes, Linear, loss=square_loss), data=vectors, max_steps=4)


def test_zeroing_by_the_module_drops_earlier_micro_batches() -> None:
    class Zeroes(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % 4 == 2:
                self.zero_grad()
            return super().training_step(batch, batch_idx)

    make = partial(Zeroes, Linear, loss=square_loss)
    assert_equal_runs(make, data=vectors, max_steps=4, accumulate_grad_batches=4)


def hooked() -> Module:
    module = Module(Linear, loss=square_loss)
    module.on_after_backward = lambda: None
    return module


class ManualHook(Manual):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


def fuses(module: Any, optimizer: Any, x: Tensor) -> None:
    with memopt.fused_step(optimizer):
        module.manual_backward(module(x).sum())
    optimizer.step()


@pytest.mark.parametrize(
    ("module", "callbacks"),
    [(hooked, []), (lambda: ManualHook(fuses), []),
     (Module, [LambdaCallback(on_before_optimizer_step=lambda *_: None)])],
    ids=["attribute", "manual", "callback"],
)  # fmt: skip
def test_hooks_that_find_no_gradients_are_warned_of(module: Any, callbacks: list[Any]) -> None:
    """However they came to be hooks."""
    with pytest.warns(UserWarning, match="finds no gradients"):
        fit(module(), "forge", vectors() if module is not Module else None, max_steps=1, callbacks=callbacks)


@pytest.mark.parametrize("feature", REFUSED)
def test_every_refused_row_is_provoked(feature: str) -> None:
    """A refused row needs a scenario here or, for a part with tests of its own, its name in one of those."""
    others = (path for path in ROOT.glob("tests/**/*.py") if path != Path(__file__))
    assert feature in SCENARIOS or any(feature.lower() in path.read_text().lower() for path in others)


def test_scenarios_are_rows() -> None:
    """A scenario of a row that is gone, or no longer refused, is out of date."""
    assert set(SCENARIOS) <= set(REFUSED)


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_each_refused_option_is_named(option: str) -> None:
    """The row on optimizer options names three; each is refused by its name."""
    with pytest.raises(memopt.UnsupportedError, match=rf"AdamW\({option}=True\)"):
        optimizer(partial(torch.optim.AdamW, **{option: True}))()


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64], ids=["float16", "complex64"])
def test_each_refused_dtype_is_named(dtype: torch.dtype) -> None:
    """The row on parameter types names two."""
    with pytest.raises(memopt.UnsupportedError, match=rf"net\.extra is {str(dtype)[6:]}"):
        train(Module(partial(narrow_weight, dtype)))


RESUMED = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-3),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "lion": partial(memopt.Lion, lr=1e-3),
    "adamw8bit": partial(memopt.AdamW8bit, lr=1e-3),
    "gefen": partial(memopt.Gefen, lr=1e-3),
}
# Adam and AdamW keep the same; what the 8-bit optimizers take over is converted.
MAY_FOLLOW = {("adam", "adamw"), ("adamw", "adam"), *product(("adam", "adamw"), ("adamw8bit", "gefen"))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each optimizer."""
    folder, paths = tmp_path_factory.mktemp("saved"), {}
    for name, make in RESUMED.items():
        paths[name] = folder / f"{name}.ckpt"
        net = partial(nn.Linear, 128, 128)
        run = fit(Module(net, make, square_loss), "forge", vectors(128), max_steps=3)
        run.trainer.save_checkpoint(paths[name])
    return paths


@pytest.mark.parametrize("after", RESUMED)
@pytest.mark.parametrize("before", RESUMED)
def test_a_checkpoint_of_another_optimizer(before: str, after: str, saved: dict[str, Path]) -> None:
    """Every pair goes on as it should, or is refused by the row's message."""
    module = Module(partial(nn.Linear, 128, 128), RESUMED[after], square_loss)
    resume = partial(fit, module, "forge", vectors(128), max_steps=5, ckpt_path=saved[before])
    if before == after or (before, after) in MAY_FOLLOW:
        assert resume().trainer.global_step == 5
    else:
        with pytest.raises(memopt.UnsupportedError, match=re.escape(REFUSED["a checkpoint of another optimizer"])):
            resume()


@pytest.mark.parametrize(
    ("make", "option"),
    [(partial(torch.optim.SGD, lr=1e-3, momentum=0.9), "momentum"),
     (partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True), "centered")],
)  # fmt: skip
def test_a_moment_that_was_switched_off_is_no_other_optimizer_s(make: Any, option: str, tmp_path: Path) -> None:
    """It stays in the state, and in the checkpoint; so does what someone put there."""

    class SwitchedOff(Module):
        def on_train_batch_start(self, *_: Any) -> None:
            if self.global_step == 1:
                optimizer = self.trainer.optimizers[0]
                optimizer.param_groups[0][option] = type(optimizer.param_groups[0][option])(0)
                optimizer.state[self.net.weight]["mine"] = torch.ones(1)

    run = fit(SwitchedOff(Linear, make, square_loss), "forge", vectors(), max_steps=3)
    run.trainer.save_checkpoint(tmp_path / "off.ckpt")
    again = fit(Module(Linear, make, square_loss), "forge", vectors(), max_steps=5, ckpt_path=tmp_path / "off.ckpt")
    assert again.trainer.global_step == 5


def transposed() -> nn.Module:
    net = aliased()
    net[1].weight.data = net[0].weight.data.t()
    return net


def frozen_alias() -> nn.Module:
    net = aliased()
    net[1].requires_grad_(False)
    return net


@pytest.mark.parametrize("make", [transposed, frozen_alias])
def test_other_parameters_in_one_memory(make: Any) -> None:
    with pytest.raises(memopt.UnsupportedError, match="are two parameters in the same memory"):
        train(Module(make, loss=square_loss))


def test_several_machines_are_refused() -> None:
    """Each would train a model of its own."""
    with pytest.raises(memopt.UnsupportedError, match=r"^num_nodes=2: strategy 'forge' trains on one device"):
        train(num_nodes=2)


def test_refused_types_may_be_frozen() -> None:
    """Only parameters that train must have a supported type."""

    def frozen() -> nn.Module:
        net = narrow_weight(torch.float16)
        net.extra.requires_grad_(False)
        return net

    run = fit(Module(frozen, loss=lambda net, batch: net[0](batch[0]).square().mean()), data=vectors(), max_steps=2)
    assert not torch.equal(run.weights["net.0.weight"], Module(frozen).net[0].weight)


def test_parameter_of_two_optimizers() -> None:
    """Two optimizers may not share a parameter: its name is in the message."""

    class Two(Manual):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(memopt.UnsupportedError, match=r"net\.weight belongs to two optimizers"):
        train(Two(forgets))


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_options_without_effect_are_said(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """foreach and fused choose torch kernels that are not used; the log says so."""
    said: list[str] = []
    monkeypatch.setattr("lightning_memopt.strategies.mixin.rank_zero_info", said.append)
    optimizer(partial(torch.optim.AdamW, **{option: True}))()
    assert f"AdamW({option}=True) has no effect: the update is fused." in said


@pytest.mark.parametrize("make", [memopt.AdamW8bit, memopt.Gefen])
def test_overruled_options_are_said(make: Any) -> None:
    """The strategy's rounding and seed hold; other ones of the optimizer are warned of, equal ones are not."""
    options = {"rounding": "nearest", "seed": 3}
    with pytest.warns(UserWarning, match="has no effect: .* of strategy 'forge' holds") as said:
        optimizer(partial(make, **options))()
    for option in (r"rounding='nearest'", "seed=3"):
        assert sum(option in str(warning.message) for warning in said) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no effect")
        train(Module(Linear, partial(make, **options), square_loss), memopt.ForgeStrategy(**options))
        train(Module(Linear, make, square_loss), memopt.ForgeStrategy(**options))


@pytest.mark.parametrize(
    "arguments",
    [
        {"cuda_graph": "yes"},
        {"rounding": "up"},
        {"kernel": "fast"},
        {"nonfinite": "ignore"},
        {"state_dtype": "bfloat16"},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_unknown_choices(arguments: dict[str, Any]) -> None:
    """A misspelt choice is named together with the valid ones."""
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=rf"{name}='{value}' is not one of "):
        memopt.ForgeStrategy(**arguments)


def test_a_refused_run_leaves_a_plain_module() -> None:
    """After a refusal at set-up the module trains plainly, as if nothing had happened."""
    module = Module(Linear, partial(torch.optim.AdamW, amsgrad=True), square_loss)
    with pytest.raises(memopt.UnsupportedError):
        train(module)
    assert "forward" not in module.net.__dict__
    assert not module.net.weight.__dict__
    plain = fit(module, "auto", vectors(), max_steps=3)
    fresh = fit(Module(Linear, partial(torch.optim.AdamW, amsgrad=True), square_loss), "auto", vectors(), max_steps=3)
    assert torch.equal(plain.weights["net.weight"], fresh.weights["net.weight"])


# ---------------------------------------------------------------- the table and its page


def test_rows() -> None:
    """Features are unique, and each row says something."""
    features = [case.feature for case in CASES]
    assert len(set(features)) == len(features)
    for case in CASES:
        assert case.message and case.optimizers and "|" not in case.feature + case.message


def test_refusal_names_place_and_way_out() -> None:
    """The error of a row begins with where it happened and holds the row's message."""
    error = refusal("several devices", "devices=2")
    assert str(error) == f"devices=2: {REFUSED['several devices']}"
    assert isinstance(error, ValueError)
    with pytest.raises(AssertionError):
        refusal("frozen parameters")


def test_page_is_current() -> None:
    """docs/compatibility.md is what ``python -m lightning_memopt.compat`` prints."""
    assert (ROOT / "docs" / "compatibility.md").read_text() == page()


def test_page_lists_every_row() -> None:
    """One line for each row, which begins with the feature and ends with verdict and message."""
    lines = [line for line in page().splitlines() if line.startswith("| ")][1:]  # without the heading
    rows = [line for line in lines if not line.startswith("| ---")]
    assert len(rows) == len(CASES)
    for case, line in zip(CASES, rows, strict=True):
        assert line.startswith(f"| {case.feature} |") and line.endswith(f"| {case.verdict} | {case.message} |")
