"""Activation checkpointing by name: chosen modules keep only their inputs and run again inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt.errors import UnsupportedError


def install(root: nn.Module, patterns: Sequence[str]) -> list[tuple[nn.Module, Any]]:
    """Checkpoint every module below `root` whose qualified name matches a pattern, without reentrant autograd.

    A module inside one that is checkpointed already is left alone, so ``*.layers.*`` means the layers, not their parts.

    Args:
        root: Module that the names start from.
        patterns: Shell-style, where ``*`` matches any characters, dots too: ``["*.layers.*"]``, ``["*.mlp"]``.

    Returns:
        The changed modules, for `remove`.

    Raises:
        UnsupportedError: A pattern matches nothing.
    """
    names = {name: module for name, module in root.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UnsupportedError(
                f"checkpoint={pattern!r} matches no module. Names look like {', '.join(list(names)[-3:])}."
            )
    changed: list[tuple[nn.Module, Any]] = []
    inside: tuple[str, ...] = ()
    for name, module in names.items():
        if name.startswith(inside) or not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        inside += (name + ".",)
        changed.append((module, module.__dict__.get("forward")))
        module.forward = _again_in_backward(module.forward)
    return changed


def remove(changed: Sequence[tuple[nn.Module, Any]]) -> None:
    """Undo `install`."""
    for module, own in changed:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.forward = own


def _again_in_backward(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed
