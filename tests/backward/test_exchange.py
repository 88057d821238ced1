"""Exchange and reduce on their own: right sums, counted bytes, bounded memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Module
from sharded import Ranks, Straight, train
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt.backward import exchange, traffic
from lightning_memopt.backward.exchange import Exchange, reduce_rows
from lightning_memopt.backward.outbox import Copied, Outbox

TOKENS = (3, 5, 0)
SHAPES = [(7, 5), (3, 4), (1, 2), (2, 9), (9, 1), (48, 16)]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


def join_group() -> exchange.Ranks:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    world, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    assert world is not None
    outbox = Outbox(world, torch.device("cpu"), timedelta(seconds=60))
    return exchange.Ranks(world, world, None, size, size, rank, outbox)


def factors_of(rank: int, shape: tuple[int, int], dtype: torch.dtype, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return tuple(torch.randn(tokens, n, generator=generator).to(dtype) for n in shape)  # type: ignore[return-value]


def summed(dtype: torch.dtype) -> None:
    """Both ways give this rank's rows of the sum; uneven tokens, short and empty shards."""
    ranks = join_group()
    for shape in SHAPES:
        mine = factors_of(ranks.index, shape, dtype, TOKENS[ranks.index])
        pairs = [factors_of(rank, shape, dtype, TOKENS[rank]) for rank in range(ranks.size)]
        whole = sum(dy.double().t() @ x.double() for dy, x in pairs)
        assert isinstance(whole, Tensor)
        start, stop = ranks.rows(shape[0])
        for way in (Exchange, Copied):
            ((dy, x),) = way([mine[0]], [mine[1]], [0], max(TOKENS), ranks).wait()
            torch.testing.assert_close(dy.double().t() @ x.double(), whole[start:stop], rtol=1e-12, atol=1e-12)
        for elements in (1, 2 * 3 * shape[1], 10**6):
            rows = torch.full((stop - start, shape[1]), torch.nan)
            for first, last, block in reduce_rows(*mine, ranks, torch.float32, elements):
                rows[first:last] = block
            torch.testing.assert_close(rows.double(), whole[start:stop], rtol=1e-5, atol=1e-5)


def bundled(dtype: torch.dtype, heights: tuple[int, ...]) -> None:
    """Layers that travel together arrive as they would alone; the second and fourth have the first one's x."""
    ranks = join_group()
    sources, widths = [0, 0, 2, 0, 4], [5, 5, 3, 5, 8]
    layers = [factors_of(ranks.index, shape, dtype, TOKENS[ranks.index]) for shape in zip(heights, widths, strict=True)]
    dys, xs = [dy for dy, _ in layers], [layers[source][1] for source in sources]
    alone = [Exchange([dy], [x], [0], max(TOKENS), ranks).wait()[0] for dy, x in zip(dys, xs, strict=True)]
    few = exchange.TOGETHER
    for collectives in (2, 1):
        exchange.TOGETHER = few if collectives == 2 else ranks.size
        try:
            together = Exchange(dys, xs, sources, max(TOKENS), ranks).wait()
        finally:
            exchange.TOGETHER = few
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert together[3][1].data_ptr() == together[0][1].data_ptr()


