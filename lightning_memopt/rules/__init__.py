"""One optimizer, one rule: the registry from optimizer class to rule."""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.rules.adagrad import AdagradRule
from lightning_memopt.rules.adam import AdamRule, AdamWRule
from lightning_memopt.rules.adamw8bit import AdamW8bitRule
from lightning_memopt.rules.base import COMMON_SCALARS, Rule
from lightning_memopt.rules.gefen import GefenRule
from lightning_memopt.rules.lion import LionRule
from lightning_memopt.rules.nadam import NAdamRule
from lightning_memopt.rules.radam import RAdamRule
from lightning_memopt.rules.rmsprop import RMSpropRule
from lightning_memopt.rules.sgd import SGDRule

__all__ = ["COMMON_SCALARS", "RULES", "Rule", "rule_for"]

RULES: dict[type[Optimizer], Rule] = {
    rule.optimizer: rule
    for rule in (
        AdamWRule(),
        AdamRule(),
        AdamW8bitRule(),
        GefenRule(),
        SGDRule(),
        RMSpropRule(),
        AdagradRule(),
        NAdamRule(),
        RAdamRule(),
        LionRule(),
    )
}


def rule_for(optimizer: Optimizer) -> Rule:
    """The rule of exactly this optimizer's class.

    A subclass may override `step`, so it is not taken for its base.

    Raises:
        UnsupportedError: No rule is registered for the class; the message lists those that have one.
    """
    rule = RULES.get(type(optimizer))
    if rule is None:
        base = next((cls.__name__ for cls in type(optimizer).__mro__ if cls in RULES), None)
        if base is not None:
            raise UnsupportedError(
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is a subclass of {base}, which may step "
                f"in another way, so the fused update of {base} does not stand for it. Use {base} itself, or another "
                "strategy (for example strategy='auto')."
            )
        known = ", ".join(sorted(cls.__name__ for cls in RULES))
        raise UnsupportedError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} has no fused update rule. "
            f"Use one of {known}, or another strategy (for example strategy='auto')."
        )
    return rule
