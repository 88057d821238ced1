"""The Hopper kernel compiles on a machine without a GPU, fits its shared memory and its instruction cache."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_cases import BF16, F32, INTERPRETED, RULES, make_update

triton = pytest.importorskip("triton")
hopper = pytest.importorskip("lightning_memopt.kernels.fused_hopper", exc_type=ImportError)
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

NAMES = {BF16: "bf16", F32: "fp32", torch.uint8: "u8"}
# (rule, weight, dense moments) and the kibibytes of machine code at most, both groups' two paths together.
CASES = [("adamw", BF16, BF16, 120), ("adamw8bit", BF16, BF16, 180), ("sgd", BF16, BF16, 80), ("lion", BF16, BF16, 100)]
CASES += [("gefen", BF16, BF16, 160), ("gefen-64", BF16, BF16, 160)]
# The same where tiles are handed over.
HANDED = [(BF16, 3, 4, 64), (F32, 3, 2, 60)]


def descriptor(block, dtype) -> str:
    return f"tensordesc<{NAMES[dtype]}{list(block)},{hopper._layout(block, dtype)!r}>".replace(" ", "")


def compile_for(update, config, aligned=True):
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from lightning_memopt.kernels import blocks, codes

    kernel, chunk, warps = hopper.weight_gradient_update, (hopper.CHUNK, hopper.CHUNK), 4
    if config.handed:
        kernel, chunk, warps = hopper.weight_gradient_handed_over, (hopper.STRIP, hopper.TILE_COLUMNS), hopper.WARPS
    values = [update.state[storage.name] for storage in hopper.streamed(update)]
    types = {
        "dy": descriptor((config.tokens, hopper.TILE_ROWS), BF16),
        "x": descriptor((config.tokens, hopper.TILE_COLUMNS), BF16),
        "w": descriptor(chunk, update.weight.dtype),
        "row_ptr": "*fp32", "key_ptr": "*i32", "nonfinite_ptr": "*i32",
        **dict.fromkeys(["rows", "columns", "tokens", "offset", "group"], "i32"),
    }  # fmt: skip
    constants = blocks.arguments(update).constants | {
        "ALIGNED": aligned, "STAGES": config.stages, "SLOTS": config.slots,
        "BYTES": hopper.CHUNK**2 * hopper.bytes_per_weight(update),
    }  # fmt: skip
    if not config.handed:
        constants |= {"WIDTH": blocks.width(update), "LAG": config.lag}
    for i in range(3):
        if i < len(values):
            types[f"m{i}"] = descriptor(chunk, values[i].dtype)
        else:
            constants[f"m{i}"] = None
        kind = codes.kind(update.storage[i]) if i < len(update.storage) else codes.DENSE
        if kind >= codes.SIGNED:
            types[f"scale{i}"] = "*fp32" if kind == codes.MEAN else "*bf16"
        else:
            constants[f"scale{i}"] = None
    if blocks.has_factors(update):
        types["factor"] = "*fp32"
    else:
        constants["factor"] = None
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def machine_code(compiled, folder) -> list[str]:
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    listing = subprocess.run([tool, "-c", binary], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/\s+[@A-Z{]", line)]


@pytest.mark.parametrize(("rule", "dtype", "moment_dtype", "size"), CASES)
def test_compiles(rule, dtype, moment_dtype, size, tmp_path) -> None:
    from lightning_memopt.kernels import tuning

    update = make_update(rule, (128, 128), "cpu", dtype, moment_dtype, past=0)
    compiled = compile_for(update, tuning.default(update, 8192))
    code = machine_code(compiled, tmp_path)
    assert compiled.metadata.shared <= 227 * 1024
    assert len(code) * 16 <= size * 1024
    matmuls = [i for i, line in enumerate(code) if "HGMMA" in line]
    assert len(matmuls) == 32  # 64 tokens in steps of 16, two halves of a tile, first and later ones, two groups
    for later in (matmuls[8:16], matmuls[24:]):
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in code[later[0] : later[-1] + 8]), "spills"


@pytest.mark.parametrize("handed", [False, True])
def test_compiles_where_rows_share_no_hashes(handed, tmp_path) -> None:
    update = make_update("adamw8bit", (128, 128), "cpu", BF16, past=0)
    code = machine_code(compile_for(update, hopper.Config(3, 4, 0, 1, handed=handed), aligned=False), tmp_path)
    assert len(code) * 16 <= (64 if handed else 224) * 1024


def test_a_thread_shares_hashes(tmp_path) -> None:
    """Where rows are aligned, one hash serves sixteen weights: two in each copy of the loop's body for 32 weights."""
    update = make_update("lion", (128, 128), "cpu", BF16, BF16, past=0)
    counts = {}
    for aligned in (True, False):
        code = machine_code(compile_for(update, hopper.Config(5, 4, 0, 1), aligned), tmp_path)
        counts[aligned] = sum("0x7feb352d" in line for line in code)
    # Two groups; two chunks where the gradient is plain, else one. Without sharing, 32 hashes a body.
    assert counts == {True: 2 * 3 * 2, False: 2 * 3 * 32}