@pytest.mark.parametrize("heights", [(6, 9, 3, 12, 6), (24, 72, 48, 24, 24), (6, 7, 1, 2, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bundles(three: Ranks, dtype: torch.dtype, heights: tuple[int, ...]) -> None:
    """Equal shards, wide enough to be copied 16 bytes at a time or not, and uneven and empty ones."""
    three(bundled, dtype, heights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums(three: Ranks, dtype: torch.dtype) -> None:
    three(summed, dtype)


def strided(tokens: int, columns: int, dtype: torch.dtype, generator: torch.Generator, choose: random.Random) -> Tensor:
    """Random numbers in one of the layouts that factors come in."""
    wide = torch.randn(tokens, columns + choose.choice([16, 17]), generator=generator).to(dtype)
    plain = wide[:, :columns].contiguous()
    odd = plain.new_zeros(tokens * columns + 1)[1:].view(tokens, columns).copy_(plain)
    return choose.choice(
        [plain, wide[:, :columns], wide[:, 1 : columns + 1], wide[:, -columns:], plain.t().contiguous().t(), odd]
    )


def copied_strides(bundles: int) -> None:
    """What arrives by copies is what all ranks have, whatever its shape, memory and number of tokens."""
    ranks = join_group()
    for bundle in range(bundles):
        same, own = random.Random(bundle), random.Random(bundle * ranks.size + ranks.index)
        generator = torch.Generator().manual_seed(own.randrange(1 << 30))
        dtype = same.choice([torch.float64, torch.float32, torch.bfloat16])
        tokens = [same.choice([0, 1, 5]) for _ in range(ranks.size)]
        shapes = [(same.choice([1, 4, 4, 7, 48]), same.choice([3, 8, 16])) for _ in range(same.randint(1, 3))]
        mine = tokens[ranks.index]
        factors = [[strided(mine, n, dtype, generator, own) for n in shape] for shape in shapes]
        dys, xs = zip(*factors, strict=True)
        arrived = Copied(dys, xs, range(len(shapes)), max(tokens), ranks).wait()
        everyone: list[Any] = [None] * ranks.size
        dist.all_gather_object(everyone, [[factor.clone() for factor in pair] for pair in factors])
        for layer, (shape, got) in enumerate(zip(shapes, arrived, strict=True)):
            first, last = ranks.rows(shape[0])
            for part, columns, tensor in zip((0, 1), (slice(first, last), slice(None)), got, strict=True):
                all_tokens = [
                    torch.nn.functional.pad(said[layer][part], (0, 0, 0, max(tokens) - count))[:, columns]
                    for said, count in zip(everyone, tokens, strict=True)
                ]
                assert torch.equal(tensor, torch.cat(all_tokens)), (bundle, layer)


def test_copies(three: Ranks) -> None:
    """With ranks that have one token or none, and shards without rows."""
    three(copied_strides, 100)


class Counter:
    """Stands in for this module's collectives, counting what a rank receives from others."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank, self.received = size, rank, 0
        self.plain = exchange.all_gather, exchange.all_to_all, exchange.reduce_scatter

    def all_gather(self, out: Tensor, mine: Tensor, **options: Any) -> Any:
        self.received += out.nbytes - mine.nbytes
        return self.plain[0](out, mine, **options)

    def all_to_all(self, out: Tensor, mine: Tensor, **options: Any) -> Any:
        splits = options["output_split_sizes"]
        self.received += out.nbytes - splits[self.rank] * out.element_size()
        return self.plain[1](out, mine, **options)

    def reduce_scatter(self, out: Tensor, mine: Tensor, **options: Any) -> Any:
        self.received += out.nbytes * (self.size - 1)
        return self.plain[2](out, mine, **options)


def counted(dtype: torch.dtype) -> list[tuple[int, int]]:
    """(predicted, counted) for each shape and way."""
    ranks = join_group()
    counter, tokens, pairs = Counter(ranks.size, ranks.index), 4, []
    names = ("all_gather", "all_to_all", "reduce_scatter")
    for name in names:
        setattr(exchange, name, getattr(counter, name))
    try:
        for shape in SHAPES:
            mine = factors_of(ranks.index, shape, dtype, tokens)
            counter.received = 0
            Exchange([mine[0]], [mine[1]], [0], tokens, ranks).wait()
            predicted = traffic.exchange_bytes(shape, tokens, ranks.size, ranks.shards, dtype.itemsize)
            pairs.append((predicted, counter.received))
            counter.received = 0
            list(reduce_rows(*mine, ranks, torch.float32))
            pairs.append((traffic.reduce_bytes(shape, ranks.size, ranks.shards), counter.received))
        layers = [traffic.Layer(shape, tokens, 0, dtype.itemsize) for shape in ((6, 5), (9, 5), (3, 5))]
        x = factors_of(ranks.index, (1, 5), dtype, tokens)[1]
        dys = [factors_of(ranks.index, layer.shape, dtype, tokens)[0] for layer in layers]
        counter.received = 0
        Exchange(dys, [x] * 3, [0] * 3, tokens, ranks).wait()
        predicted = sum(traffic.received(layers, ["exchange"] * 3, ranks.size, ranks.shards))
        pairs.append((predicted, counter.received))
    finally:
        for name, plain in zip(names, counter.plain, strict=True):
            setattr(exchange, name, plain)
    return pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_bytes_are_those_counted(three: Ranks, dtype: torch.dtype) -> None:
    """On ranks with full shards; those with short ones receive less."""
    results = three(counted, dtype)
    assert all(predicted == received for predicted, received in results[0])
    assert all(predicted >= received for pairs in results for predicted, received in pairs)


def test_cheaper_route() -> None:
    """Few tokens or ranks: exchange. Many: reduce. Never by the rank's own view."""
    layer = traffic.Layer((14336, 4096), 512, 0, 2)
    assert traffic.cheaper_routes([layer], 8, 8) == ["exchange"]
    assert traffic.cheaper_routes([layer._replace(tokens=8192)], 8, 8) == ["reduce"]
    assert traffic.cheaper_routes([layer], 512, 512) == ["reduce"]
    # What q's x costs, k and v need not pay.
    q, k = (traffic.Layer((rows, 4096), 2048, 0, 2) for rows in (4096, 1024))
    assert traffic.cheaper_routes([k], 2, 2) == ["reduce"]
    assert traffic.cheaper_routes([q, k, k, k._replace(source=3)], 2, 2) == ["exchange"] * 3 + ["reduce"]
    assert traffic.reduce_bytes((8, 4), 4, 2) == 4 * 4 * 4 + 4 * 4 * 4  # reduce-scatter, all-reduce of two replicas


def test_table_in_the_docs_is_the_computed_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "sharding.md"
    assert traffic.table() in page.read_text()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes, besides FSDP2's own buffers for the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.name = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not str(function).startswith(
            ("fsdp.", "c10d.", "aten.empty.", "aten.as_strided", "aten.detach", "aten.view", "aten.t.")
        ):
            for out in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(out, Tensor) and out.numel() > self.elements:
                    self.elements, self.name = out.numel(), str(function)
        return result


WIDTH = 64


class Watched(Module):
    """Its backward pass is watched."""

    def __init__(self) -> None:
        super().__init__(net=partial(Straight, WIDTH))
        self.largest = Largest()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.largest:
            super().backward(loss, *args, **kwargs)


def largest(trainer: Any) -> tuple[int, str]:
    return trainer.lightning_module.largest.elements, trainer.lightning_module.largest.name


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_no_weight_gradient_is_formed(three: Ranks, options: dict[str, Any]) -> None:
    """By exchange nothing in backward has the size of a [64, 64] gradient, not even of a rank's shard and its state.

    By reduce, the only such tensor is the block, whose size is set.
    """
    shard, whole = traffic.shard_rows(WIDTH, 3) * WIDTH, WIDTH * WIDTH
    results = three(train, Watched, {"route": "exchange"}, None, largest, **options)
    assert all(elements <= shard for elements, _ in said(results)), results[0]["said"]
    three(bound_blocks, 6 * WIDTH)
    results = three(train, Watched, {"route": "reduce"}, None, largest, **options)
    assert all(elements <= shard for elements, _ in said(results)), results[0]["said"]
    three(bound_blocks, 1 << 23)
    results = three(train, Watched, {"route": "reduce"}, None, largest, **options)
    assert all(elements >= whole for elements, _ in said(results)), results[0]["said"]


def said(results: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [result["said"] for result in results]


def bound_blocks(elements: int) -> None:
    exchange.BLOCK_ELEMENTS = elements
