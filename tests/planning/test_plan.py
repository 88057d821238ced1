"""The planner against arithmetic, against recorded peaks, and at the command line."""

import csv
import json
from functools import cache, partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import nn

import lightning_memopt as memopt
from lightning_memopt.cli import main
from lightning_memopt.errors import MemOptError
from lightning_memopt.models import LlamaModule
from lightning_memopt.planning.methods import METHODS, stepped
from lightning_memopt.planning.planner import on_meta, parse_memory
from lightning_memopt.planning.result import RESERVE
from lightning_memopt.planning.trace import trace
from lightning_memopt.run_config import RunConfig

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "bench"
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30


class Layers(pl.LightningModule):
    """Linear layers on float32 vectors, all sizes multiples of the allocator's."""

    def __init__(self, width=256, depth=3):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


WEIGHT = 256 * 256 * 4  # bytes of one layer
ROWS = 128
TENSOR = ROWS * 256 * 4  # bytes of one activation


def traced(route, **options):
    module = Layers().to("meta")
    return trace(module, torch.randn(ROWS, 256), route, **options)


def test_forward_keeps_the_input_of_every_layer():
    # The batch itself does not count: it is there anyway. The sum is one number, in 512 bytes.
    peak = max(sample.activations for sample in traced("fused").samples)
    assert 3 * TENSOR <= peak <= 4 * TENSOR + 2048


def test_the_last_steps_gradients_stay_through_the_forward_pass():
    # Lightning's optimizer closure frees them just before the backward pass.
    assert traced("stored").samples[0].gradients == 3 * WEIGHT
    assert traced("fused").samples[0].gradients == traced("released").samples[0].gradients == 0


def test_gradients_stay_only_where_they_are_stored():
    assert traced("stored").end.gradients == 3 * WEIGHT
    assert sum(traced("released").end) == sum(traced("fused").end) == 0


def test_deferred_factors_wait_and_shared_storage_counts_once():
    end = traced("deferred").end
    # dY of three layers and x of the last two; the first x is the batch. The last dY is an expanded number.
    assert 4 * TENSOR <= end.factors <= 5 * TENSOR
    assert end.gradients == 0


def test_factors_beyond_the_gradient_are_folded():
    module = Layers().to("meta")
    end = trace(module, torch.randn(4096, 256), "deferred").end
    assert (end.gradients, end.factors) == (3 * WEIGHT, 0)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_wait_in_the_weights_precision(micro_batches):
    module = Layers().to("meta", torch.bfloat16)
    end = trace(module, torch.randn(4096, 256, dtype=torch.bfloat16), "deferred", micro_batches=micro_batches).end
    assert (end.gradients, end.factors) == (3 * 256 * 256 * 2, 0)
    rows = torch.randn(4096, 256, dtype=torch.bfloat16)
    assert trace(module, rows, "deferred", micro_batches=micro_batches, wide=True).end.gradients == 3 * WEIGHT


@pytest.mark.parametrize("state_dtype", ["param", "float32"])
def test_the_strategys_precision_of_state_is_planned(state_dtype):
    strategy = memopt.ForgeStrategy(state_dtype=state_dtype)
    module, batch = Layers(), torch.randn(4096, 256)
    plan = memopt.plan(module, batch, methods=["forge_adamw"], precision="bf16-true", strategy=strategy)
    itemsize = {"param": 2, "float32": 4}[state_dtype]
    own, other = (plan[key].bytes.optimizer_state for key in ("configured", "forge_adamw"))
    assert own == pytest.approx(2 * 3 * 256 * 256 * itemsize, rel=1e-3)
    assert other == pytest.approx(2 * 3 * 256 * 256 * 2, rel=1e-3)


