"""The sparse kernels compile for GPUs that are not here, and keep their tiles in registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_cases import BF16, INTERPRETED, make_update
from sparse_cases import sparsify

from lightning_memopt.sparsity.bits import SEGMENT

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

OPERANDS = {
    "slab_update": {
        "grad": "*fp32", "first": "i32", "stop": "i32", "runs": "i32", "total": "i32", "columns": "i32",
    },
    "weight_gradient_update": {
        "dy": "*bf16", "x": "*bf16", "rows": "i32", "columns": "i32", "tokens": "i32", "dy_token": "i32", "dy_row": 1,
        "x_token": "i32", "x_column": 1,
    },
}  # fmt: skip
# Kinds of moments with their types, and the spans at density 1/4 and, for the fused kernel, at 1/2.
MOMENTS = {
    "bf16": ((0, 1), ("*bf16", "*bf16"), ("*bf16", "*bf16"), {}, 64),
    "adamw8bit": ((2, 3), ("*u8", "*u8"), ("*bf16", "*bf16"), {256: (256, 256), 128: (128, 128)}, 64),
    "gefen": (
        (4, 5),
        ("*u8", "*fp32"),
        ("*bf16", "*fp32"),
        {512: (256, 512), 4096: (2048, 4096), 128: (128, 128)},
        128,
    ),
}


@pytest.mark.parametrize(
    ("name", "moments", "width", "capability"),
    [
        *(("slab_update", "bf16", 1024, capability) for capability in (80, 90, 100)),
        ("slab_update", "adamw8bit", 256, 90),
        *(("slab_update", "gefen", 512, capability) for capability in (80, 90, 100)),
        ("slab_update", "gefen", 4096, 90),
        *(("weight_gradient_update", "bf16", 128, capability) for capability in (80, 100)),
        ("weight_gradient_update", "gefen", 128, 90),
    ],
)
def test_compiles_without_spilling_tiles(name, moments, width, capability, tmp_path) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_memopt.kernels import sparse_fused, sparse_slab, tiles

    kernel = sparse_slab.slab_update if name == "slab_update" else sparse_fused.weight_gradient_update
    kinds, values, scales, lengths, lanes = MOMENTS[moments]
    signature = OPERANDS[name] | {
        "w": "*bf16", "values": values, "scales": scales, "bits": "*u8", "index": "*i32", "cohort": "*u8",
        "ages": "*fp32", "row": "*fp32", "key": "*i32", "nonfinite": "*i32", "offset": "i32",
    }  # fmt: skip
    constants = {
        "TILE": tiles.adam_by_slope, "SCALARS": 6, "AGED": (0, 0, 0, 1, 2), "COLUMNS": 3, "STOCHASTIC": True,
        "KINDS": kinds, "LENGTHS": lengths.get(width, (1, 1)), "ALIGNED": True, "INSIDE": True,
        "BY_ROWS": bool(lengths), "RUNS": 1, "WIDTH": width, "LANES": lanes, "MORE": 32, "PRECISION": "ieee",
        "TOKENS": 32, "SEGMENT": SEGMENT, **{key: getattr(sparse_fused, key) for key in ("ROWS", "BAND", "PART_ROWS")},
    }  # fmt: skip
    constants |= {key: value for key, value in signature.items() if isinstance(value, int)}
    types, fixed, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument], fixed[(i,)] = "constexpr", constants[argument]
            continue
        types[argument] = signature[argument]
        places = [(i, j) for j in range(2)] if isinstance(signature[argument], tuple) else [(i,)]
        aligned = argument not in ("offset", "first", "stop", "runs")
        attributes |= {place: [["tt.divisibility", 16]] for place in places if aligned}
    warps = 8 if name == "weight_gradient_update" else max(1, lanes // 128)
    options = {"num_warps": warps}
    if name == "slab_update" and lengths and capability == 90:
        options["maxnreg"] = 64 if moments == "gefen" else 48
    source = ASTSource(kernel, types, fixed, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    # Held down to few registers, Triton 3.7 leaves up to 16 of them on the stack, 3.6 up to 8.
    assert int(stack) <= (64 if "maxnreg" in options else 32), usage
    assert compiled.metadata.shared <= 99 * 1024


def test_the_constants_of_a_run_with_several_means_compile() -> None:
    """Where all of a run is in one tile, the branch with a second one is compiled all the same."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_memopt.kernels import sparse_slab

    update = make_update("gefen-64", (10, 700), "cpu", BF16)
    update = sparsify(update, torch.ones(10, 700, dtype=torch.bool), density=1.0)
    call = sparse_slab.call(update, torch.zeros(10, 700), 0)
    assert call.constants["WIDTH"] > min(call.constants["LENGTHS"])
    signature = OPERANDS["slab_update"] | {
        "w": "*bf16", "values": ("*u8", "*fp32"), "scales": ("*bf16", "*fp32"), "bits": "*u8", "index": "*i32",
        "cohort": "*u8", "ages": "*fp32", "row": "*fp32", "key": "*i32", "nonfinite": "*i32", "offset": "i32",
    }  # fmt: skip
    constants = {name: call.constants[name] for name in call.function.arg_names if name in call.constants}
    types = {name: "constexpr" if name in constants else signature[name] for name in call.function.arg_names}
    fixed = {(call.function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(call.function, types, fixed)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert compiled.asm["cubin"]
