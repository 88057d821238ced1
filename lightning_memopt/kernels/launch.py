"""Kernel calls that are prepared once and repeated: the same kernel on other operands, without Triton's own way to it.

Triton binds, specialises and looks up at every call, and makes TMA descriptors of all tensors: 60 to 160 us on the host
where the launch itself takes five. In a training step only the first operands of a call change; what follows them is
the parameter's own and lies where it lay. So the arguments are taken down as they reach the compiled launcher, and
repeated with other first operands.

What was compiled for the first call serves a repeated one if all that Triton specialises on is equal. That is so by
construction for everything taken down; for the operands it is the caller's to see to (`Call.operands`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.runtime.jit import JITFunction

# The versions whose launcher is known; others launch the ordinary way. It is called with grid, stream, function and
# more, then with the kernel's arguments, one by one in the older version and as a list in the newer. A descriptor has
# become five arguments by then: the encoded one, the shape and the strides.
KNOWN = ((3, 6), (3, 7))
_STREAM, _DESCRIPTOR = 3, 5
# Descriptors that a call keeps.
CAPACITY = 16
_runtime = triton.knobs.runtime


@dataclass(frozen=True)
class Call:
    """A kernel with its arguments.

    Attributes:
        function: The kernel.
        programs: How many.
        arguments: In the order of its parameters.
        constants: The other parameters, and launch options, by name.
        operands: How many of the first arguments another call may replace: descriptors by tensors of equal dtype that
            TMA can read, pointers by contiguous tensors of equal dtype and alignment to 16 bytes.
        tokens: Place of the argument that is the length of the first operand, if there is one.
    """

    function: JITFunction[Any]
    programs: int
    arguments: Sequence[Any]
    constants: Mapping[str, Any]
    operands: int
    tokens: int | None = None

    def run(self) -> Any:
        """Launch the ordinary way; returns the compiled kernel."""
        return self.function[(self.programs,)](*self.arguments, **self.constants)


@dataclass(slots=True)
class _Described:
    """What `make_tensordesc_arg` reads of a descriptor: making a real one takes longer than encoding it."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class Prepared:
    """A call that was taken down; `prepare` makes one."""

    def __init__(self, call: Call, kernel: Any) -> None:
        active = triton.runtime.driver.active
        self._current_device, self._current_stream = active.get_current_device, active.get_current_stream
        if self._current_device is torch.cuda.current_device:
            self._current_device = torch._C._cuda_getDevice  # without asking whether CUDA is there
        self._device = self._current_device()
        self._launch, taken = _take_down(call, kernel, self._current_stream(self._device))
        self._listed = isinstance(taken[-1], list)
        self._arguments = taken.pop() if self._listed else taken
        metadata = list(getattr(kernel.metadata, "tensordesc_meta", None) or ())
        described = sum(_is_descriptor(argument) for argument in call.arguments)
        count = len(call.function.arg_names) + (_DESCRIPTOR - 1) * described
        self._first = len(self._arguments) - count
        self._base = taken
        self._tokens: int | None = None
        if call.tokens is not None:
            before = sum(_is_descriptor(argument) for argument in call.arguments[: call.tokens])
            self._tokens = self._first + call.tokens + (_DESCRIPTOR - 1) * before
        self._descriptors: dict[Hashable, Sequence[Any]] = {}
        self._metadata = [metadata[i] if _is_descriptor(call.arguments[i]) else None for i in range(call.operands)]

    def __call__(self, *operands: Tensor) -> bool:
        """Launch on the current stream; False, with nothing done, where only the ordinary way will do."""
        if _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls:
            return False  # a profiler listens to launches
        if self._current_device() != self._device:
            return False
        arguments, at = self._arguments.copy(), self._first
        for operand, metadata in zip(operands, self._metadata, strict=True):
            if metadata is None:
                arguments[at] = operand.data_ptr()
                at += 1
            else:
                arguments[at : at + _DESCRIPTOR] = self._encoded(at, operand, metadata)
                at += _DESCRIPTOR
        if self._tokens is not None:
            arguments[self._tokens] = operands[0].shape[0]
        stream = self._current_stream(self._device)
        if self._listed:
            base = self._base.copy()
            base[_STREAM] = stream
            self._launch(*base, arguments)
        else:
            arguments[_STREAM] = stream
            self._launch(*arguments)
        return True

    def _encoded(self, at: int, operand: Tensor, metadata: Any) -> Sequence[Any]:
        # Torch's allocator hands out the same memory step after step, and with it go most descriptors.
        key = at, operand.data_ptr(), operand.shape, operand.stride()
        known = self._descriptors.get(key)
        if known is None:
            if len(self._descriptors) >= CAPACITY:
                self._descriptors.clear()
            described = _Described(operand, operand.shape, operand.stride())
            known = self._descriptors[key] = make_tensordesc_arg(described, metadata)
        return known


def prepare(call: Call, kernel: Any) -> Prepared | None:
    """What repeats `call` with other operands, given what `Call.run` returned.

    None where it must be launched the ordinary way: by a version of Triton whose launcher is not known, in the
    interpreter, and for a kernel with scratch memory, which is allocated anew for every launch.
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version not in KNOWN or triton.knobs.runtime.interpret:
        return None
    if kernel.run.global_scratch_size or kernel.run.profile_scratch_size:
        return None
    return Prepared(call, kernel)


def _take_down(call: Call, kernel: Any, stream: int) -> tuple[Callable[..., None], list[Any]]:
    """The compiled launcher, and the arguments that it is called with; nothing is launched."""
    taken: list[Any] = []
    launcher = copy.copy(kernel.run)
    launch = launcher.launch
    if isinstance(launch, FunctionType) and "launcher" in launch.__code__.co_freevars:
        # It encodes descriptors, then calls the compiled launcher, which it knows by closure.
        cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
        compiled = cells["launcher"].cell_contents
        cells["launcher"] = CellType(lambda *arguments: taken.extend(arguments))
        launcher.launch = FunctionType(launch.__code__, launch.__globals__, closure=tuple(cells.values()))
    else:
        compiled = launch
        launcher.launch = lambda *arguments: taken.extend(arguments)
    names = call.function.arg_names[len(call.arguments) :]
    # Addresses in place of tensors, which the launcher would ask for theirs every time.
    arguments = [*_addresses(call.arguments), *(call.constants[name] for name in names)]
    launcher(
        call.programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments
    )  # fmt: skip
    if isinstance(taken[-1], tuple):
        taken[-1] = list(taken[-1])
    return compiled, taken


def _addresses(values: Sequence[Any]) -> tuple[Any, ...]:
    def address(value: Any) -> Any:
        if isinstance(value, tuple):
            return _addresses(value)
        return value.data_ptr() if isinstance(value, Tensor) else value

    return tuple(map(address, values))


def _is_descriptor(argument: Any) -> bool:
    return hasattr(argument, "block_shape")
