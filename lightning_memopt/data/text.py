"""Text for next-token prediction: the standard library's sources, or the user's own files."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_memopt.data.loader import ResumableLoader, ResumableSampler
from lightning_memopt.data.sources import (
    DataError,
    Document,
    find_files,
    in_validation,
    read_documents,
    stdlib_files,
)
from lightning_memopt.data.tokenizer import Tokenizer, load_tokenizer


class TokenWindows(Dataset):
    """A row of tokens cut into windows of ``seq_len``; the last, incomplete window is left out.

    Args:
        tokens: Integer tensor [N].
        seq_len: Tokens per window.
    """

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        """Number of windows; each needs one token more as its last target."""
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids`` and ``targets``, int64 [seq_len], the targets one token further on."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.seq_len
        window = self.tokens[start : start + self.seq_len + 1].long()
        return {"input_ids": window[:-1], "targets": window[1:]}


class TextDataModule(pl.LightningDataModule):
    """Windows of tokens from plain text, split into training and validation.

    Whole documents (files, or lines of ``.jsonl``) go to one side or the other by a fixed hash of their
    relative path, so the split is the same on every machine with the same files. Where that leaves a side
    empty, as with one big file, the end of the text becomes the validation part. Validation also serves
    ``test`` and ``predict``.

    Args:
        paths: Files, glob patterns and folders (their ``.txt`` and ``.jsonl`` files); None for the sources of
            the standard library of the running Python.
        field: Field of the ``.jsonl`` lines that holds the text.
        tokenizer: "bytes", or the folder or hub name of a Hugging Face tokenizer.
        seq_len: Tokens per sequence.
        batch_size: Sequences per batch and device.
        num_workers: Processes that prepare batches; 0 for none, which is plenty as the tokens lie in memory.
        val_fraction: Part of the text for validation, 0 for none.
        seed: Seed of the training order.

    Raises:
        DataError: A number is out of its range; later, at set-up: text is missing, empty, unreadable or too
        short.
    """

    def __init__(
        self,
        paths: list[str] | None = None,
        field: str = "text",
        tokenizer: str = "bytes",
        seq_len: int = 256,
        batch_size: int = 8,
        num_workers: int = 0,
        val_fraction: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if seq_len < 1 or batch_size < 1:
            raise DataError(f"seq_len={seq_len} and batch_size={batch_size} must be at least 1.")
        if not 0 <= val_fraction < 1:
            raise DataError(f"val_fraction={val_fraction} must be at least 0 and below 1.")
        self.save_hyperparameters()
        self.paths = paths
        self.field = field
        self.tokenizer_name = tokenizer
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.seed = seed
        self._tokenizer: Tokenizer | None = None
        self._train: TokenWindows | None = None
        self._val: TokenWindows | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_name)
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model must know."""
        return self.tokenizer.vocab_size

    def setup(self, stage: str) -> None:
        """Read, split and encode the text; a second call keeps what the first one read."""
        if self._train is not None:
            return
        files = stdlib_files() if self.paths is None else find_files(self.paths)
        train, val = self._split(list(read_documents(files, self.field)))
        self._train = self._windows(train, "training")
        self._val = self._windows(val, "validation") if self.val_fraction > 0 else None

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches, in the same order on every run; resumes within an epoch."""
        assert self._train is not None, "setup() comes first"
        trainer = self.trainer
        sampler: ResumableSampler = ResumableSampler(
            self._train,
            num_replicas=trainer.world_size if trainer else 1,
            rank=trainer.global_rank if trainer else 0,
            seed=self.seed,
        )
        # Batches of one shape only, unless that would leave none at all.
        return self._loader(ResumableLoader, self._train, sampler=sampler, drop_last=len(sampler) >= self.batch_size)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Batches in order; an empty list when ``val_fraction`` is 0."""
        return [] if self._val is None else self._loader(DataLoader, self._val)

    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        """The validation batches."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader | list[DataLoader]:
        """The validation batches."""
        return self.val_dataloader()

    def _loader(self, loader_class: type[DataLoader], dataset: TokenWindows, **kwargs: Any) -> DataLoader:
        return loader_class(
            dataset,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            **kwargs,
        )

    def _split(self, documents: list[Document]) -> tuple[Tensor, Tensor]:
        """Tokens of the training and of the validation part."""
        if not documents:
            raise DataError(f"There is no text in {', '.join(self.paths or ['the standard library'])}.")
        parts: tuple[list[Document], list[Document]] = ([], [])
        for document in documents:
            parts[in_validation(document.key, self.val_fraction)].append(document)
        if self.val_fraction == 0 or all(parts):
            return self._encode(parts[0]), self._encode(parts[1])
        tokens = self._encode(documents)
        cut = round(len(tokens) * (1 - self.val_fraction))
        return tokens[:cut], tokens[cut:]

    def _encode(self, documents: list[Document]) -> Tensor:
        """All documents in a row, each followed by the tokenizer's end mark if it has one."""
        end = [] if self.tokenizer.end_id is None else [self.tokenizer.end_id]
        rows: list[Tensor] = []
        for document in documents:
            ids = self.tokenizer.encode(document.text)
            rows += [ids, ids.new_tensor(end)]
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int32)

    def _windows(self, tokens: Tensor, part: str) -> TokenWindows:
        windows = TokenWindows(tokens, self.seq_len)
        if not len(windows):
            raise DataError(
                f"The {part} text has {len(tokens)} tokens, too few for one sequence of "
                f"data.seq_len={self.seq_len} and its last target: add text, lower data.seq_len"
                + (" or raise data.val_fraction." if part == "validation" else ".")
            )
        return windows
