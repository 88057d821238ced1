"""Random tokens: what benchmarks train on, as only shapes matter there and nothing need be downloaded."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader


class RandomTokens(pl.LightningDataModule):
    """One batch of uniformly random tokens, again and again, so that a training run can learn it by heart.

    Args:
        seq_len: Tokens per sequence.
        batch_size: Sequences per batch.
        vocab_size: Number of token ids; None for the model's own.
        batches: Batches per epoch.
        seed: Seed of the tokens.
    """

    def __init__(
        self, seq_len: int, batch_size: int = 1, vocab_size: int | None = None, batches: int = 1000, seed: int = 0
    ) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.batches = batches
        self.seed = seed

    def batch(self, vocab_size: int, seq_len: int | None = None) -> dict[str, Tensor]:
        """``input_ids`` and ``targets``, int64 [batch_size, seq_len], the targets one token further on."""
        generator = torch.Generator("cpu").manual_seed(self.seed)
        shape = (self.batch_size, (seq_len or self.seq_len) + 1)
        tokens = torch.randint(vocab_size, shape, generator=generator, device="cpu")
        return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def train_dataloader(self) -> DataLoader:
        """The batch, ``batches`` times."""
        vocab_size: Any = self.vocab_size
        if vocab_size is None:
            assert self.trainer is not None
            vocab_size = self.trainer.lightning_module.vocab_size
        batches: Any = [self.batch(vocab_size)] * self.batches
        return DataLoader(batches, batch_size=None)
