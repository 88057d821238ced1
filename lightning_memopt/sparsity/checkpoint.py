"""The masks of a run with SMET, from nothing but its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_memopt.errors import MemOptError
from lightning_memopt.sparsity.bits import flat_bits, unpack
from lightning_memopt.sparsity.state import MASK


def masks_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Masks by parameter name: bool, shape of the parameter.

    Raises:
        MemOptError: The run had no callback `lightning_memopt.SMET`.
    """
    places = next((c["parameters"] for c in _callbacks(checkpoint) if isinstance(c, dict) and "parameters" in c), None)
    if places is None:
        raise MemOptError("the checkpoint is not of a run with the callback lightning_memopt.SMET, so it has no masks.")
    masks = {}
    for name, (optimizer, number) in places.items():
        weight = checkpoint["state_dict"][name]
        if "optimizer_states" in checkpoint:
            state = checkpoint["optimizer_states"][optimizer]["state"][number]
        else:  # a file that was made of a sharded run's folder
            state = checkpoint[f"optimizer_{optimizer}"]["state"][name]
        bits = flat_bits(state[MASK], weight.shape[1])
        masks[name] = unpack(bits, 0, weight.numel()).view(weight.shape)
    return masks


def _callbacks(checkpoint: Mapping[str, Any]) -> list[Any]:
    # A subclass has a key of its own, so the state is known by its form.
    return list(checkpoint.get("callbacks", {}).values())
