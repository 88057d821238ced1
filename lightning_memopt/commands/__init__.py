"""The commands that `memopt` adds to LightningCLI's: each a function whose signature is its command line.

A new command is one module with one function, and one line in ``COMMANDS``.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_memopt.commands.bench import bench
from lightning_memopt.commands.export import export
from lightning_memopt.commands.generate import generate
from lightning_memopt.commands.plan import plan

COMMANDS: dict[str, Callable[..., None]] = {"bench": bench, "plan": plan, "generate": generate, "export": export}

__all__ = ["COMMANDS"]