def test_checkpointing_shrinks_activations():
    net = LlamaModule(hidden_size=64, num_layers=4, num_heads=2).to("meta")
    batch = {"input_ids": torch.zeros(2, 64, dtype=torch.int64), "targets": torch.zeros(2, 64, dtype=torch.int64)}
    plain = trace(net, batch, "fused")
    again = trace(net, batch, "fused", checkpoint=["*.layers.*"])
    assert sum(again.peak()) < 0.6 * sum(plain.peak())
    mixed = trace(net, batch, "fused", checkpoint=["*.layers.*"], autocast=torch.bfloat16)
    assert sum(mixed.peak()) < sum(trace(net, batch, "fused", autocast=torch.bfloat16).peak())
    assert all("forward" not in module.__dict__ for module in net.modules())


def test_attention_is_counted_as_a_fused_kernel_keeps_it():
    def peak(length):
        net = LlamaModule(hidden_size=64, num_layers=2, num_heads=2).to("meta")
        ids = torch.zeros(1, length, dtype=torch.int64)
        return sum(trace(net, {"input_ids": ids, "targets": ids}, "fused").peak())

    assert peak(4096) == pytest.approx(2 * peak(2048), rel=0.05)  # the plain formula would grow fourfold


def test_mixed_precision_keeps_copies_of_weights_and_small_activations():
    batch = torch.randn(ROWS, 256)
    module = Layers().to("meta")
    mixed = trace(module, batch, "stored", autocast=torch.bfloat16)
    forward_end = mixed.samples[0]
    full = max(sample.activations for sample in trace(module, batch, "stored").samples)
    assert forward_end.activations >= 3 * WEIGHT // 2  # bf16 copies of three weights
    assert trace(module, batch, "fused", autocast=torch.bfloat16).peak().activations < full


def test_state_and_scratch_of_torch_are_those_of_its_own_step():
    module = Layers(depth=8).to("meta")
    groups = [{"params": list(module.parameters())}]
    single = stepped(partial(torch.optim.AdamW, foreach=False), module, groups)
    foreach = stepped(partial(torch.optim.AdamW, foreach=True), module, groups)
    assert single.state == foreach.state == 2 * 8 * WEIGHT
    assert single.scratch <= 3 * WEIGHT
    assert foreach.scratch >= 8 * WEIGHT  # the roots of all second moments at once


@pytest.mark.parametrize(
    ("method", "per_weight"),
    [
        ("adamw", 8),
        ("bnb_adamw8bit", 2 + 8 / 256),
        ("forge_adamw", 8),
        ("forge_adamw8bit", 2 + 8 / 128),
        ("forge_gefen", 1 + 8 / 128 + 4 / 256),
        ("forge_lion", 4),
        ("forge_sgd", 0),
    ],
)
def test_state_per_weight(method, per_weight):
    module = Layers().to("meta")
    holds = METHODS[method].holds(module, [{"params": list(module.parameters())}])
    assert holds.state == pytest.approx(3 * 256 * 256 * per_weight, rel=0.01)


def test_smet_keeps_state_for_active_weights():
    module = Layers().to("meta")
    groups = [{"params": list(module.parameters())}]
    dense, sparse = (METHODS[name].holds(module, groups).state for name in ("forge_adamw", "forge_adamw_smet"))
    per_layer = dense / 3
    bookkeeping = 256 * 256 * (1 / 8 + 4 / 128 + 1 / 4)
    # The last layer is the head, which stays dense.
    assert sparse == pytest.approx(per_layer + 2 * (per_layer / 4 + bookkeeping), rel=0.01)


def test_a_plan_for_a_module_leaves_it_alone_and_names_what_fits():
    module = Layers()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    memory = RESERVE + 11 * WEIGHT
    found = memopt.plan(module, torch.randn(ROWS, 256), memory=memory, methods=["adamw", "forge_adamw"])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    plain, forge = found["adamw"], found["forge_adamw"]
    assert plain.bytes.total >= 12 * WEIGHT > memory - RESERVE  # weights, gradients and two moments
    assert not plain.fits and forge.fits
    assert plain.largest_batch == 0
    assert forge.largest_batch >= ROWS
    grown = memopt.plan(module, torch.randn(forge.largest_batch, 256), memory=memory, methods=["forge_adamw"])
    assert grown["forge_adamw"].fits
    more = memopt.plan(module, torch.randn(forge.largest_batch + 16, 256), memory=memory, methods=["forge_adamw"])
    assert not more["forge_adamw"].fits


