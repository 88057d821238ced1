"""Bytes that one rank receives to update one weight sharded by rows, by each way there is.

With N ranks, a weight [R, C], T tokens per rank and b bytes per element of x and dY:

    exchange    (N-1) T (C + R/N) b      x of the other ranks, and their dY columns of this rank's rows; layers with
                                         the same x receive it once
    reduce      (N-1) (R/N) C 4          float32 partial sums of this rank's rows of dW
    FSDP2       (N-1) (R/N) C b          the same in the gradient's own precision, of a stored dW

The gather and scatter of the weight itself (FSDP2's own) come on top, for all three alike. ``python -m
lightning_memopt.backward.traffic`` prints the table of ``docs/sharding.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Route = Literal["exchange", "reduce"]
Way = Literal["auto"] | Route

# The distinct linear layers of an 8B Llama, [rows, columns], and how many of each.
LAYERS_8B = {
    "attention q, o": ((4096, 4096), 64),
    "attention k, v": ((1024, 4096), 64),
    "mlp gate, up": ((14336, 4096), 64),
    "mlp down": ((4096, 14336), 32),
    "head": ((128256, 4096), 1),
}


def shard_rows(rows: int, shards: int) -> int:
    """Rows of every shard but the last ones, which FSDP2 pads."""
    return -(-rows // shards)


def exchange_bytes(
    shape: tuple[int, int], tokens: int, ranks: int, shards: int, itemsize: int, gathers: bool = True
) -> int:
    """Received by one rank that exchanges factors.

    Args:
        shape: Rows and columns of the weight.
        tokens: The largest number of tokens of any rank.
        ranks: Ranks that have tokens.
        shards: Ranks that hold different rows; fewer than `ranks` where replicas of them exist.
        itemsize: Bytes of an element of x and dY.
        gathers: Whether x is received for this layer, and not with another one.
    """
    rows, columns = shape
    return (ranks - 1) * tokens * (gathers * columns + shard_rows(rows, shards)) * itemsize


def reduce_bytes(shape: tuple[int, int], ranks: int, shards: int, itemsize: int = 4) -> int:
    """Received by one rank that reduces blocks of dW: reduce-scatter over shards, all-reduce over replicas."""
    rows, columns = shape
    part = shard_rows(rows, shards) * columns * itemsize
    replicas = ranks // shards
    return (shards - 1) * part + 2 * (replicas - 1) * part // replicas


def lookup_bytes(dim: int, tokens: int, ranks: int, itemsize: int) -> int:
    """Received by one rank of what others looked up in a table: dY and int64 row numbers."""
    return (ranks - 1) * tokens * (dim * itemsize + 8)


class Layer(NamedTuple):
    """One of the layers that are sent together.

    Attributes:
        shape: Rows and columns of the weight.
        tokens: The largest number of tokens of any rank.
        source: Position of the first layer with the same x.
        itemsize: Bytes of an element of x and dY.
        wide: Bytes of an element of the sum.
    """

    shape: tuple[int, int]
    tokens: int
    source: int
    itemsize: int
    wide: int = 4


def received(layers: Sequence[Layer], routes: Sequence[Route], ranks: int, shards: int) -> list[int]:
    """Bytes that one rank receives for each layer, by the given routes."""
    gathered: set[int] = set()
    counts = []
    for (shape, tokens, source, itemsize, wide), route in zip(layers, routes, strict=True):
        if route == "exchange":
            counts.append(exchange_bytes(shape, tokens, ranks, shards, itemsize, source not in gathered))
            gathered.add(source)
        else:
            counts.append(reduce_bytes(shape, ranks, shards, wide))
    return counts


def cheaper_routes(layers: Sequence[Layer], ranks: int, shards: int) -> list[Route]:
    """The way that moves fewer bytes, one for all layers with the same x.

    The same on all ranks, as everything it depends on is.
    """
    ways: tuple[Route, ...] = ("exchange", "reduce")
    costs = [received(layers, [way] * len(layers), ranks, shards) for way in ways]
    routes: list[Route] = []
    for layer in layers:
        alike = [i for i, other in enumerate(layers) if other.source == layer.source]
        exchange, reduce = (sum(cost[i] for i in alike) for cost in costs)
        routes.append("exchange" if exchange <= reduce else "reduce")
    return routes


def chosen_routes(way: Way, layers: Sequence[Layer], ranks: int, shards: int) -> list[Route]:
    """`way` for every layer, or those of `cheaper_routes` if it is "auto"."""
    return cheaper_routes(layers, ranks, shards) if way == "auto" else [way] * len(layers)


def said(plan: Mapping[str, tuple[Route, int]]) -> str:
    """Routes and bytes received, by parameter name, in words."""
    lines = ["Bytes that each rank receives to update its linear layers, per backward pass:"]
    routes: tuple[Route, ...] = ("exchange", "reduce")
    for route in routes:
        moved = [count for taken, count in plan.values() if taken == route]
        if moved:
            lines.append(f"  {route}: {len(moved)} layers, {sum(moved) / 1e6:,.1f} MB")
    return "\n".join(lines)


def table(tokens: tuple[int, ...] = (512, 2048), ranks: tuple[int, ...] = (2, 4, 8, 32, 128, 512)) -> str:
    """MB received per rank, layer and step at 8B scale in bf16, in Markdown."""
    lines = [
        "| layer | [rows, columns] | ranks | "
        + " | ".join(f"exchange, {t} tokens" for t in tokens)
        + " | reduce | FSDP2 |",
        "| --- | --- | --- | " + " | ".join("---" for _ in tokens) + " | --- | --- |",
    ]
    for name, (shape, _) in LAYERS_8B.items():
        for n in ranks:
            ways = [exchange_bytes(shape, t, n, n, 2) for t in tokens]
            reduce = reduce_bytes(shape, n, n)
            cells = [f"**{_mb(way)}**" if way <= reduce else _mb(way) for way in ways]
            lines.append(f"| {name} | {list(shape)} | {n} | {' | '.join(cells)} | {_mb(reduce)} | {_mb(reduce // 2)} |")
    return "\n".join(lines) + "\n"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f}"


if __name__ == "__main__":
    print(table(), end="")
