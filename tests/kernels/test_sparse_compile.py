"""The sparse kernels compile for GPUs that are not here, and keep their tiles in registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from kernel_cases import INTERPRETED

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

OPERANDS = {
    "slab_update": {"grad": "*fp32", "first": "i64", "stop": "i64", "total": "i32"},
    "weight_gradient_update": {
        "dy": "*bf16", "x": "*bf16", "rows": "i32", "columns": "i32", "tokens": "i32", "dy_token": "i32", "dy_row": 1,
        "x_token": "i32", "x_column": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", OPERANDS)
def test_compiles_without_spilling_tiles(name, capability, tmp_path) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_memopt.kernels import sparse_triton, tiles

    kernel = getattr(sparse_triton, name)
    signature = OPERANDS[name] | {
        "w": "*bf16", "values": ("*bf16",) * 2, "bits": "*u8", "index": "*i32", "cohort": "*u8", "ages": "*fp32",
        "row": "*fp32", "key": "*i32", "nonfinite": "*i32", "offset": "i32",
    }  # fmt: skip
    constants = {
        "TILE": tiles.adam, "SCALARS": 6, "AGED": (0, 0, 0, 1, 2, 0), "WIDTH": 3, "KINDS": (0, 1), "STOCHASTIC": True,
        "PRECISION": "ieee", "TOKENS": 32,
        **{key: getattr(sparse_triton, key) for key in ("SEGMENTS", "SEGMENT", "ROWS", "BAND", "PART_ROWS")},
    }  # fmt: skip
    constants |= {key: value for key, value in signature.items() if isinstance(value, int)}
    types, values, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument], values[(i,)] = "constexpr", constants[argument]
            continue
        types[argument] = signature[argument]
        places = [(i, j) for j in range(2)] if isinstance(signature[argument], tuple) else [(i,)]
        aligned = argument not in ("offset", "first", "stop")
        attributes |= {place: [["tt.divisibility", 16]] for place in places if aligned}
    warps = 8 if name == "weight_gradient_update" else 4
    source = ASTSource(kernel, types, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    assert int(stack) <= 32, usage
    assert compiled.metadata.shared <= 99 * 1024
