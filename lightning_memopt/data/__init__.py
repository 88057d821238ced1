"""Text data for the shipped configs, and random tokens for benchmarks."""

from lightning_memopt.data.random_tokens import RandomTokens
from lightning_memopt.data.sources import DataError
from lightning_memopt.data.text import TextDataModule, TokenWindows
from lightning_memopt.data.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "DataError",
    "HFTokenizer",
    "RandomTokens",
    "TextDataModule",
    "TokenWindows",
    "load_tokenizer",
]
