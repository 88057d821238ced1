"""Whether a saved optimizer state is one that an optimizer can go on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_memopt.compat import refusal
from lightning_memopt.rules import RULES
from lightning_memopt.rules.base import Rule
from lightning_memopt.rules.storage import Storage
from lightning_memopt.sparsity.state import MASK

FOREIGN = "a checkpoint of another optimizer"
# Options that moments depend on, as they are when there are most.
_SWITCHES = {"momentum": 0.9, "centered": True}
# Entries of coded moments, here and in bitsandbytes, beside those that end in this.
_CODES, _SCALE = ("codebook", "column_step", "state1", "state2", "qmap1", "qmap2"), "_scale"


def check_family(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """See to it that saved groups come from an optimizer of the same family: one that has betas, if this one has.

    State alone does not tell: SGD without momentum keeps none.

    Raises:
        UnsupportedError: They do not.
    """
    if "betas" in optimizer.defaults and not all("betas" in group for group in groups):
        raise refusal(FOREIGN, f"{type(optimizer).__name__}, 'betas'")


def check_entry(
    optimizer: Optimizer, rule: Rule, storages: Sequence[Storage], name: str, entry: Mapping[str, Any]
) -> None:
    """See to it that a saved state has nothing that only another optimizer has.

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
    known = {*_of(rule), *(key for storage in storages for key in storage.entries())}
    for key, value in entry.items():
        # Others, which the same optimizer may have kept under other options or someone put there, do no harm.
        if value is not None and key not in known and (key in _OTHERS or key.endswith(_SCALE)):
            raise refusal(FOREIGN, f"{type(optimizer).__name__}, {key!r} of {name}")


def _of(rule: Rule) -> tuple[str, ...]:
    """Counts and moments that states of the rule's optimizer may have, whatever its options."""
    return (*rule.counts, *rule.moments(_SWITCHES))


_OTHERS = frozenset((*_CODES, *(key for rule in RULES.values() for key in _of(rule))))
