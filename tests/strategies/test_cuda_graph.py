"""The captured step gives the bits of the eager one; what cannot be captured is refused or runs eagerly."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from harness import OPTIMIZERS, Module, fit, next_token_loss, square_loss, tokens, vectors
from torch import nn

import lightning_memopt as memopt
from lightning_memopt.backward import Clip, Updater
from lightning_memopt.backward.ages import StepAges
from lightning_memopt.backward.clipping import NO_CLIP
from lightning_memopt.backward.slot import Slot
from lightning_memopt.callbacks import GradNorm
from lightning_memopt.sparsity.layer import Settings, SparseLayer
from lightning_memopt.sparsity.state import STEPS
from lightning_memopt.strategies import step_graph
from lightning_memopt.strategies.step_graph import EAGER_STEPS, PATIENCE, CaptureError, StepGraph, StepGraphs

GRAPH_RULES = {
    **OPTIMIZERS,
    "adamw8bit": partial(memopt.AdamW8bit, lr=3e-3),
    "gefen": partial(memopt.Gefen, lr=3e-3),
}


class Blocks(nn.Module):
    """An embedding, linear layers with dropout, LayerNorm and a head; wide enough for blocks of codes."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 128)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        self.norm, self.dropout = nn.LayerNorm(128), nn.Dropout(dropout)
        self.head = nn.Linear(128, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return self.head(x)


class Logged(Module):
    """Also logs its loss, as tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


@pytest.mark.parametrize("graph", [True, "auto"])
def test_needs_a_gpu(graph: Any) -> None:
    """On a CPU, True is refused with a sentence that names the way out; "auto" trains eagerly."""
    strategy = memopt.ForgeStrategy(cuda_graph=graph)
    if graph == "auto":
        plain = fit(Module(), "forge", max_steps=3)
        assert all(torch.equal(w, plain.weights[n]) for n, w in fit(Module(), strategy, max_steps=3).weights.items())
        return
    with pytest.raises(memopt.UnsupportedError, match=r"cuda_graph=True needs a CUDA GPU.*'auto'"):
        fit(Module(), strategy)


class WaitsInBackward(torch.autograd.Function):
    """The identity; its backward pass asks the device for a number, or breaks off."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait: Any) -> torch.Tensor:
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        ctx.wait(dy)
        return dy, None


class Deep(nn.Module):
    """Linear layers above and below something whose backward pass cannot be captured."""

    def __init__(self, wait: Any = lambda dy: dy.sum().item()) -> None:
        super().__init__()
        self.below, self.above, self.wait = nn.Linear(8, 8), nn.Linear(8, 8), wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.above(WaitsInBackward.apply(self.below(x), self.wait))


def counts(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(state["step"]) for state in optimizer.state.values()]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that hold nothing: what is captured runs at once, what is replayed does not run."""
    fake = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: None, replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", [fake])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)


def sparse_layers(updater: Updater, growth: Any = "random") -> list[SparseLayer]:
    """Has all matrices that `updater` is attached to be sparse; returns where they will be found."""
    layers: list[SparseLayer] = []

    def sparse(slot: Slot) -> SparseLayer | None:
        if slot.param.dim() != 2:
            return None
        layers.append(SparseLayer(slot, 0.5, Settings(growth, 4, "sqrt", "age", 1, 0)))
        layers[-1].start(None)
        return layers[-1]

    updater.sparsity = sparse
    return layers


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("sparse", [False, True])
def test_a_capture_that_breaks_off_counts_nothing(sparse: bool) -> None:
    """Layers above the place where it broke off were captured, not updated."""
    breaks = [False]

    def wait(dy: torch.Tensor) -> None:
        if breaks[0]:
            raise RuntimeError("not permitted in a capture")

    module = Module(net=partial(Deep, wait))
    optimizer = torch.optim.NAdam(module.parameters(), lr=0.0)
    updater = Updater("nearest", "auto", "raise", "param", 0)
    layers = sparse_layers(updater) if sparse else []
    updater.attach(module, [optimizer])

    def step(batch: torch.Tensor) -> None:
        loss = module.net(batch).sum()
        with updater.backward(loss, queue=False):
            loss.backward()

    batch = torch.ones(2, 8)
    with updater.armed(optimizer, 0):
        breaks[0] = True
        with pytest.raises(CaptureError, match="not permitted"):
            StepGraph(updater, module, batch).capture(step, None)
        breaks[0] = False
        step(batch)
    assert counts(optimizer) == [1.0] * 4
    products = {float(state["mu_product"]) for state in optimizer.state.values()}
    assert len(products) == 1
    assert [layer.state[STEPS] for layer in layers] == [1] * len(layers) and len(layers) == 2 * sparse


@pytest.mark.usefixtures("no_gpu")
def test_a_replay_counts_what_the_capture_did_not() -> None:
    """Steps of parameters, and updates of sparse weights, by which their ages go."""
    module = Module(net=partial(Deep, lambda dy: None))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    updater = Updater("nearest", "auto", "raise", "param", 0)
    layers = sparse_layers(updater)
    updater.attach(module, [optimizer])

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = module.net(batch).sum()
        with updater.backward(loss, queue=False):
            loss.backward()
        updater.finish()
        return loss.detach()

    batch = torch.ones(2, 8)
    graph = StepGraph(updater, module, batch)
    for number in range(3):
        with updater.armed(optimizer, number):
            if number == 0:
                graph.capture(step, None)
                assert [layer.state[STEPS] for layer in layers] == [0, 0] and counts(optimizer) == [0.0] * 4
            graph.replay(batch)
            assert updater.dirty
        assert [layer.state[STEPS] for layer in layers] == [number + 1] * 2
        assert [layer.stepped for layer in layers] == [number] * 2
        assert counts(optimizer) == [number + 1.0] * 4


class Stub:
    """A captured step that is none."""

    made: ClassVar[list[Stub]] = []

    def __init__(self, *_: Any) -> None:
        self.made.append(self)
        self.graph = SimpleNamespace(pool=lambda: None)

    def capture(self, *_: Any) -> None:
        pass


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Stub]:
    """All graphs that were captured, which are stubs."""
    Stub.made.clear()
    monkeypatch.setattr(step_graph, "StepGraph", Stub)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Stub.made


class Thaw(pl.Callback):
    """Freezes a layer at the start, trains it from step 15 on, and puts another one's weight elsewhere in memory."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        module.net.down.requires_grad_(trainer.global_step >= 15)
        if trainer.global_step == 30:
            weight = module.net.up.weight
            weight.data = weight.data.clone()


def test_graphs_are_dropped_when_what_they_hold_changes(captured: list[Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(step_graph, "rank_zero_info", said.append)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[0].requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    updater = Updater("nearest", "auto", "raise", "param", 0)
    updater.attach(module, [optimizer])  # type: ignore[arg-type]
    graphs = StepGraphs(updater, module, strict=True)  # type: ignore[arg-type]

    def steps(clip: Clip = NO_CLIP) -> list[Any]:
        found = []
        for _ in range(EAGER_STEPS + 2):
            with updater.armed(optimizer, 0, clip):
                found.append(graphs.graph_for(1, lambda batch: None))
        return found

    def moved() -> None:
        module[1].weight.data = module[1].weight.data.clone()

    changes = [
        lambda: None,
        lambda: module[0].requires_grad_(True),
        moved,
        lambda: optimizer.param_groups[0].update(momentum=0.9),
        lambda: module[1].bias.requires_grad_(False),
    ]
    for number, change in enumerate(changes, 1):
        change()
        assert steps() == [None] * EAGER_STEPS + [captured[-1]] * 2 and len(captured) == number
    assert not said
    assert steps(Clip(norm=1.0))[:EAGER_STEPS] == [None] * EAGER_STEPS
    assert len(said) == 1 and "leave cuda_graph out" in said[0]
    for _ in range(3):
        moved()
        steps()
    assert len(said) == 1


def test_a_step_that_collects_gradients_runs_eagerly(captured: list[Stub]) -> None:
    """How many are collected is known afterwards only. The graph stays, and serves the steps that follow."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    updater = Updater("nearest", "auto", "raise", "param", 0)
    layers = sparse_layers(updater, "gradient")
    updater.attach(module, [optimizer])  # type: ignore[arg-type]
    graphs = StepGraphs(updater, module, strict=True)  # type: ignore[arg-type]

    def step(number: int) -> Any:
        with updater.armed(optimizer, number):
            graph = graphs.graph_for(1, lambda batch: None)
            loss = module(torch.randn(4, 8)).square().sum()
            with updater.backward(loss, queue=False):
                loss.backward()
        return graph

    assert [step(number) for number in range(EAGER_STEPS)] == [None] * EAGER_STEPS
    graph = step(EAGER_STEPS)
    for number in range(10, 13):
        assert step(number) is graph
        masks = [layer.mask() for layer in layers]
        for layer in layers:
            layer.collect(0.3)
        assert step(number) is None
        for layer, mask in zip(layers, masks, strict=True):
            layer.change(0.3, number, updater.storage(layer.slot))
            assert not torch.equal(layer.mask(), mask)
    assert step(13) is graph and captured == [graph]


def test_a_state_that_is_never_final_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(step_graph, "rank_zero_info", said.append)
    module = nn.ModuleDict({"used": nn.Linear(64, 64), "idle": nn.Linear(64, 64)})
    optimizer = memopt.Gefen(module.parameters(), lr=0.1)
    updater = Updater("nearest", "auto", "raise", "param", 0)
    updater.attach(module, [optimizer])  # type: ignore[arg-type]
    graphs = StepGraphs(updater, module, strict=True)  # type: ignore[arg-type]
    for step in range(PATIENCE + 2):
        with updater.armed(optimizer, step):
            assert graphs.graph_for(1, lambda batch: None) is None
            loss = module["used"](torch.randn(4, 64)).square().sum()
            with updater.backward(loss, queue=False):
                loss.backward()
    (line,) = said
    assert "idle.weight" in line and "Freeze it" in line


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["adamw", "gefen"])
def test_a_graph_follows_layers_that_are_unfrozen_and_weights_that_move(rule: str) -> None:
    eager = run(GRAPH_RULES[rule], False, callbacks=[Thaw()])
    graphed = run(GRAPH_RULES[rule], True, callbacks=[Thaw()])
    assert all(torch.equal(w, graphed.weights[name]) for name, w in eager.weights.items())
    assert counts(eager.optimizer) == counts(graphed.optimizer)


@pytest.mark.gpu
def test_a_backward_pass_that_cannot_be_captured() -> None:
    """A capture that breaks off between two layers leaves weights, states and counts of an eager run."""

    def run(graph: Any) -> Any:
        module = Module(net=Deep, loss=square_loss)
        return fit(module, memopt.ForgeStrategy(cuda_graph=graph), vectors(), max_steps=9, accelerator="gpu")

    eager, automatic = run(False), run("auto")
    assert all(torch.equal(w, automatic.weights[name]) for name, w in eager.weights.items())
    assert counts(eager.optimizer) == counts(automatic.optimizer) == [9.0] * 4


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule that changes the learning rate at every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))


def run(optimizer: Any, graph: Any, **options: Any) -> Any:
    """50 steps on the GPU with dropout, a warm-up, and norm clipping."""
    torch.manual_seed(3)
    module = Logged(net=Blocks, optimizer=optimizer, schedule=warm_up, loss=options.pop("loss", next_token_loss))
    options = {
        "max_steps": 50,
        "max_epochs": 9,
        "accelerator": "gpu",
        "precision": "bf16-true",
        "gradient_clip_val": 0.5,
    } | options
    strategy = memopt.ForgeStrategy(cuda_graph=graph, kernel=options.pop("kernel", "auto"))
    return fit(module, strategy, tokens(25, 64), **options)


def assert_same_run(eager: Any, graphed: Any) -> None:
    """To the last bit, and in all that is counted."""
    assert all(torch.equal(w, graphed.weights[name]) for name, w in eager.weights.items())
    states = zip(eager.optimizer.state.values(), graphed.optimizer.state.values(), strict=True)
    for ours, theirs in states:
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(ours[k]), torch.as_tensor(theirs[k])) for k in ours)
    assert eager.trainer.global_step == graphed.trainer.global_step == 50
    assert eager.trainer.callback_metrics["loss_epoch"] == graphed.trainer.callback_metrics["loss_epoch"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16-true", "32-true", "bf16-mixed"])
@pytest.mark.parametrize("rule", GRAPH_RULES)
def test_same_bits(rule: str, precision: str) -> None:
    """Weights, states, logs and step counts of 50 steps, for every rule."""
    eager = run(GRAPH_RULES[rule], False, precision=precision)
    graphed = run(GRAPH_RULES[rule], True, precision=precision)
    assert_same_run(eager, graphed)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[StepGraph]:
    """The graph of every step that was replayed; one that waits for the GPU fails."""
    replayed: list[StepGraph] = []
    plain = StepGraph.replay

    def replay(self: StepGraph, batch: Any) -> Any:
        replayed.append(self)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(self, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(StepGraph, "replay", replay)
    return replayed


@pytest.mark.gpu
def test_replays_and_does_not_wait(replays: list[StepGraph]) -> None:
    """All but the first steps are replays, and none of them waits for the GPU."""
    run(OPTIMIZERS["adamw"], True, callbacks=[GradNorm()])
    assert len(replays) == 47 and len(set(map(id, replays))) == 1


class Watched(memopt.SMET):
    """Topology updates after steps 10, 20, 30 and 40, in the middle of a run's replays; masks and ages by step."""

    def __init__(self, growth: Any = "random") -> None:
        super().__init__(0.5, update_every=10, warmup_steps=4, stop_at=None, prune_schedule="constant", growth=growth)
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        # Before the update, when ages are those that the step went by.
        self.seen.append({name: ages.cpu() for name, ages in self.ages.items()})
        super().on_train_batch_end(*arguments)


def sparse_run(rule: str, graph: Any, growth: str = "random", **options: Any) -> tuple[Any, Watched]:
    smet = Watched(growth)
    return run(GRAPH_RULES[rule], graph, callbacks=[smet], **options), smet


def assert_same_ages(eager: Watched, graphed: Watched) -> None:
    """In every step; so were the masks, as inactive weights have age 0."""
    for ours, theirs in zip(eager.seen, graphed.seen, strict=True):
        assert ours.keys() == theirs.keys() == {"net.up.weight", "net.down.weight"}
        assert all(torch.equal(ages, theirs[name]) for name, ages in ours.items())
    for name, ages in graphed.seen[-1].items():
        assert ages.unique().tolist() == [0, 10, 20, 30, 40, 50], name


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 0.02])
@pytest.mark.parametrize("growth", ["random", "gradient"])
@pytest.mark.parametrize("rule", ["adamw", "gefen"])
def test_sparse_steps_have_the_same_bits(rule: str, growth: str, clip: Any, replays: list[StepGraph]) -> None:
    """Over four topology updates, with warm-up. One graph serves all steps but those whose gradients are collected."""
    eager, wanted = sparse_run(rule, False, growth, gradient_clip_val=clip)
    assert not replays
    graphed, found = sparse_run(rule, True, growth, gradient_clip_val=clip)
    assert_same_run(eager, graphed)
    assert_same_ages(wanted, found)
    # Gefen has learned its code only when the second step begins.
    first = EAGER_STEPS + (rule == "gefen")
    assert len(replays) == 50 - first - 4 * (growth == "gradient") and len(set(map(id, replays))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rule", "precision"),
    [("adamw", "32-true"), ("nadam", "bf16-mixed"), ("adamw8bit", "bf16-true"), ("gefen", "32-true")],
)
def test_sparse_steps_of_other_rules_and_precisions(rule: str, precision: str) -> None:
    """NAdam's ages have other scalars, AdamW8bit's moments other codes."""
    (eager, wanted), (graphed, found) = (sparse_run(rule, graph, precision=precision) for graph in (False, True))
    assert_same_run(eager, graphed)
    assert_same_ages(wanted, found)


@pytest.mark.gpu
def test_sparse_steps_fused_with_the_matmul() -> None:
    """The other kernel of sparse weights."""
    (eager, wanted), (graphed, found) = (
        sparse_run("adamw", graph, kernel="fused", gradient_clip_val=None) for graph in (False, True)
    )
    assert_same_run(eager, graphed)
    assert_same_ages(wanted, found)


@pytest.mark.gpu
def test_a_sparse_step_begins_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages are computed and copied to the GPU while it is busy with the step before."""
    plain, calls = StepAges.fill, []

    def fill(self: StepAges, slots: Any) -> None:
        calls.append(len(slots))
        torch.cuda.set_sync_debug_mode("error")
        try:
            plain(self, slots)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(StepAges, "fill", fill)
    sparse_run("adamw", True, max_steps=15)
    assert len(calls) == 15


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 0.02])
@pytest.mark.parametrize("graph", [True, "auto"])
def test_sparse_updates_in_plain_torch_cannot_be_captured(graph: Any, clip: Any, replays: list[StepGraph]) -> None:
    """Refused by name, or run eagerly with the bits of an eager run."""
    table = partial(memopt.Gefen, lr=3e-3, codebook="table")
    if graph is True:
        with pytest.raises(CaptureError, match=r"net\.(up|down)\.weight runs in plain torch"):
            run(table, True, callbacks=[Watched()], gradient_clip_val=clip)
        return
    automatic, eager = (run(table, way, callbacks=[Watched()], gradient_clip_val=clip) for way in (graph, False))
    assert_same_run(eager, automatic)
    assert not replays


@pytest.mark.gpu
def test_validation_and_checkpoints_between_replays(tmp_path: Any) -> None:
    """A run that validates, saves and is resumed ends with the bits of one that does not."""
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=25, save_top_k=-1)
    whole = run(OPTIMIZERS["adamw"], True, callbacks=[checkpoint], enable_checkpointing=True)
    torch.manual_seed(3)
    plain = run(OPTIMIZERS["adamw"], True)
    assert all(torch.equal(w, plain.weights[name]) for name, w in whole.weights.items())
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, "auto"])
def test_what_cannot_be_captured(graph: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A loss that waits for the GPU: refused by name, or run eagerly with the bits of an eager run."""

    def waits(net: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = next_token_loss(net, batch)
        return loss * (2.0 if loss.item() > 0 else 1.0)

    if graph is True:
        with pytest.raises(CaptureError, match="cannot be captured"):
            run(OPTIMIZERS["adamw"], True, loss=waits)
        return
    automatic, eager = run(OPTIMIZERS["adamw"], "auto", loss=waits), run(OPTIMIZERS["adamw"], False, loss=waits)
    assert all(torch.equal(w, automatic.weights[name]) for name, w in eager.weights.items())
