"""`memopt generate`: see what a trained model writes."""

from __future__ import annotations

import torch

from lightning_memopt.data import load_tokenizer
from lightning_memopt.errors import MemOptError
from lightning_memopt.models import load_module


def generate(
    ckpt: str,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> None:
    """Continue a prompt with a trained language model.

    Args:
        ckpt: Checkpoint file of a run, or the folder of a saved Hugging Face model, as ``memopt export`` writes it.
        prompt: Text to continue; by default the start of a document.
        max_new_tokens: Most tokens to add.
        temperature: Divides the logits before sampling; 0 always takes the likeliest token.
        top_k: Sample among the k likeliest tokens only.
        seed: Seed of the sampling.

    Raises:
        MemOptError: The checkpoint cannot be read, or a number is out of its range.
    """
    if max_new_tokens < 1 or temperature < 0 or (top_k is not None and top_k < 1):
        raise MemOptError("--max_new_tokens and --top_k must be at least 1, --temperature at least 0.")
    module, data = load_module(ckpt)
    tokenizer = load_tokenizer(data.get("tokenizer", "bytes"))
    if tokenizer.vocab_size > module.vocab_size:
        raise MemOptError(f"The tokenizer has {tokenizer.vocab_size} token ids but the model only {module.vocab_size}.")
    ids = tokenizer.encode(prompt).long()
    if not len(ids):
        if tokenizer.end_id is None:
            raise MemOptError("This tokenizer has no mark for the start of a document: give a --prompt.")
        ids = torch.tensor([tokenizer.end_id])
    torch.manual_seed(seed)
    new = module.generate(ids, max_new_tokens, temperature, top_k, tokenizer.end_id)
    # Decoded together, so that a character cut by the end of the prompt comes out whole.
    print(tokenizer.decode(torch.cat((ids, new))) if prompt else tokenizer.decode(new))
