"""Factors on their way to the owners of their rows by copies: each rank lays out what the others get, and they take it.

The same as `lightning_memopt.backward.exchange.Exchange`, without collectives: what a rank sends lies in a window
(`lightning_memopt.backward.windows`), and what it receives is copied out of the windows of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memopt.backward.exchange import WIDE, Layout, Ranks, layout_of, owned_rows, split
from lightning_memopt.backward.windows import ALIGNED, Window
from lightning_memopt.kernels.slabs import Factors

# Plans that are kept.
CAPACITY = 256

# For each rank, of each layer the first column that is its own, and the one past its last.
Spans = tuple[tuple[tuple[int, int], ...], ...]


class Outbox:
    """A window that grows with what is sent at a time, and the stream in which others' windows are copied from.

    Args:
        group: Who takes part, all on one host.
        device: Where factors are.
        timeout: How long a device waits for the others.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self._group, self._device, self._timeout = group, device, timeout
        self._window: Window | None = None
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._read: torch.cuda.Event | None = None

    def plan(self, layout: Layout, spans: Spans, most: int, dtypes: tuple[torch.dtype, torch.dtype]) -> Plan:
        """Where what is sent has its place, free to be written to in the current stream. All ranks ask together.

        Args:
            layout: Of the layers.
            spans: Of dY.
            most: Largest number of tokens of any rank.
            dtypes: Of dY and x.
        """
        self.rest()
        key = spans, tuple(layout.columns), most, dtypes
        if key not in self._plans:
            if len(self._plans) == CAPACITY:  # numbers of tokens, mostly
                self._plans.clear()
            widths = [sum(last - first for first, last in own) for own in spans]
            front = _aligned(most * sum(layout.columns) * dtypes[1].itemsize)
            size = front + _aligned(most * sum(widths) * dtypes[0].itemsize)
            if self._window is None or self._window.size < size:
                self._window = None
                self._plans.clear()
                self._window = Window(size, self._group, self._device, self._timeout)
            self._plans[key] = Plan(self._window, front, widths, sum(layout.columns), most, dtypes)
        return self._plans[key]

    def take(self, window: Window, into: Sequence[Tensor], out_of: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Copy out of all ranks' windows once they are written.

        Returns:
            When all ranks have read.
        """
        if self._stream is None:
            window.read(into, out_of)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            window.read(into, out_of)
            self._read = self._stream.record_event()
        return self._read

    def rest(self) -> None:
        """Let the current stream wait until nothing is copied any more."""
        if self._read is not None:
            torch.cuda.current_stream().wait_event(self._read)
            self._read = None


class Plan:
    """Views of the windows: in each a rank's x, and then its dY for every other rank, one after the other.

    Args:
        window: Of all ranks.
        front: Bytes up to where dY begins.
        widths: For each rank, columns of dY that it receives.
        columns: Of x.
        most: Largest number of tokens of any rank.
        dtypes: Of dY and x.

    Attributes:
        dys: For each rank, what this one leaves for it, [most, columns]; None for itself.
        x: Where its x goes, for all.
        sources: Ranks to copy from, itself last, and what: dY for this rank or None, and x.
    """

    def __init__(
        self,
        window: Window,
        front: int,
        widths: Sequence[int],
        columns: int,
        most: int,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        def dy_of(sender: int, receiver: int) -> Tensor | None:
            if sender == receiver or not widths[receiver]:
                return None
            before = sum(width for rank, width in enumerate(widths[:receiver]) if rank != sender)
            part = window.parts[sender][front + most * before * dtypes[0].itemsize :]
            return part[: most * widths[receiver] * dtypes[0].itemsize].view(dtypes[0]).view(most, -1)

        xs = [part[: most * columns * dtypes[1].itemsize].view(dtypes[1]).view(most, -1) for part in window.parts]
        me = window.rank
        self.window, self.x = window, xs[me]
        self.dys = [dy_of(me, rank) for rank in range(len(widths))]
        self.sources = [(rank, dy_of(rank, me), xs[rank]) for rank in window.nearest_last]


class Copied:
    """Factors of some layers under way; arguments as for `Exchange`."""

    @torch.no_grad()
    def __init__(
        self, dys: Sequence[Tensor], xs: Sequence[Tensor], sources: Sequence[int], most: int, ranks: Ranks
    ) -> None:
        assert ranks.outbox is not None
        self._layout = layout = layout_of(dys, xs, sources, ranks)
        dy = dys[0].new_empty(ranks.size, most, sum(layout.own))
        x = xs[0].new_empty(ranks.size, most, sum(layout.columns))
        self._arrived, self._event = (dy, x), None
        if not most:
            return
        spans = _spans(tuple(of.shape[1] for of in dys), ranks.size, ranks.shards)
        plan = ranks.outbox.plan(layout, spans, most, (dy.dtype, x.dtype))
        step = _step(dys, spans)
        wide = dys if step == 1 else [of.view(WIDE) for of in dys]
        into, out_of = list[Tensor](), list[Tensor]()
        for rank, theirs, inputs in plan.sources:
            place = dy[rank] if rank == plan.window.rank else plan.dys[rank]
            if place is not None and place.numel():
                parts = [
                    of.narrow(1, first // step, (last - first) // step)
                    for of, (first, last) in zip(wide, spans[rank], strict=True)
                ]
                _lay(parts, place)
            if theirs is not None:
                into.append(dy[rank])
                out_of.append(theirs)
            into.append(x[rank])
            out_of.append(inputs)
        distinct = [xs[i] for i in layout.distinct]
        whole = tuple((0, columns) for columns in layout.columns)
        _lay(distinct if _step(distinct, (whole,)) == 1 else [of.view(WIDE) for of in distinct], plan.x)
        self._event = ranks.outbox.take(plan.window, into, out_of)

    def wait(self) -> list[Factors]:
        """Of each layer, this rank's columns of dY, and x, over all ranks' tokens.

        Kernels that follow wait, the host does not.
        """
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        dy, x = (arrived.flatten(0, 1) for arrived in self._arrived)
        return split(self._layout, dy, x)


@lru_cache(256)
def _spans(heights: tuple[int, ...], size: int, shards: int) -> Spans:
    return tuple(tuple(owned_rows(height, shards, rank % shards) for height in heights) for rank in range(size))


def _step(tensors: Sequence[Tensor], spans: Spans) -> int:
    """Elements that can be copied as one: 16 bytes if all columns that are copied begin and end there, or else one."""
    step = WIDE.itemsize // tensors[0].itemsize
    return step if _whole(spans, step) and all(_begins_whole(tensor, step) for tensor in tensors) else 1


@lru_cache(256)
def _whole(spans: Spans, step: int) -> bool:
    return all(column % step == 0 for own in spans for span in own for column in span)


def _begins_whole(tensor: Tensor, step: int) -> bool:
    return tensor.storage_offset() % step == 0 and tensor.stride(1) == 1 and tensor.stride(0) % step == 0


def _lay(parts: list[Tensor], into: Tensor) -> None:
    """Put tensors [tokens, columns] side by side, and rows of zeros after them."""
    if parts[0].dtype != into.dtype:
        into = into.view(parts[0].dtype)
    tokens, most = parts[0].shape[0], into.shape[0]
    if tokens < most:
        into[tokens:].zero_()
        into = into[:tokens]
    torch.cat(parts, 1, out=into)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
