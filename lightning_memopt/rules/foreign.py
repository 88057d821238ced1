"""Whether a saved optimizer state is one that an optimizer can go on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_memopt.compat import refusal
from lightning_memopt.rules.base import Rule
from lightning_memopt.rules.storage import Storage
from lightning_memopt.sparsity.state import MASK

FOREIGN = "a checkpoint of another optimizer"


def check_entry(
    optimizer: Optimizer, rule: Rule, storages: Sequence[Storage], name: str, entry: Mapping[str, Any]
) -> None:
    """See to it that a saved state has nothing that the optimizer would not know what to do with.

    Codes taken for moments, say, would train on, and go wrong.

    Args:
        optimizer: Which is to take it.
        rule: Its rule.
        storages: How the moments of the parameter are kept, which is dense.
        name: Of the parameter, for the message.
        entry: Its saved state.

    Raises:
        UnsupportedError: It has, or it is of the active weights of a sparse parameter.
    """
    if MASK in entry:
        raise refusal("a checkpoint of SMET without SMET", name)
    known = {*rule.counts, *(key for storage in storages for key in storage.entries())}
    for key, value in entry.items():
        if key not in known and value is not None:
            raise refusal(FOREIGN, f"{type(optimizer).__name__}, {key!r} of {name}")
