"""Memory of windows on GPUs, with a stand-in for torch's symmetric memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memopt.backward import windows
from lightning_memopt.backward.windows import Window

SIZE = 1024


class Full:
    """Symmetric memory of a device that has none left until torch's allocator gives some back."""

    def __init__(self, tries: int) -> None:
        self.tries = tries

    def empty(self, size: int, **_: Any) -> Tensor:
        self.tries -= 1
        if self.tries >= 0:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(size, dtype=torch.uint8)

    def rendezvous(self, mine: Tensor, group: Any) -> Any:
        return None


class Alone:
    """A group of this process."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.mark.parametrize(("tries", "released"), [(0, 0), (1, 1), (2, 1)])
def test_takes_what_the_allocator_holds_unused(monkeypatch: pytest.MonkeyPatch, tries: int, released: int) -> None:
    """It does not give it back by itself to what it does not allocate."""
    calls: list[str] = []
    monkeypatch.setattr(windows, "_symmetric", lambda: memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("released"))
    memory, device = Full(tries), torch.device("cuda", 0)
    if tries < 2:
        assert len(Window(SIZE, Alone(), device, timedelta(1)).parts[0]) == SIZE  # type: ignore[arg-type]
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            Window(SIZE, Alone(), device, timedelta(1))  # type: ignore[arg-type]
    assert len(calls) == released


@pytest.mark.parametrize("visible", [1, 2])
def test_devices_that_one_rank_does_not_see(monkeypatch: pytest.MonkeyPatch, visible: int) -> None:
    """The other may be asked for only where it is seen; whoever sees it hears of it."""
    seen = [True, False]
    monkeypatch.setattr(windows, "_told", lambda mine, _: [("host", 0), ("host", 1)] if mine == (host, 0) else seen)
    monkeypatch.setattr(windows, "_host", lambda: host)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    host, group = "host", dist.ProcessGroup(0, 2)
    assert windows.why_not(group, torch.device("cuda", 0)) == "ranks do not see the devices of the others"
