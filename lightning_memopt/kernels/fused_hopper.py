"""Weight gradient and update in one kernel for Hopper GPUs: what it takes, and its launch.

The kernel is `kernels.hopper_kernel`, or `kernels.hopper_shelf` for long updates at few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lightning_memopt.kernels import blocks, codes
from lightning_memopt.kernels.hopper_kernel import weight_gradient_update
from lightning_memopt.kernels.hopper_matmul import TILE_COLUMNS, TILE_ROWS
from lightning_memopt.kernels.hopper_shelf import STRIP, WARPS, weight_gradient_handed_over
from lightning_memopt.kernels.hopper_step import CHUNK
from lightning_memopt.kernels.launch import Call
from lightning_memopt.kernels.update import Update
from lightning_memopt.rules.storage import Storage

# Tokens in a stage of the operand ring, as a rule, and its bytes.
TOKENS = 64
STAGE = TOKENS * (TILE_ROWS + TILE_COLUMNS) * 2
# Where collectives hold some multiprocessors, one program per multiprocessor would mean that those without one begin
# when all others are through. Up to so many take turns then, each with so many tiles at least: the first tile of a
# program is not multiplied while another one is updated. Barriers between devices hold few, which are left to them.
TURNS, TILES = 4, 4
LEFT_TO_BARRIERS = 2
# Shared memory of a block on Hopper, less what barriers and reductions take.
SHARED = 227 * 1024 - 1024
# Of that, what a tile of dW takes that is handed over, or is set aside for factors of the columns of two tiles.
SHELF, FACTORS = TILE_ROWS * TILE_COLUMNS * 4, 2 * TILE_COLUMNS * 4
_GLUON = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.uint8: gl.uint8,
}


@dataclass(frozen=True)
class Config:
    """How the kernel uses a multiprocessor's shared memory.

    Attributes:
        stages: Of the operand ring.
        slots: Chunks of weight and moments in flight.
        lag: Chunks that may still be on their way to memory when a slot is filled again.
        group: Height, in tiles, of the bands in which tiles are taken.
        tokens: In a stage.
        handed: Tiles are handed over to warps that only update (`can_hand_over`), instead of updated where formed.
    """

    stages: int
    slots: int
    lag: int
    group: int
    tokens: int = TOKENS
    handed: bool = False


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def available(device: torch.device) -> bool:
    """Whether `device` has Hopper's units."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def readable(tensor: Tensor) -> bool:
    """Whether TMA can read and write this matrix: rows that start at multiples of 16 bytes and do not overlap."""
    item = tensor.element_size()
    if tensor.stride(0) < tensor.shape[1]:  # a row that is expanded over all tokens
        return False
    return tensor.stride(1) == 1 and tensor.stride(0) * item % 16 == 0 and tensor.data_ptr() % 16 == 0


def supports(update: Update, dy: Tensor, x: Tensor) -> bool:
    """Whether the kernel takes these operands and this weight as they lie in memory."""
    moments = [update.state[storage.name] for storage in streamed(update)]
    # A gradient that the weight is part of is not known before the weight is there, which a block's mean cannot await.
    alone = len(moments) == len(update.storage) or not update.scalars["l2"]
    return (
        alone
        and dy.dtype == x.dtype
        and dy.dtype in (torch.bfloat16, torch.float16)
        and len(x) > 0
        and all(readable(tensor) for tensor in (dy, x, update.weight, *moments))
    )


def can_hand_over(update: Update) -> bool:
    """Whether a configuration may be `handed`: moments are coded, and no block shares one."""
    kinds = [codes.kind(storage) for storage in update.storage]
    return codes.MEAN not in kinds and any(kind >= codes.SIGNED for kind in kinds)


def streamed(update: Update) -> list[Storage]:
    """The moments with a value per weight."""
    return [storage for storage in update.storage if codes.kind(storage) != codes.MEAN]


def bytes_per_weight(update: Update) -> int:
    """Of weight and moments, without what blocks share."""
    return update.weight.element_size() + sum(update.state[storage.name].element_size() for storage in streamed(update))


def bytes_per_slot(update: Update, handed: bool) -> int:
    """Of shared memory, for as many weights as a chunk has."""
    scales = sum(codes.kind(storage) >= codes.SIGNED for storage in update.storage) * CHUNK * 4
    return CHUNK**2 * bytes_per_weight(update) + handed * scales


@cache
def _layout(block: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON[dtype])


def _descriptor(tensor: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(block), _layout(block, tensor.dtype))


def apply_factors(update: Update, dy: Tensor, x: Tensor, config: Config) -> Any:
    """Take one step on dW = dYᵀ x; `supports` says for what. Returns the compiled kernel."""
    return call(update, dy, x, config).run()


def call(update: Update, dy: Tensor, x: Tensor, config: Config) -> Call:
    """The launch of one step on dW = dYᵀ x; its operands are dY and x."""
    rows, columns = update.weight.shape
    chunk = (STRIP, TILE_COLUMNS) if config.handed else (CHUNK, CHUNK)
    given = blocks.arguments(update)
    _, _, shares, factor, row, key, nonfinite = given.tensors
    descriptors = [_descriptor(update.state[storage.name], chunk) for storage in streamed(update)]
    scales = [
        share if codes.kind(storage) >= codes.SIGNED else None
        for storage, share in zip(update.storage, shares, strict=True)
    ]
    tile_count = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
    arguments = (
        _descriptor(dy, (config.tokens, TILE_ROWS)),
        _descriptor(x, (config.tokens, TILE_COLUMNS)),
        _descriptor(update.weight, chunk),
        *descriptors,
        *[None] * (3 - len(descriptors)),
        *scales,
        *[None] * (3 - len(scales)),
        factor,
        row,
        key,
        nonfinite,
        rows,
        columns,
        len(x),
        given.offset,
        config.group,
    )
    constants = given.constants | {
        "ALIGNED": blocks.aligned(update, columns),
        "STAGES": config.stages,
        "SLOTS": config.slots,
        "BYTES": CHUNK * CHUNK * bytes_per_weight(update),
    }
    if config.handed:
        kernel, constants["num_warps"] = weight_gradient_handed_over, WARPS
    else:
        kernel, constants["num_warps"] = weight_gradient_update, 4
        constants |= {"WIDTH": blocks.width(update), "LAG": config.lag}
    left = LEFT_TO_BARRIERS if update.beside == "barriers" else 0
    programs = min(tile_count, _multiprocessors(dy.device) - left)
    if update.beside == "collectives":
        programs *= max(1, min(TURNS, tile_count // (TILES * programs)))
    place = kernel.arg_names.index("tokens")
    return Call(kernel, programs, arguments, constants, operands=2, tokens=place)
