"""Where the active weights of a sparse layer lie: from the number of an entry to the weight, by the packed mask.

Entries, what is kept per active weight, follow the order of the weights. A kernel that goes by entries reads and writes
them in consecutive places and computes for active weights only; the price is this search: in the index, which counts
before every 128 weights, then among the four words of that segment, then in the word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_memopt.sparsity.bits import SEGMENT

_SEGMENT = tl.constexpr(SEGMENT)


@triton.jit
def _pairs(word):
    """Bits set in each two bits."""
    return word - ((word >> 1) & 0x55555555)


@triton.jit
def _nibbles(pairs):
    return (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)


@triton.jit
def _bytes(nibbles):
    return (nibbles + (nibbles >> 4)) & 0x0F0F0F0F


@triton.jit
def count(word):
    """Bits set; compilers know these lines and make one instruction of them."""
    return (_bytes(_nibbles(_pairs(word))) * 0x01010101) >> 24


@triton.jit
def select(word, rank):
    """Place of the bit that is set and has `rank` others below it; both uint32, with more bits set than `rank`."""
    pairs = _pairs(word)
    nibbles = _nibbles(pairs)
    octets = _bytes(nibbles)
    below = (octets + (octets >> 8)) & 0xFF
    up = rank >= below
    place = tl.where(up, 16, 0).to(tl.uint32)
    rank = tl.where(up, rank - below, rank)
    below = (octets >> place) & 0xF
    up = rank >= below
    place = tl.where(up, place + 8, place)
    rank = tl.where(up, rank - below, rank)
    below = (nibbles >> place) & 0xF
    up = rank >= below
    place = tl.where(up, place + 4, place)
    rank = tl.where(up, rank - below, rank)
    below = (pairs >> place) & 3
    up = rank >= below
    place = tl.where(up, place + 2, place)
    rank = tl.where(up, rank - below, rank)
    return tl.where(rank >= ((word >> place) & 1), place + 1, place)


@triton.jit
def _words(bits, segment):
    """The four words of the mask's segments.

    The last one is read as a whole too: it has bits of the mask, so its sixteen bytes, which are aligned, are all
    memory that can be read. Whatever is in them behind the mask is never counted, nor selected.
    """
    # Two at a time: a register pair comes apart for nothing.
    pairs = bits.to(tl.pointer_type(tl.uint64)) + segment * 2
    lower, upper = tl.load(pairs), tl.load(pairs + 1)
    return lower.to(tl.uint32), (lower >> 32).to(tl.uint32), upper.to(tl.uint32), (upper >> 32).to(tl.uint32)


@triton.jit
def _below(word, places):
    """Bits set among so many of the lowest."""
    places = tl.minimum(tl.maximum(places, 0), 32)
    lower = word & ((1 << tl.minimum(places, 31).to(tl.uint32)) - 1).to(tl.uint32)
    return count(tl.where(places == 32, word, lower)).to(tl.int32)


@triton.jit
def entries_before(bits, index, at, total, ALIGNED: tl.constexpr):
    """Active weights before weight `at`, which begins a segment or ends the layer if `ALIGNED`."""
    if ALIGNED:
        before = tl.load(index + tl.cdiv(at, _SEGMENT))
    else:
        segment = tl.minimum(at, total - 1) // _SEGMENT
        places = at - segment * _SEGMENT
        w0, w1, w2, w3 = _words(bits, segment)
        before = tl.load(index + segment) + _below(w0, places) + _below(w1, places - 32)
        before += _below(w2, places - 64) + _below(w3, places - 96)
    return before


@triton.jit
def weights(bits, index, entry, segment, total, REACH: tl.constexpr):
    """Numbers of the weights that entries belong to.

    Args:
        bits: Aligned to a segment's sixteen bytes.
        entry: int32, of active weights in the `REACH` segments, a power of two, from that one on.
        segment: int32, the first of them; broadcasts against `entry`.
    """
    # Past the last segment, all entries count as being before.
    last = tl.cdiv(total, _SEGMENT) - segment
    index += segment
    step = entry * 0
    low = tl.load(index) + step
    for i in tl.static_range(1, 12):
        if REACH >> i > 0:
            further = step + (REACH >> i)
            before = tl.load(index + tl.minimum(further, last))
            up = before <= entry
            step = tl.where(up, further, step)
            low = tl.where(up, before, low)
    w0, w1, w2, w3 = _words(bits, segment + step)
    rank = (entry - low).to(tl.uint32)
    n0 = count(w0)
    n1 = n0 + count(w1)
    n2 = n1 + count(w2)
    upper = rank >= n1
    middle = tl.where(upper, n2, n0)
    odd = rank >= middle
    word = tl.where(upper, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
    rank -= tl.where(odd, middle, tl.where(upper, n1, 0))
    place = tl.where(upper, 64, 0) + tl.where(odd, 32, 0)
    return (segment + step) * _SEGMENT + place + select(word, rank).to(tl.int32)
