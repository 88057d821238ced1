"""Gefen's blocks: their geometry, their choice, and the bytes that state takes on many architectures."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, nn

import lightning_memopt as memopt
from lightning_memopt.optim.gefen_blocks import BUDGET, Blocks, Wish, choose, disagreement, per_block, profile
from lightning_memopt.optim.gefen_learning import options, spare_bytes
from lightning_memopt.rules.gefen import GefenRule


def by_hand(x: Tensor, block: int) -> list[Tensor]:
    return [part for row in x for part in row.split(block)]


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 127, 128, 129, 147, 300, 509])
@pytest.mark.parametrize("block", [16, 64, 128, 256])
def test_blocks_cut_rows_from_the_left(columns: int, block: int) -> None:
    x = torch.randn(3, columns, dtype=torch.float64)
    blocks = Blocks.of(x, torch.empty(per_block(x.shape, block)))
    parts = by_hand(x, block)
    assert (blocks.rows, blocks.columns, blocks.rows * blocks.count) == (3, columns, len(parts))
    assert blocks.block >= min(block, columns) and blocks.block <= block
    assert torch.allclose(blocks.mean(x).flatten(), torch.stack([part.mean() for part in parts]))
    assert torch.equal(blocks.join(blocks.split(x), x.shape), x)
    spread = blocks.spread(blocks.mean(x), x.shape)
    assert torch.allclose(spread, torch.cat([part.mean().expand(len(part)) for part in parts]).view(x.shape))


@pytest.mark.parametrize("columns", [64, 65, 200, 256, 300, 509])
def test_merged_means_are_means(columns: int) -> None:
    x = torch.rand(2, columns, dtype=torch.float64)
    fine = Blocks.of(x, torch.empty(per_block(x.shape, 64)))
    coarse = Blocks.of(x, torch.empty(per_block(x.shape, 128)))
    assert torch.allclose(fine.merge(fine.mean(x), 2), coarse.mean(x))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((768, 2304), (768, 18)),
        ((64, 3, 7, 7), (64, 2)),  # a convolution's row is an output channel
        ((512, 1, 3, 3), (512, 1)),
        ((8, 1408, 2048), (8, 22528)),  # experts
    ],
)
def test_what_a_row_is(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert per_block(shape, 128) == expected


def test_profile_sees_what_rows_have_in_common_and_not_their_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 3.0]).repeat_interleave(64).repeat(2)  # every other run of 64 columns is larger
    size = torch.rand(500, 1, generator=generator) * 100  # rows differ by two decades
    g = torch.randn(500, 256, generator=generator) * size
    for gradient, low, high in ((g, 0.0, 0.02), (g * scale, 0.5, 1.0)):
        blocks = Blocks.of(g, torch.empty(per_block(g.shape, 64)))
        spread, rows = profile(blocks.mean(gradient.square()))
        assert rows == 500
        assert low <= disagreement(spread / rows, blocks, 2) <= high


def test_profile_ignores_rows_and_columns_without_gradient() -> None:
    fine = torch.ones(10, 4)
    fine[3] = 0
    fine[:, 2:] = 0
    spread, rows = profile(fine)
    assert rows == 9
    assert disagreement(spread / rows, Blocks(10, 256, 4), 2) == pytest.approx(0)
    assert disagreement(torch.zeros(4), Blocks(10, 256, 4), 2) == 0


def test_blocks_are_chosen_by_need_while_the_bytes_last() -> None:
    def wish(error: float) -> Wish:
        return Wish((1000, 256), (128, 64), (error, 0.0))

    cost = 4 * 1000 * 2  # two blocks more in each row
    wishes = [wish(0.05), wish(0.3), wish(0.2), wish(0.5)]
    assert choose(wishes, 10 * cost) == [128, 64, 64, 64]
    assert choose(wishes, 2 * cost) == [128, 64, 128, 64]
    assert choose(wishes, cost - 1) == [128] * 4
    assert choose(wishes, -1.0) == [128] * 4


# ------------------------------------------------------------------------------------------------ bytes per parameter
def causal_lm(name: str, **config: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **config))


def llama3() -> nn.Module:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    return causal_lm("llama", num_hidden_layers=4, vocab_size=128256, **sizes)


def qwen3() -> nn.Module:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    return causal_lm("qwen3", num_hidden_layers=4, vocab_size=151936, head_dim=128, tie_word_embeddings=True, **sizes)


def qwen3_experts() -> nn.Module:
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 16, "num_attention_heads": 32}
    return causal_lm("qwen3_moe", num_hidden_layers=2, num_key_value_heads=4, vocab_size=30000, **sizes)


def gpt2() -> nn.Module:
    return causal_lm("gpt2")


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.ViTForImageClassification(transformers.ViTConfig())


def resnet() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.ResNetForImageClassification(transformers.ResNetConfig())


def embedding() -> nn.Module:
    return nn.Embedding(50257, 300)


@pytest.mark.parametrize("build", [llama3, qwen3, qwen3_experts, gpt2, vit, resnet, embedding])
def test_state_is_at_most_1_1_bytes_per_parameter(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        params = list(build().parameters())
    optimizer, rule = memopt.Gefen(params), GefenRule()
    (group,) = optimizer.param_groups
    total = 0
    wishes = []
    for param in params:
        storage = rule.storage(param, group, param.dtype)
        state = rule.init_state(param, group, storage)
        total += sum(value.numel() * value.element_size() for value in state.values())
        if "codebook" in state:
            lengths = options(group, param)
            wishes.append(Wish(tuple(param.shape), lengths, (1.0,) * (len(lengths) - 1) + (0.0,)))
    numel = sum(param.numel() for param in params)
    assert 1 < total / numel <= BUDGET
    # The same if every weight wants the finest blocks.
    spare = spare_bytes(optimizer, rule)
    chosen = choose(wishes, spare)
    more = sum(
        4 * (prod(per_block(wish.shape, block)) - prod(per_block(wish.shape, 128)))
        for wish, block in zip(wishes, chosen, strict=True)
    )
    assert (total + more) / numel <= BUDGET + 1e-4
