"""Packed masks, their index, and entries that move from one mask to another."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lightning_memopt.sparsity import bits
from lightning_memopt.sparsity.state import metadata_bytes

SIZES = [1, 7, 8, 128, 129, 1000, 2049]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "CHUNK", 256)


def packed(mask: torch.Tensor) -> torch.Tensor:
    return bits.pack(len(mask), lambda start, stop: mask[start:stop], mask.device)


@pytest.mark.parametrize("total", SIZES)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_round_trip(total: int, density: float) -> None:
    """Any range comes back, the index counts, and nothing takes more bytes than it says."""
    mask = torch.rand(total) < density
    packed_mask = packed(mask)
    index = bits.make_index(packed_mask, total)
    for start, stop in [(0, total), (total // 3, total), (total // 5, total // 2)]:
        assert torch.equal(bits.unpack(packed_mask, start, stop), mask[start:stop])
    before = torch.cat([torch.zeros(1), mask.cumsum(0)])
    starts = [min(i * bits.SEGMENT, total) for i in range(len(index))]
    assert index.tolist() == before[starts].int().tolist()
    size = metadata_bytes(total, int(mask.sum()))
    assert (packed_mask.nbytes, index.nbytes) == (size["mask"], size["index"])


@pytest.mark.parametrize("total", [136, 1000, 1 << 20])
def test_mask_and_index_take_a_quarter_byte(total: int) -> None:
    size = metadata_bytes(total, 0)
    assert size["mask"] + size["index"] <= 0.25 * total


@pytest.mark.parametrize("total", SIZES)
def test_move(total: int) -> None:
    """Entries follow their weights; new ones are filled."""
    old, new = torch.rand(total) < 0.4, torch.rand(total) < 0.4
    values = torch.randn(total)
    moved = bits.move(values[old], packed(old), packed(new), total, -1.0)
    assert torch.equal(moved, torch.where(old, values, -1.0)[new])


@pytest.mark.parametrize("unit", [1, 2, 100, 1000])
def test_chunks_hold_whole_units(unit: int) -> None:
    ranges = list(bits.chunks(6000, unit))
    assert ranges[0][0] == 0 and ranges[-1][1] == 6000
    for (_, stop), (start, _) in pairwise(ranges):
        assert stop == start and start % unit == 0 and start % bits.SEGMENT == 0


@pytest.mark.parametrize(("rows", "columns"), [(5, 16), (11, 7), (23, 130), (0, 9)])
def test_rows_with_whole_bytes(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There and back, in few and in many chunks; and any part of a mask on its own."""
    mask = torch.rand(rows * columns) < 0.4
    for chunk in (bits.CHUNK, 128):
        monkeypatch.setattr(bits, "CHUNK", chunk)
        packed = bits.pack_flags(mask)
        rowed = bits.by_rows(packed, rows, columns)
        assert rowed.shape == (rows, -(-columns // 8))
        assert torch.equal(bits.flat_bits(rowed, columns), packed)
        for row in range(rows):
            assert torch.equal(bits.unpack(rowed[row], 0, columns), mask[row * columns : (row + 1) * columns])
        part = bits.cut(packed, min(columns, len(mask)), len(mask))
        assert torch.equal(bits.unpack(part, 0, max(0, (rows - 1) * columns)), mask[columns:])
