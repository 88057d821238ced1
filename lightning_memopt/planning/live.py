"""Counting the bytes alive while a module runs on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch's CUDA allocator hands out multiples of this.
ROUNDING = 512


class Bytes(NamedTuple):
    """Bytes by kind, without weights and optimizer state.

    Attributes:
        gradients: Stored gradients; they do not depend on the batch.
        factors: Inputs and output gradients of layers that wait for their update.
        activations: What autograd keeps and what operations make on their way.
        logits: Such tensors whose last dimension is the vocabulary.
    """

    gradients: int = 0
    factors: int = 0
    activations: int = 0
    logits: int = 0

    def scaled(self, scale: float) -> Bytes:
        """For a batch `scale` times as large."""
        return Bytes(self.gradients, *(int(scale * value) for value in self[1:]))


class LiveBytes(TorchDispatchMode):
    """Counts each storage once, from the operation that makes it until its last tensor is gone.

    Args:
        free: Tensors that do not count: weights, buffers, the batch.
        vocab_size: Last dimension by which logits are told; None for none.

    Attributes:
        samples: Bytes by kind whenever their sum reached what it had not since the last fall.
    """

    def __init__(self, free: Iterable[Tensor], vocab_size: int | None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.samples: list[Bytes] = []
        self._sizes: dict[int, tuple[str, int]] = {}
        self._live = dict.fromkeys(Bytes._fields, 0)
        self._rising = False
        for tensor in free:
            self._sizes[_key(tensor)] = ("activations", 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at its results."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # A module asks for a value, mostly whether all of something holds: there is none, so let it hold.
            return True
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    @property
    def now(self) -> Bytes:
        """Bytes alive."""
        return Bytes(**self._live)

    def relabel(self, tensor: Tensor, kind: str) -> None:
        """Count the tensor's storage as another kind from now on; one that was never seen is added."""
        self._see(tensor)
        old, size = self._sizes[_key(tensor)]
        self._live[old] -= size
        self._live[kind] += size
        self._sizes[_key(tensor)] = (kind, size)

    def sample(self) -> None:
        """Keep what is alive now."""
        self.samples.append(self.now)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING
        logits = tensor.dim() > 1 and tensor.shape[-1] == self.vocab_size
        kind = "logits" if logits else "activations"
        self._sizes[key] = (kind, size)
        self._live[kind] += size
        self._rising = True
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        if self._rising:  # the sum was higher than it will be: a candidate for the peak
            self.sample()
            self._rising = False
        kind, size = self._sizes.pop(key)
        self._live[kind] -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
