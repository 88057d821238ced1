"""What is asked of autograd's engine. Some of it has no public form in torch; all of that is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import Node

# Number of the backward pass that runs in this thread; nested ones have their own. -1 outside.
current_pass: Callable[[], int] = torch._C._current_graph_task_id


def at_the_end(function: Callable[[], None]) -> None:
    """Call `function` at the end of the backward pass that runs in this thread, before ``backward`` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def will_run(node: Node) -> bool:
    """Whether the backward pass now running comes to `node`; False for a node that ``autograd.grad`` asks for."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def applier(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for where nothing is `transformed`: asking for that is half of what it takes the host."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def transformed() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is on, which see no factors."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def holds(root: Node, name: str) -> bool:
    """Whether the autograd graph under `root` has a node of that name."""
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        if node.name() == name:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False
