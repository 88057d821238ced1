"""Text data for the shipped configs."""

from lightning_memopt.data.sources import DataError
from lightning_memopt.data.text import TextDataModule, TokenWindows
from lightning_memopt.data.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer

__all__ = ["ByteTokenizer", "DataError", "HFTokenizer", "TextDataModule", "TokenWindows", "load_tokenizer"]