def test_sharding_divides_weights_and_state():
    module, batch = LlamaModule(hidden_size=64, num_layers=4, num_heads=2), torch.zeros(1, 8, dtype=torch.int64)
    batch = {"input_ids": batch, "targets": batch}
    one, four = (memopt.plan(module, batch, methods=["forge_adamw"], world_size=n)["forge_adamw"].bytes for n in (1, 4))
    assert four.optimizer_state == pytest.approx(one.optimizer_state / 4, rel=0.01)
    assert one.weights / 4 < four.weights < one.weights + one.weights / 4 + 1


def test_a_config_is_planned_as_it_stands(capsys):
    main(["plan", "--config", str(CONFIGS / "small_llama.yaml"), "--memory", "2GiB"])
    out = capsys.readouterr().out
    assert "this config: forge, AdamW" in out
    assert "largest batch" in out


def test_small_models_are_told_in_smaller_units(capsys) -> None:
    main(["plan", "--config", str(ROOT / "configs" / "quickstart.yaml"), "--methods", "adamw"])
    text = capsys.readouterr().out
    assert "2.46 M parameters" in text and "MiB at the peak" in text
    row = next(line for line in text.splitlines() if line.startswith("torch AdamW, fused"))
    assert float(row.split()[-1]) > 10


def test_the_quickstart_is_planned_too(capsys):
    main(["plan", "--config", str(ROOT / "configs" / "quickstart.yaml"), "--json", "--methods", "adamw"])
    found = json.loads(capsys.readouterr().out)
    assert [method["name"] for method in found["methods"]] == ["configured", "adamw"]
    assert found["methods"][0]["fits"] is None


