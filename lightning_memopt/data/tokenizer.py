"""Turn text into token ids and back: bytes by default, a Hugging Face tokenizer by name."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_memopt.data.sources import DataError
from lightning_memopt.models.hf import import_transformers


class Tokenizer(Protocol):
    """What the data module and ``memopt generate`` need of a tokenizer."""

    vocab_size: int
    end_id: int | None

    def encode(self, text: str) -> Tensor:
        """Token ids of a text, an integer tensor [T] of the smallest handy dtype, without special tokens."""

    def decode(self, ids: Tensor) -> str:
        """The text of ids [T]."""


class ByteTokenizer:
    """The 256 bytes of UTF-8. NUL, which no text contains, ends a document."""

    vocab_size = 256
    end_id: int | None = 0

    def encode(self, text: str) -> Tensor:
        """The bytes of a text, uint8 [T]."""
        return torch.from_numpy(np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).copy())

    def decode(self, ids: Tensor) -> str:
        """The text of bytes [T]; a cut or invalid character becomes a replacement mark."""
        return bytes(ids.tolist()).decode("utf-8", errors="replace")


class HFTokenizer:
    """A tokenizer of the transformers library, from a folder or a name on the hub.

    Raises:
        MissingExtraError: transformers is not installed.
        DataError: There is no such tokenizer.
    """

    def __init__(self, name_or_path: str) -> None:
        transformers = import_transformers()
        try:
            self.inner: Any = transformers.AutoTokenizer.from_pretrained(name_or_path)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise DataError(f"transformers cannot load a tokenizer from {name_or_path!r}: {reason}") from error
        self.vocab_size: int = len(self.inner)
        self.end_id: int | None = self.inner.eos_token_id

    def encode(self, text: str) -> Tensor:
        """Token ids of a text, int32 [T]."""
        ids = self.inner(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)

    def decode(self, ids: Tensor) -> str:
        """The text of ids [T]."""
        return self.inner.decode(ids.tolist())


def load_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, or the tokenizer of a Hugging Face folder or hub name."""
    return ByteTokenizer() if name == "bytes" else HFTokenizer(name)