@pytest.mark.parametrize(("dtype", "stages", "slots", "size"), HANDED)
def test_compiles_where_tiles_are_handed_over(dtype, stages, slots, size, tmp_path) -> None:
    update = make_update("adamw8bit", (128, 128), "cpu", dtype, past=0)
    compiled = compile_for(update, hopper.Config(stages, slots, 0, 1, handed=True))
    code = machine_code(compiled, tmp_path)
    assert compiled.metadata.shared <= 227 * 1024
    assert len(code) * 16 <= size * 1024
    assert sum("HGMMA" in line for line in code) == 16
    assert not any(re.search(r"\b(LDL|STL)\b", line) for line in code), "spills"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "moment_dtype"), [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16)])
@pytest.mark.parametrize("tokens", [1, 512, 4096])
def test_every_configuration_fits(rule, dtype, moment_dtype, tokens) -> None:
    from lightning_memopt.kernels import tuning

    update = make_update(rule, (128, 128), "cpu", dtype, moment_dtype, past=0)
    for config in tuning.candidates(update, tokens):
        stage = hopper.STAGE * config.tokens // hopper.TOKENS
        used = config.stages * stage + config.slots * hopper.bytes_per_slot(update, config.handed)
        assert used + (hopper.SHELF if config.handed else hopper.FACTORS) <= hopper.SHARED and config.slots >= 2
        assert hopper.can_hand_over(update) or not config.handed


def test_the_table() -> None:
    from lightning_memopt.kernels import tuning

    for shape, tokens, moment_dtype, config in [
        ((256, 256), 512, BF16, (4, 4, 0, 1, 64)),
        ((256, 512), 512, BF16, (4, 4, 0, 8, 64)),
        ((256, 512), 2048, BF16, (5, 2, 0, 2, 64)),
        ((256, 256), 512, F32, (4, 2, 0, 1, 64)),
        ((256, 256), 8192, F32, (8, 2, 0, 4, 32)),
    ]:
        update = make_update("adamw", shape, "cpu", BF16, moment_dtype, past=0)
        assert tuning.default(update, tokens) == hopper.Config(*config)
    for shape, dtype, tokens, config in [
        ((256, 256), BF16, 512, (3, 4, 0, 1, 64, True)),
        ((256, 256), F32, 512, (3, 2, 0, 1, 64, True)),
        ((256, 512), BF16, 512, (3, 4, 0, 8, 64, True)),
        ((256, 256), BF16, 2048, (7, 3, 0, 2, 32, True)),
        ((256, 256), F32, 2048, (5, 3, 0, 2, 32, True)),
        ((256, 512), BF16, 2048, (5, 4, 0, 2)),
        ((256, 256), BF16, 8192, (5, 4, 0, 4)),
    ]:
        update = make_update("adamw8bit", shape, "cpu", dtype, past=0)
        assert tuning.default(update, tokens) == hopper.Config(*config)


def test_what_was_measured_overrules_the_table(monkeypatch) -> None:
    from lightning_memopt.kernels import tuning

    monkeypatch.delenv("MEMOPT_TUNE", raising=False)
    dy, x = torch.zeros(512, 128, dtype=BF16), torch.zeros(512, 128, dtype=BF16)
    for rule in ("adamw8bit", "gefen", "adamw"):
        update = make_update(rule, (128, 128), "cpu", BF16, past=0)
        config, measured = tuning.default(update, 512), {}
        monkeypatch.setattr(tuning, "_measured", lambda device, measured=measured: measured)
        assert tuning.choose(update, dy, x) == config
        measured[tuning._key(update, dy, x)] = tuning.TWO_PASS
        assert tuning.choose(update, dy, x) == tuning.TWO_PASS
        assert tuning.choose(update, dy, x, fused=True) == config
        assert tuning.choose(update, dy.repeat(4, 1), x.repeat(4, 1)) == tuning.default(update, 2048)