def test_a_pretrained_model_is_planned_from_its_configuration_alone(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(**shape, intermediate_size=48).save_pretrained(tmp_path)  # no weights
    config = yaml.safe_load((ROOT / "configs" / "hf_finetune.yaml").read_text())
    config["model"]["init_args"]["name_or_path"] = str(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    found = memopt.plan(tmp_path / "config.yaml", methods=["adamw"])
    assert found.precision == "bf16-mixed"
    assert found.tokens == 4 * 1024
    assert found["configured"].bytes.total <= found["adamw"].bytes.total


def test_values_of_the_config_can_be_changed_on_the_command_line(capsys):
    args = ["--config", str(CONFIGS / "small_llama.yaml"), "--methods", "adamw", "--json"]
    changes = ["--model.init_args.num_layers", "3", "--trainer.precision=bf16-true"]
    sizes = []
    for more in ([], changes):
        main(["plan", *args, *more])
        sizes.append(json.loads(capsys.readouterr().out)["methods"][0]["bytes"]["weights"])
    block, rest = 64 * 64 * 3 + 3 * 64 * 192 + 2 * 64, 2 * 512 * 64 + 64  # weights of small_llama.yaml
    assert sizes[0] == pytest.approx(4 * (2 * block + rest), rel=0.02)
    assert sizes[1] == pytest.approx(2 * (3 * block + rest), rel=0.02)


def test_what_fit_prints_and_saves_can_be_planned(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(ROOT / "configs" / "quickstart.yaml"), "--print_config"])
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    assert "ckpt_path" in yaml.safe_load(path.read_text())
    assert memopt.plan(path, methods=["adamw"]).parameters > 1e6


def test_options_of_the_config_count(tmp_path):
    config = yaml.safe_load((CONFIGS / "small_llama.yaml").read_text())
    config["data"]["init_args"] |= {"seq_len": 8, "batch_size": 1}  # so that not only activations matter
    path = tmp_path / "config.yaml"

    def own(**trainer):
        path.write_text(yaml.safe_dump({**config, "trainer": {**config["trainer"], **trainer}}))
        return memopt.plan(path, methods=["adamw"])["configured"]

    forge = own()
    assert own(strategy="auto").bytes.gradients > forge.bytes.gradients
    assert own(precision="bf16-true").bytes.weights == pytest.approx(forge.bytes.weights / 2, rel=0.05)
    strategy = {"class_path": "lightning_memopt.ForgeStrategy", "init_args": {"checkpoint": ["*.layers.*"]}}
    assert own(strategy=strategy).bytes.activations < forge.bytes.activations
    smet = {"class_path": "lightning_memopt.SMET", "init_args": {"density": 0.5}}
    assert own(callbacks=[smet]).bytes.optimizer_state < forge.bytes.optimizer_state


def test_json_has_every_method_with_bytes_by_kind(capsys):
    main(["plan", "--config", str(CONFIGS / "llama3_8b.yaml"), "--memory", "80GiB", "--json"])
    found = json.loads(capsys.readouterr().out)
    methods = {method["name"]: method for method in found["methods"]}
    names = {"adamw", "adamw_foreach", "bnb_adamw8bit", "forge_adamw", "forge_adamw8bit", "forge_gefen"}
    assert names | {"forge_adamw_smet", "forge_adamw8bit_smet", "forge_gefen_smet"} <= methods.keys()
    kinds = {"weights", "optimizer_state", "gradients", "activations", "logits", "scratch"}
    for method in methods.values():
        assert method["bytes"].keys() == kinds
        assert sum(method["bytes"].values()) == method["peak_bytes"]
        assert method["peak_gib"] == pytest.approx(method["peak_bytes"] / GIB, abs=1e-3)
        assert method["fits"] == (method["largest_batch"] >= 1)


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * GIB), ("1.5 GB", 1_500_000_000), ("512MiB", 2**29), ("24G", 24 * 10**9), (7, 7)]
)
def test_memory_is_read_with_its_unit(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["80", "80XB", "", "0GiB", "1.2.3GiB"])
def test_memory_without_a_unit_is_refused(text):
    with pytest.raises(memopt.MemOptError, match="write it like 80GiB"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--config", str(CONFIGS / "small_llama.yaml"), "--memory", "much"], "80GiB"),
        (["--config", str(CONFIGS / "small_llama.yaml"), "--methods", "adamv"], "forge_gefen"),
        (["--config", str(CONFIGS / "small_llama.yaml"), "--model.init_args.no_layers", "3"], "no_layers"),
    ],
)
def test_mistakes_are_told_in_a_sentence(args, words, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", *args])
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err


def test_a_module_that_needs_values_is_named():
    class Asks(Layers):
        def training_step(self, batch, batch_idx):
            return self.net(batch).sum() * float(batch.numpy().mean())

    with pytest.raises(MemOptError, match=r"Asks\.training_step cannot be traced without data"):
        memopt.plan(Asks(), torch.randn(2, 256))


def recorded():
    """Measured peaks: earlier ones, and those of every recorded benchmark."""
    with (RESULTS / "peaks_recorded.csv").open() as file:
        for row in csv.DictReader(file):
            options = {key: row[key] == "true" for key in ("chunked_loss", "fused_layers")}
            yield row["config"], int(row["tokens"]), row["method"], float(row["peak_gib"]), options
    for path in sorted(RESULTS.glob("bench_*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                if row["status"] == "ok" and row["method"] in METHODS and "CPU" not in row["device"]:
                    yield row["model"], int(row["tokens"]), row["method"], float(row["peak_gib"]), {}


@pytest.fixture(scope="module")
def plan_of():
    found = {}

    def cached(config, tokens, options):
        key = (config, tokens, *options.items())
        if key not in found:
            settings = RunConfig.read(CONFIGS / f"{config}.yaml")
            module, data = settings.build("meta")
            for name, value in options.items():
                setattr(module, name, value)
            batch = data.batch(module.vocab_size, tokens // data.batch_size)
            strategy = settings.trainer.strategy
            methods = [
                method for *case, method, _, given in recorded() if case == [config, tokens] and given == options
            ]
            found[key] = memopt.plan(module, batch, methods=methods, precision="bf16-true", strategy=strategy)
        return found[key]

    return cached


@pytest.mark.parametrize(("config", "tokens", "method", "peak_gib", "options"), list(recorded()))
def test_within_eight_percent_of_what_was_measured(plan_of, config, tokens, method, peak_gib, options):
    assert plan_of(config, tokens, options)[method].peak_gib == pytest.approx(peak_gib, rel=0.08)


def sharded():
    """Measured peaks of one of several GPUs that share a model."""
    names = {"adamw_fused": "adamw", "adamw": "forge_adamw", "adamw8bit": "forge_adamw8bit", "gefen": "forge_gefen"}
    with (RESULTS / "multigpu.csv").open() as file:
        for row in csv.DictReader(file):
            if row["part"] == "speed" and row["result"] == "ran":
                method = names[row["optimizer"]] + ("_clip" if row["clip"] else "")
                if row["clip"] and row["tokens"] == "2048":
                    continue  # recorded when gradients of the shard were stored in float32
                yield int(row["ranks"]), int(row["tokens"]), row["route"], method, float(row["peak_gib"])


@pytest.fixture(scope="module")
def sharded_plan_of():
    from benchmarks.multigpu import EIGHT_B
    from benchmarks.multigpu_rank import Job, Model

    @cache
    def cached(ranks, tokens, route):
        module = Model(Job(part="speed", ranks=ranks, device="cuda", shape=EIGHT_B | {"num_layers": 32}))
        batch = torch.zeros(1, tokens + 1, dtype=torch.int64)
        methods = {method for *case, method, _ in sharded() if case == [ranks, tokens, route]}
        strategy = memopt.ForgeFSDPStrategy(route=route)
        return memopt.plan(
            module, batch, methods=sorted(methods), precision="bf16-true", world_size=ranks, strategy=strategy
        )

    return cached


@pytest.mark.parametrize(("ranks", "tokens", "route", "method", "peak_gib"), list(sharded()))
def test_within_two_percent_of_what_was_measured_sharded(sharded_plan_of, ranks, tokens, route, method, peak_gib):
    assert sharded_plan_of(ranks, tokens, route)[method].peak_gib == pytest.approx(peak_gib, rel=0.02)


@pytest.mark.parametrize("route", ["fused", "deferred"])
def test_earlier_micro_batches_leave_factors_or_a_sum(route):
    """Three of four pairs, which for 8 rows are smaller than the gradient, and for 512 larger."""
    few, many = (trace(Layers().to("meta"), torch.randn(rows, 256), route, micro_batches=4).end for rows in (8, 512))
    alone = trace(Layers().to("meta"), torch.randn(8, 256), route).end
    assert few.factors - alone.factors == 3 * 3 * 8 * (256 + 256) * 4 and few.gradients == 0
    assert many.factors == 0 and many.gradients == 3 * WEIGHT


def test_a_config_s_clipping_and_accumulation_hold_for_all_lines(capsys):
    arguments = ["plan", "--config", str(CONFIGS / "small_llama.yaml"), "--methods", "forge_adamw", "--memory", "1MiB"]
    arguments += ["--trainer.gradient_clip_val", "1.0", "--trainer.accumulate_grad_batches", "4"]
    main(arguments)
    out = capsys.readouterr().out
    assert ", 4 to a step, " in out and "clipped by norm" in out and "checkpoint '[\"*.layers.*\"]'" in out
    main([*arguments, "--json"])
    own, compared = (method["bytes"] for method in json.loads(capsys.readouterr().out)["methods"])
    assert own == compared and own["gradients"] > 0


def test_sharded_lines_have_their_names(capsys):
    main(["plan", "--config", str(ROOT / "configs" / "fsdp.yaml"), "--methods", "adamw,forge_gefen"])
    assert "devices=auto is taken as one device" in capsys.readouterr().out
    main(
        ["plan", "--config", str(ROOT / "configs" / "fsdp.yaml"), "--methods", "adamw,forge_gefen", "--world_size", "4"]
    )
    out = capsys.readouterr().out
    assert "FSDP2, torch AdamW, fused" in out and "forge_fsdp, Gefen" in out and "this config: forge_fsdp, AdamW" in out
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(ROOT / "configs" / "fsdp.yaml"), "--world_size", "0"])
    assert "at least one device" in capsys.readouterr().err


class Pair(nn.Module):
    """Two layers with one input."""

    def __init__(self, rows):
        super().__init__()
        self.a, self.b = (nn.Linear(256, rows, bias=False) for _ in range(2))

    def forward(self, x):
        return self.a(x) + self.b(x)


class Blocks(pl.LightningModule):
    """Square blocks in a row, in a list or in sequence."""

    def __init__(self, kind, *blocks):
        super().__init__()
        self.blocks = kind(blocks) if kind is nn.ModuleList else kind(*blocks)

    def training_step(self, batch, _):
        for block in self.blocks:
            batch = block(batch)
        return batch.sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def test_factors_of_two_blocks_are_under_way():
    """Of square layers of 256, with 8 tokens on each of 2 devices: 16 tokens of x and of half of dY."""

    module = Blocks(nn.ModuleList, *(nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(4)))
    ends = [trace(on_meta(module, None), torch.randn(8, 256), route, ranks=2).end for route in ("fused", "deferred")]
    received, left = 16 * (256 + 128) * 4, 8 * (256 + 128) * 4
    assert ends[0].factors == 2 * received + left
    assert ends[1].factors == 4 * received + left


def test_layers_of_one_input_take_one_route_as_in_training():
    """Alone each would receive its rows of dW, which is less than x; together x is received once."""

    class Beside(Blocks):
        def training_step(self, batch, _):
            return sum(block(batch).sum() for block in self.blocks)

    module = Beside(nn.ModuleList, *(Pair(64) for _ in range(2)))
    end = trace(on_meta(module, None), torch.randn(4, 10, 256), "fused", ranks=2).end
    received, left = 2 * (80 * 256 + 2 * 80 * 32) * 4, 40 * (256 + 2 * 32) * 4
    assert end.factors == received + left


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_what_is_gathered_together_is_what_the_strategy_shards(kind):
    """Of four blocks of two layers, half lies here, and two are whole; by `wrap` one layer may be a block."""
    module, batch = Blocks(kind, *(Pair(256) for _ in range(4))), torch.randn(8, 256)
    plan = partial(memopt.plan, module, batch, methods=["forge_adamw"], world_size=2)
    assert plan()["forge_adamw"].bytes.weights == (4 + 4) * WEIGHT
    strategy = memopt.ForgeFSDPStrategy(wrap=["Linear"])
    assert plan(strategy=strategy)["forge_adamw"].bytes.weights == (4 + 2) * WEIGHT
    both = memopt.ForgeFSDPStrategy(wrap=["Pair", "Linear"])  # then a pair has nothing of its own
    assert plan(strategy=both)["forge_adamw"].bytes.weights == (4 + 2) * WEIGHT
    with pytest.raises(MemOptError, match="no Linaer"):
        plan(strategy=memopt.ForgeFSDPStrategy(wrap=["Linaer"]))


def test_few_rows_are_received_as_gradients():
    """A layer whose factors are larger than its rows' gradients: two blocks of dW, or as the strategy says."""
    module = nn.Linear(64, 16, bias=False)

    class Narrow(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = module

        def training_step(self, batch, _):
            return self.layer(batch).sum()

    run = partial(trace, on_meta(Narrow(), None), torch.randn(512, 64), "fused", ranks=2)
    assert run().end.factors == run(way="reduce").end.factors == 2 * 16 * 64 * 4
    received, left = 2 * 512 * (64 + 8) * 4, 512 * (64 + 8) * 4
    assert run(way="exchange").end.factors == received + left
