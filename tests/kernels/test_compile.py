"""The portable kernels compile for GPUs that are not here, and keep their tiles in registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from kernel_cases import INTERPRETED

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

# A100, Hopper, data centre and consumer Blackwell.
CAPABILITIES = [80, 90, 100, 120]
# Pointers of moments and scales, kinds, and the width of a tile.
MOMENTS = {
    "bf16": (("*bf16", "*bf16"), ("*bf16", "*bf16"), (0, 1), 64),
    "codes": (("*u8", "*u8"), ("*bf16", "*bf16"), (2, 3), 64),
    "gefen": (("*u8", "*fp32"), ("*bf16", "*fp32"), (4, 5), 128),
    "gefen-64": (("*u8", "*fp32"), ("*bf16", "*fp32"), (4, 5), 64),
}
GRADIENTS = {
    "flat": {"grad": "*bf16", "total": "i64", "columns": "i32"},
    "fused_triton": {
        "dy": "*bf16", "x": "*bf16", "grad": "*bf16", "rows": "i32", "columns": "i32", "tokens": "i32",
        "dy_token": "i32", "dy_row": 1, "x_token": "i32", "x_column": 1, "grad_row": "i32", "grad_column": 1,
    },
    "embedding_triton": {
        "order": "*i64", "bounds": "*i64", "dy": "*bf16", "rows": "i32", "columns": "i32", "padding": "i32",
        "dy_token": "i32", "dy_column": 1,
    },
}  # fmt: skip


def compile_kernel(module: str, moments: str, capability: int):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_memopt.kernels import embedding_triton, flat, fused_triton, tiles

    values, scales, kinds, width = MOMENTS[moments]
    kernel, constants, warps = {
        "flat": (
            flat.flat_update,
            {"BY_ROWS": "gefen" in moments, "WHOLE": True, "RUNS": flat.WEIGHTS // width},
            flat.WARPS,
        ),
        "fused_triton": (
            fused_triton.weight_gradient_update,
            {
                "STORED": False, "PRECISION": "ieee", "TOKENS": 32,
                **{name: getattr(fused_triton, name) for name in ("ROWS", "COLUMNS", "BAND", "PART")},
            },
            8,
        ),
        "embedding_triton": (
            embedding_triton.embedding_update,
            {"ROWS": embedding_triton.WEIGHTS // width, "TOKENS": embedding_triton.TOKENS},
            4,
        ),
    }[module]  # fmt: skip
    signature = GRADIENTS[module] | {
        "w": "*bf16", "values": values, "scales": scales, "row": "*fp32", "key": "*i32",
        "nonfinite": "*i32", "offset": "i32",
    }  # fmt: skip
    if "gefen" in moments:
        signature["factor"] = "*fp32"
    else:
        constants["factor"] = None
    constants |= {"TILE": tiles.adam, "SCALARS": 6, "KINDS": kinds, "STOCHASTIC": True, "WIDTH": width, "ALIGNED": True}
    constants |= {name: value for name, value in signature.items() if isinstance(value, int)}
    divisible = [["tt.divisibility", 16]]
    types, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name], constexprs[(i,)] = "constexpr", constants[name]
            continue
        types[name] = signature[name]
        places = [(i, j) for j in range(2)] if isinstance(signature[name], tuple) else [(i,)]
        attributes |= dict.fromkeys(places, divisible) if name != "offset" else {}
    source = ASTSource(kernel, types, constexprs, attributes)
    options = {"num_warps": warps} | ({"maxnreg": flat.REGISTERS} if module == "flat" and "gefen" in moments else {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("module", GRADIENTS)
def test_compiles_without_spilling_tiles(module, moments, capability, tmp_path) -> None:
    compiled = compile_kernel(module, moments, capability)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    assert int(stack) <= 32, usage  # bytes per thread: a few scalars, no part of a tile
    assert compiled.metadata.shared <= 99 * 1024  # what a block may use on consumer GPUs


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_norms_compile(capability) -> None:
    """With loads of 16 bytes that run ahead of the products, in the shared memory of the smallest of these GPUs."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_memopt.kernels import gram

    kernel, numbers, pointers = gram.gram_norms, ("i64",) * gram.LAYERS, ("*bf16",) * gram.LAYERS
    types = {
        "dys": pointers, "dy_widths": numbers, "xs": pointers, "x_widths": numbers, "groups": numbers, "out": "*fp32",
        "tokens": "i32",
    }  # fmt: skip
    places = [(kernel.arg_names.index(name), i) for name in ("dys", "xs") for i in range(gram.LAYERS)]
    source = ASTSource(kernel, types, {}, {place: [["tt.divisibility", 16]] for place in places})
    options = {"num_warps": gram.WARPS, "num_stages": gram.STAGES}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"cp\.async\.cg\.shared\.global .*, 0x10", ptx)) >= 16
    assert "cp.async.ca" not in ptx and "ld.global" not in ptx
    assert compiled.metadata.shared <= 99 * 1024
    if capability == 90:
        assert "wgmma.mma_async" in ptx
