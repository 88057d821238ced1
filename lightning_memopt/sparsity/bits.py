"""A mask as packed bits with a small index: 1/8 byte per weight, and 4 bytes per `SEGMENT` weights.

Weight i of a layer, counted row by row, is active if bit i % 8 of byte i // 8 is set. The moments of active weights lie
in the order of the weights, so weight i has entry

    index[i // SEGMENT] + number of bits set in [i // SEGMENT * SEGMENT, i)

which a kernel finds from one index element and the bits of one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Name of a mask's bits in the state of an optimizer.
MASK = "smet_mask"
# Weights per element of the index. Mask and index together take 0.157 bytes per weight.
SEGMENT = 128
# Weights that are unpacked at a time: no tensor of the layer's size is made. A multiple of SEGMENT.
CHUNK = 1 << 22


def chunks(total: int, unit: int = 1) -> Iterator[tuple[int, int]]:
    """Cut [0, total) into ranges of about `CHUNK`, each but the last a multiple of `unit` and of `SEGMENT`."""
    step = max(CHUNK // (unit * SEGMENT), 1) * unit * SEGMENT
    for start in range(0, total, step):
        yield start, min(start + step, total)


def unpack(bits: Tensor, start: int, stop: int) -> Tensor:
    """The mask of weights [start, stop), bool [stop - start]."""
    first = start // 8
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flags = (bits[first : (stop + 7) // 8, None] >> shifts) & 1
    return flags.flatten()[start - 8 * first : stop - 8 * first].bool()


def count(bits: Tensor, total: int) -> int:
    """Active weights among the first `total`; waits for the device."""
    return sum(int(unpack(bits, start, stop).sum()) for start, stop in chunks(total))


def pack(total: int, part: Callable[[int, int], Tensor], device: torch.device, unit: int = 1) -> Tensor:
    """Bits of a mask that is given in parts.

    Args:
        total: Number of weights.
        part: The mask of weights [start, stop), bool; called in order, with ranges of `chunks`.
        device: Where the bits shall lie.
        unit: See `chunks`.

    Returns:
        uint8 [ceil(total / 8)]; unused bits are zero.
    """
    bits = torch.empty((total + 7) // 8, dtype=torch.uint8, device=device)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    for start, stop in chunks(total, unit):
        flags = torch.nn.functional.pad(part(start, stop), (0, -(stop - start) % 8)).view(-1, 8)
        bits[start // 8 : (stop + 7) // 8] = (flags * weights).sum(1, dtype=torch.uint8)
    return bits


def make_index(bits: Tensor, total: int) -> Tensor:
    """Active weights before each segment, and in all: int32 [ceil(total / SEGMENT) + 1]."""
    segments = -(-total // SEGMENT)
    index = torch.zeros(segments + 1, dtype=torch.int32, device=bits.device)
    for start, stop in chunks(total):
        first, last = start // SEGMENT, -(-stop // SEGMENT)
        flags = torch.nn.functional.pad(unpack(bits, start, stop), (0, -(stop - start) % SEGMENT))
        index[first + 1 : last + 1] = flags.view(-1, SEGMENT).sum(1, dtype=torch.int32)
    return index.cumsum_(0)


def move(entries: Tensor, old: Tensor, new: Tensor, total: int, fill: float | int, out: Tensor | None = None) -> Tensor:
    """Entries of one mask's active weights put in the order of another's.

    Args:
        entries: One value per active weight of `old`, any dtype, [active].
        old: Bits of the mask that the entries belong to.
        new: Bits of the other.
        total: Number of weights.
        fill: Value of weights that only `new` holds.
        out: Where to write; a tensor other than `entries`.
    """
    counts = [(int(unpack(new, a, b).sum()), int(unpack(old, a, b).sum())) for a, b in chunks(total)]
    if out is None:
        out = entries.new_empty(sum(count for count, _ in counts))
    to = at = 0
    for (start, stop), (taken, held) in zip(chunks(total), counts, strict=True):
        was, now = unpack(old, start, stop), unpack(new, start, stop)
        part = out[to : to + taken]
        part.fill_(fill)
        part[was[now]] = entries[at : at + held][now[was]]
        to, at = to + taken, at + held
    return out


def pack_flags(flags: Tensor) -> Tensor:
    """Bits of a mask that is there as a whole."""
    return pack(len(flags), lambda start, stop: flags[start:stop], flags.device)


def by_rows(bits: Tensor, rows: int, columns: int) -> Tensor:
    """The same mask with whole bytes for each row, so that rows can be cut apart: [rows, ceil(columns / 8)]."""
    if columns % 8 == 0:
        return bits.view(rows, columns // 8)
    width = -(-columns // 8)
    result = bits.new_empty(rows, width)
    for start, stop in _row_chunks(rows, columns):
        flags = unpack(bits, start * columns, stop * columns).view(-1, columns)
        flags = torch.nn.functional.pad(flags, (0, 8 * width - columns))
        result[start:stop] = pack_flags(flags.view(-1)).view(-1, width)
    return result


def flat_bits(bits: Tensor, columns: int) -> Tensor:
    """Inverse of `by_rows`; a mask that is flat stays as it is."""
    if bits.dim() == 1:
        return bits
    rows, width = bits.shape
    if columns % 8 == 0:
        return bits.reshape(-1)
    result = bits.new_empty((rows * columns + 7) // 8)
    for start, stop in _row_chunks(rows, columns):
        flags = unpack(bits[start:stop].reshape(-1), 0, 8 * width * (stop - start)).view(-1, 8 * width)
        part = pack_flags(flags[:, :columns].reshape(-1))
        result[start * columns // 8 : (stop * columns + 7) // 8] = part
    return result


def cut(bits: Tensor, start: int, stop: int) -> Tensor:
    """The mask of weights [start, stop) of a flat one, packed anew."""
    return pack(stop - start, lambda a, b: unpack(bits, start + a, start + b), bits.device)


def _row_chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, each but the last a multiple of eight, whose bits fill whole bytes."""
    step = 8 * max(CHUNK // (8 * columns), 1)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
